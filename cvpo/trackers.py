"""Trackers: the success rate of every prompt, estimated from the rollouts of a changing policy.

`BetaTracker` is CVPO's (eq. 17-19). The others are what it is compared with; `TRACKERS` finds one
by name. MoPPS's (arXiv 2507.04632), ``a <- l a + (1 - l) + s``, *is* `BetaTracker` with discount l.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Protocol

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor


class Tracker(Protocol):
    """Follows N prompts. Its Beta posterior is for intervals; ``rho`` is the estimate."""

    @property
    def rho(self) -> Float[Tensor, " N"]:
        """Estimated success rates, in [0, 1]; 1/2 before the first observation."""

    @property
    def alpha(self) -> Float[Tensor, " N"]:
        """First parameter of the Beta posterior."""

    @property
    def beta(self) -> Float[Tensor, " N"]:
        """Second parameter of the Beta posterior."""

    @property
    def visits(self) -> Int[Tensor, " N"]:
        """Observations so far."""

    def observe(
        self,
        prompt: Int[Tensor, " M"],
        trials: Shaped[Tensor, " M"],
        successes: Shaped[Tensor, " M"],
    ) -> None:
        """Adds what rollouts said, as `BetaTracker.observe`."""

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`; refuses one with other fields, constants or prompts."""


# ---------------------------------------------------------------------------------- restoring


class Restorable:
    """State by the names of attributes: constants are compared on loading, the rest is restored.

    Attributes may be numbers, text, tensors, generators, and objects with a state of their own.
    """

    fixed: ClassVar[tuple[str, ...]] = ()
    """What the constructor decided; a state with another value is foreign."""
    moving: ClassVar[tuple[str, ...]] = ()
    """What changes as it goes on."""

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly, as tensors and plain values."""
        return {name: _saved(getattr(self, name)) for name in (*self.fixed, *self.moving)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`.

        Raises:
            ValueError: A field is missing or unknown, a constant differs, or a tensor is of another
                number of prompts; names it. Nothing is changed.
        """
        owner = type(self).__name__
        check_fields(owner, state, dict.fromkeys((*self.fixed, *self.moving)))
        check_constants(owner, state, {name: getattr(self, name) for name in self.fixed})
        restored = {
            name: _restored(owner, name, getattr(self, name), state[name]) for name in self.moving
        }
        for name, value in restored.items():
            setattr(self, name, value)


def _saved(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, torch.Generator):
        return value.get_state()
    return value.state_dict() if hasattr(value, "state_dict") else value


def _restored(owner: str, name: str, here: Any, saved: Any) -> Any:
    """A new value; `here` stays as it is, so that a state refused halfway changes nothing."""
    if isinstance(here, Tensor):
        check_prompts(owner, {name: saved}, here)
        return saved.to("cpu", here.dtype, copy=True)
    if isinstance(here, torch.Generator):
        generator = torch.Generator()
        generator.set_state(saved)
        return generator
    if hasattr(here, "load_state_dict"):
        restored = copy.deepcopy(here)
        restored.load_state_dict(saved)
        return restored
    return saved


def check_fields(owner: str, state: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Refuses a state dict with missing or unknown fields, by name.

    Raises:
        ValueError: Lists them.
    """
    missing, unknown = (
        sorted(expected.keys() - state.keys()),
        sorted(state.keys() - expected.keys()),
    )
    if missing or unknown:
        raise ValueError(f"{owner}: state lacks {missing} and has unknown {unknown}")


def check_constants(owner: str, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Refuses a state that was saved under other constants than those here, by name.

    Raises:
        ValueError: Names the first.
    """
    for name, value in here.items():
        if isinstance(value, Tensor):
            if not torch.equal(saved[name], value):
                raise ValueError(f"{owner}: the state was saved with another {name}")
        elif saved[name] != value:
            raise ValueError(
                f"{owner}: the state has {name} {saved[name]}, here it is {value}; build it with "
                f"the state's {name}"
            )


def check_prompts(owner: str, loaded: Mapping[str, Tensor], here: Tensor) -> None:
    """Refuses tensors of a state that are not of this shape, by name.

    Raises:
        ValueError: Names the first.
    """
    for name, tensor in loaded.items():
        if tensor.shape != here.shape:
            raise ValueError(
                f"{owner}: {name} of the state has {tuple(tensor.shape)} prompts, here there are "
                f"{tuple(here.shape)}; was the problem set changed?"
            )


# ------------------------------------------------------------------------------------ trackers


class _Posterior(Restorable):
    """What the trackers share: a Beta posterior of every prompt, checks, and the order of visits.

    State is float64 on the CPU, so that 17 398 prompts cost nothing and sums of counts stay exact.
    A tracker is its `_update`.
    """

    moving: ClassVar[tuple[str, ...]] = ("alpha", "beta", "visits")

    def __init__(self, num_prompts: int) -> None:
        """All prompts at Beta(1, 1), unobserved."""
        if num_prompts < 1:
            raise ValueError(
                f"{type(self).__name__}: num_prompts must be at least 1, got {num_prompts}"
            )
        self.alpha = torch.ones(num_prompts, dtype=torch.float64)
        self.beta = torch.ones(num_prompts, dtype=torch.float64)
        self.visits = torch.zeros(num_prompts, dtype=torch.int64)

    @property
    def rho(self) -> Float[Tensor, " N"]:
        """Posterior mean success rate, ``alpha / (alpha + beta)``, in (0, 1)."""
        return self.alpha / (self.alpha + self.beta)

    @torch.no_grad()
    def observe(
        self,
        prompt: Int[Tensor, " M"],
        trials: Shaped[Tensor, " M"],
        successes: Shaped[Tensor, " M"],
    ) -> None:
        """Adds observations.

        A prompt that stands twice is observed twice, in that order. An observation of 0 trials says
        nothing and changes nothing.

        Args:
            prompt: Prompt ids in 0..N-1, [M].
            trials: Rollouts, at least 0, [M].
            successes: In 0..trials; fractions are partial credit, [M].

        Raises:
            ValueError: An unknown prompt or impossible count; names the entry. Nothing is changed.
        """
        prompt, trials, successes = checked_counts(
            "observe", prompt, trials, successes, num_prompts=len(self.alpha)
        )
        said = trials > 0
        prompt, trials, successes = prompt[said], trials[said], successes[said]
        for chosen in _distinct(prompt):
            self._update(prompt[chosen], trials[chosen], successes[chosen])
            self.visits[prompt[chosen]] += 1

    def _update(
        self,
        prompt: Int[Tensor, " M"],
        trials: Float[Tensor, " M"],
        successes: Float[Tensor, " M"],
    ) -> None:
        """Sets ``alpha`` and ``beta`` of these prompts, all distinct."""
        raise NotImplementedError


class BetaTracker(_Posterior):
    """Beta posterior of every prompt's success rate (eq. 17-19), with optional forgetting.

    Observing k rollouts with s successes: ``alpha <- 1 + d (alpha - 1) + s`` and
    ``beta <- 1 + d (beta - 1) + k - s``, d the discount. d = 1 is the paper's: it never forgets.

    ``delta [N]`` is ``(rho_t - rho_{t-1}) / rho_{t-1}`` between a prompt's last two observations;
    NaN until its second one.
    """

    fixed: ClassVar[tuple[str, ...]] = ("discount",)
    moving = (*_Posterior.moving, "delta")

    def __init__(self, num_prompts: int, *, discount: float = 1.0) -> None:
        """All prompts at Beta(1, 1), unobserved.

        Args:
            num_prompts: N; prompts are 0..N-1.
            discount: d in (0, 1].

        Raises:
            ValueError: N is not positive or d outside (0, 1].
        """
        super().__init__(num_prompts)
        self.discount = _discount("BetaTracker", discount)
        self.delta = torch.full((num_prompts,), math.nan, dtype=torch.float64)

    def _update(self, prompt: Tensor, trials: Tensor, successes: Tensor) -> None:
        alpha, beta = self.alpha[prompt], self.beta[prompt]
        before = alpha / (alpha + beta)
        alpha = 1 + self.discount * (alpha - 1) + successes
        beta = 1 + self.discount * (beta - 1) + (trials - successes)
        self.alpha[prompt], self.beta[prompt] = alpha, beta
        change = (alpha / (alpha + beta) - before) / before
        self.delta[prompt] = torch.where(self.visits[prompt] >= 1, change, math.nan)


class DBBTracker(_Posterior):
    """Discounted Beta-Bernoulli of arXiv 2603.18444, which forgets its prior too.

    ``alpha <- l alpha + s`` and ``beta <- l beta + n - s`` from Beta(1, 1), l the discount (the
    source takes .5 or .75): ``rho`` of a prompt that is always solved tends to 1.
    """

    fixed = ("discount",)

    def __init__(self, num_prompts: int, *, discount: float = 0.5) -> None:
        """All prompts at Beta(1, 1), unobserved.

        Args:
            num_prompts: N; prompts are 0..N-1.
            discount: l in (0, 1].

        Raises:
            ValueError: N is not positive or l outside (0, 1].
        """
        super().__init__(num_prompts)
        self.discount = _discount("DBBTracker", discount)

    def _update(self, prompt: Tensor, trials: Tensor, successes: Tensor) -> None:
        self.alpha[prompt] = self.discount * self.alpha[prompt] + successes
        # In this order, or rounding would eat what is left of an old failure: (tiny + 8) - 8 = 0.
        self.beta[prompt] = self.discount * self.beta[prompt] + (trials - successes)


class BOTSTracker(BetaTracker):
    """BOTS (arXiv 2510.26374): part of the evidence is a fixed difficulty's.

    ``alpha <- (1 - l) alpha + l + (1 - r) s + r m p~`` for m rollouts with s successes, likewise
    beta, with ``p~ = 1 - difficulty``. That is `BetaTracker` with discount 1 - l which observes
    ``(1 - r) s + r m p~`` successes.

    Decision: only observed prompts are updated, as by every other tracker.
    """

    fixed = (*BetaTracker.fixed, "prior_share", "difficulty")

    def __init__(
        self,
        num_prompts: int,
        *,
        difficulty: Float[Tensor, " N"],
        forgetting: float = 0.2,
        prior_share: float = 0.2,
    ) -> None:
        """All prompts at Beta(1, 1), unobserved.

        Args:
            num_prompts: N; prompts are 0..N-1.
            difficulty: Failure rate of the starting policy in [0, 1], [N].
            forgetting: l in [0, 1).
            prior_share: r in [0, 1]; 0 ignores the difficulty.

        Raises:
            ValueError: N is not positive, or another argument outside its range.
        """
        if not 0 <= forgetting < 1:
            raise ValueError(f"BOTSTracker: forgetting must lie in [0, 1), got {forgetting}")
        if not 0 <= prior_share <= 1:
            raise ValueError(f"BOTSTracker: prior_share must lie in [0, 1], got {prior_share}")
        super().__init__(num_prompts, discount=1 - forgetting)
        self.prior_share = prior_share
        self.difficulty = checked_rates("BOTSTracker: difficulty", difficulty, num_prompts)

    def _update(self, prompt: Tensor, trials: Tensor, successes: Tensor) -> None:
        expected = trials * (1 - self.difficulty[prompt])
        r = self.prior_share
        super()._update(prompt, trials, (1 - r) * successes + r * expected)


class MovingAverageTracker(_Posterior):
    """The plain alternative: the success rate over a prompt's last w observations.

    ``rho = s / n`` with s and n summed over the window, without a prior; 1/2 before the first
    observation. Its interval is that of ``Beta(1 + s, 1 + n - s)``.

    Decision: observations are pooled, so that one of 16 rollouts counts twice one of 8; w = 5 by
    default, the memory 1 / (1 - d) of a discount of .8, which follows real drift best.
    """

    fixed = ("window",)
    moving = (*_Posterior.moving, "last_trials", "last_successes")

    def __init__(self, num_prompts: int, *, window: int = 5) -> None:
        """All prompts unobserved.

        Args:
            num_prompts: N; prompts are 0..N-1.
            window: w, observations that count, at least 1.

        Raises:
            ValueError: N or w is not positive.
        """
        super().__init__(num_prompts)
        if window < 1:
            raise ValueError(f"MovingAverageTracker: window must be at least 1, got {window}")
        self.window = window
        self.last_trials = torch.zeros(num_prompts, window, dtype=torch.float64)
        self.last_successes = torch.zeros(num_prompts, window, dtype=torch.float64)

    @property
    def rho(self) -> Float[Tensor, " N"]:
        """Mean over the window, in [0, 1]; 1/2 before the first observation."""
        trials = self.last_trials.sum(1)
        mean = self.last_successes.sum(1) / trials.clamp(min=torch.finfo(trials.dtype).tiny)
        return torch.where(trials > 0, mean, 0.5)

    def _update(self, prompt: Tensor, trials: Tensor, successes: Tensor) -> None:
        oldest = self.visits[prompt] % self.window
        self.last_trials[prompt, oldest] = trials
        self.last_successes[prompt, oldest] = successes
        solved = self.last_successes[prompt].sum(1)
        self.alpha[prompt] = 1 + solved
        self.beta[prompt] = 1 + self.last_trials[prompt].sum(1) - solved


TRACKERS: dict[str, Callable[..., Tracker]] = {
    "beta": BetaTracker,
    "dbb": DBBTracker,
    "bots": BOTSTracker,
    "moving-average": MovingAverageTracker,
}
"""A tracker's name -> its constructor ``(num_prompts, *, ...)``; ``bots`` needs ``difficulty``."""


# -------------------------------------------------------------------------------------- checks


def checked_rates(name: str, rates: Float[Tensor, " N"], num_prompts: int) -> Float[Tensor, " N"]:
    """A rate of every prompt, of success or failure, as float64 on the CPU; a copy.

    Raises:
        ValueError: They are not [N], or one lies outside [0, 1]; names it.
    """
    rates = torch.as_tensor(rates).detach().to("cpu", torch.float64, copy=True)
    if rates.shape != (num_prompts,):
        raise ValueError(f"{name} must be [{num_prompts}], got {tuple(rates.shape)}")
    possible = (rates >= 0) & (rates <= 1)
    if not bool(possible.all()):
        at = int((~possible).nonzero()[0])
        raise ValueError(f"{name} must lie in [0, 1], prompt {at} has {rates[at].item():g}")
    return rates


def checked_counts(
    owner: str,
    prompt: Int[Tensor, " M"],
    trials: Shaped[Tensor, " M"],
    successes: Shaped[Tensor, " M"],
    *,
    num_prompts: int,
) -> tuple[Int[Tensor, " M"], Float[Tensor, " M"], Float[Tensor, " M"]]:
    """What rollouts said of prompts, as int64 and float64 on the CPU.

    Raises:
        ValueError: Shapes differ, a prompt is not one of 0..N-1, or a count is impossible; names
            the entry.
    """
    prompt = torch.as_tensor(prompt).cpu()
    trials = torch.as_tensor(trials).detach().to("cpu", torch.float64)
    successes = torch.as_tensor(successes).detach().to("cpu", torch.float64)
    if prompt.ndim != 1 or not prompt.shape == trials.shape == successes.shape:
        raise ValueError(
            f"{owner}: prompt, trials and successes must all be [M], got "
            f"{tuple(prompt.shape)}, {tuple(trials.shape)}, {tuple(successes.shape)}"
        )
    if prompt.numel() and (prompt.is_floating_point() or prompt.dtype == torch.bool):
        raise ValueError(f"{owner}: prompt ids must be integers, got {prompt.dtype}")
    prompt = prompt.long()
    known = (prompt >= 0) & (prompt < num_prompts)
    possible = trials.isfinite() & (successes >= 0) & (successes <= trials)
    for ok, what in (
        (known, f"unknown prompt (N = {num_prompts})"),
        (possible, "impossible count"),
    ):
        if not bool(ok.all()):
            at = int((~ok).nonzero()[0])
            raise ValueError(
                f"{owner}: {what} at entry {at}: prompt {int(prompt[at])}, "
                f"{trials[at].item():g} trials, {successes[at].item():g} successes"
            )
    return prompt, trials, successes


def _discount(owner: str, discount: float) -> float:
    if not 0 < discount <= 1:
        raise ValueError(f"{owner}: discount must lie in (0, 1], got {discount}")
    return discount


def _distinct(prompt: Int[Tensor, " M"]) -> Iterator[Int[Tensor, " m"]]:
    """Entries by rank among those of their prompt: the first of each, then the second, ..."""
    order = torch.argsort(prompt, stable=True)
    _, counts = torch.unique_consecutive(prompt[order], return_counts=True)
    starts = (counts.cumsum(0) - counts).repeat_interleave(counts)
    rank = torch.arange(len(prompt)) - starts
    yield from order[torch.argsort(rank, stable=True)].split(rank.bincount().tolist())
