"""Every method's declaration, and how A' is put together from it (eq. 27)."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cvpo.advantage import gae, group_advantage, length_adaptive_lambda, terminal_rewards
from cvpo.estimator import (
    METHODS,
    Method,
    Moments,
    advantage_moments,
    estimate_advantages,
    mean_and_deviation,
    weighted_advantages,
)

seeds = st.integers(0, 2**32 - 1)

# What the definitions say, method by method; whatever a row leaves out is at OTHERWISE.
OTHERWISE = {
    "clip_low": 0.2,
    "clip_high": 0.2,
    "value_pretraining_steps": 0,
    "lm_coefficient": 0.0,
    "length_adaptive_alpha": None,
    "stochasticity": False,
    "curriculum": False,
    "lag": 0,
    "dynamic_sampling": False,
    "overlong_penalty": False,
}
VAPO = {
    "advantage": "gae",
    "critic": True,
    "lambda_critic": 1.0,
    "length_adaptive_alpha": 0.05,
    "clip_high": 0.28,
    "reduction": "token",
    "value_pretraining_steps": 50,
    "lm_coefficient": 0.1,
}
CVPO = VAPO | {"length_adaptive_alpha": 0.17, "value_pretraining_steps": 21}
GRPO = {"advantage": "grpo", "critic": False, "reduction": "sequence"}
PPO = {
    "advantage": "gae",
    "critic": True,
    "lambda_critic": 0.95,
    "lambda_policy": 0.95,
    "reduction": "sequence",
}
DEFINITIONS = {
    "ppo": PPO,
    "vc-ppo": PPO | {"lambda_critic": 1.0, "value_pretraining_steps": 100},
    "vapo": VAPO,
    "grpo": GRPO,
    "grpo-async": GRPO | {"reduction": "token", "clip_high": 0.28, "lag": 1},
    "dr-grpo": {"advantage": "dr-grpo", "critic": False, "reduction": "fixed"},
    "dapo": GRPO
    | {
        "reduction": "token",
        "clip_high": 0.28,
        "dynamic_sampling": True,
        "overlong_penalty": True,
    },
    "rloo": {"advantage": "rloo", "critic": False, "reduction": "token"},
    "cvpo": CVPO | {"stochasticity": True, "curriculum": True},
    "cvpo-stochasticity": CVPO | {"stochasticity": True},
    "cvpo-curriculum": CVPO | {"curriculum": True},
}


def batch(seed: int, B: int = 12, T: int = 9) -> dict[str, Tensor]:
    """Groups of three, ragged masks with gaps, about one empty trajectory in ten."""
    rng = np.random.default_rng(seed)
    mask = (rng.random((B, T)) < 0.8) & (np.arange(T) < rng.integers(1, T + 1, (B, 1)))
    return {
        "reward": torch.tensor(rng.choice([-1.0, 1.0], B)),
        "group": torch.tensor(np.repeat(np.arange(B // 3), 3)[rng.permutation(B)]),
        "response_mask": torch.tensor(mask & (rng.random((B, 1)) < 0.9)),
        "values": torch.tensor(rng.normal(size=(B, T))),
    }


def tokens(x: Tensor, mask: Tensor) -> list[float]:
    return [a for row, keep in zip(x.tolist(), mask.tolist(), strict=True)
            for a, k in zip(row, keep, strict=True) if k]  # fmt: skip


# ---------------------------------------------------------------------------------- declarations


def test_the_methods_are_those_that_are_defined() -> None:
    assert METHODS.keys() == DEFINITIONS.keys()


@pytest.mark.parametrize("name", sorted(DEFINITIONS))
def test_a_method_declares_what_its_definition_says(name: str) -> None:
    method = METHODS[name]
    for field, expected in (OTHERWISE | DEFINITIONS[name]).items():
        assert getattr(method, field) == expected, field
    assert method.name == name
    assert method.source.startswith("arXiv ")


def test_the_definitions_speak_of_every_field() -> None:
    said = OTHERWISE.keys() | set().union(*DEFINITIONS.values())
    declared = {field.name for field in dataclasses.fields(Method)} | {"critic"}
    assert said | {"name", "source"} == declared


# ------------------------------------------------------------------------------------- estimates


@pytest.mark.parametrize("name", sorted(DEFINITIONS))
@given(seed=seeds, gamma=st.sampled_from([1.0, 0.9]))
def test_an_estimate_is_the_direct_call_that_the_method_names(
    name: str, seed: int, gamma: float
) -> None:
    data, method = batch(seed), METHODS[name]
    mask = data["response_mask"]
    found = estimate_advantages(method, **data, gamma=gamma)
    if method.advantage != "gae":
        expected = group_advantage(data["reward"], data["group"], kind=method.advantage)
        torch.testing.assert_close(found.advantages, torch.where(mask, expected[:, None], 0.0))
        assert found.returns is None
        return
    rewards = terminal_rewards(data["reward"], mask)
    lam: float | Tensor = 0.95
    alpha = DEFINITIONS[name].get("length_adaptive_alpha")
    if alpha is not None:
        lam = length_adaptive_lambda(mask.sum(1), alpha=float(str(alpha)))
    advantages, _ = gae(rewards, data["values"], mask, gamma=gamma, lam=lam)
    target = float(str(DEFINITIONS[name]["lambda_critic"]))
    _, returns = gae(rewards, data["values"], mask, gamma=gamma, lam=target)
    torch.testing.assert_close(found.advantages, advantages, rtol=0, atol=0)
    torch.testing.assert_close(found.returns, returns, rtol=0, atol=0)


@given(seeds)
def test_value_targets_and_advantages_are_decoupled(seed: int) -> None:
    data = batch(seed)
    reward, mask = data["reward"], data["response_mask"]
    method = dataclasses.replace(METHODS["cvpo"], lambda_critic=1.0, length_adaptive_alpha=1.0)
    found = estimate_advantages(method, **data)
    # lambda_critic = 1: the targets are Monte-Carlo returns, whatever the critic says.
    assert found.returns is not None
    torch.testing.assert_close(found.returns, torch.where(mask, reward[:, None], 0.0))
    lower = estimate_advantages(dataclasses.replace(method, lambda_critic=0.1), **data)
    assert lower.returns is not None
    torch.testing.assert_close(lower.advantages, found.advantages, rtol=0, atol=0)
    if mask.sum(1).max() > 1:
        assert not torch.equal(lower.returns, found.returns)


def test_a_method_with_a_critic_needs_its_values() -> None:
    data = batch(0)
    del data["values"]
    with pytest.raises(ValueError, match="cvpo has a critic"):
        estimate_advantages(METHODS["cvpo"], **data)
    assert estimate_advantages(METHODS["grpo"], **data).returns is None


@pytest.mark.parametrize("name", sorted(DEFINITIONS))
def test_what_stands_in_masked_slots_does_not_matter(name: str) -> None:
    data = batch(3)
    mask = data["response_mask"]
    clean = estimate_advantages(METHODS[name], **data)
    dirty = {**data, "values": torch.where(mask, data["values"], math.nan)}
    found = estimate_advantages(METHODS[name], **dirty)
    assert torch.equal(found.advantages, clean.advantages)
    assert found.advantages[~mask].eq(0).all()
    if clean.returns is not None and found.returns is not None:
        assert torch.equal(found.returns, clean.returns)


# --------------------------------------------------------------------------------------- moments


@given(seeds, st.integers(0, 12), st.integers(0, 12), st.floats(-1e3, 1e3))
def test_moments_say_the_same_however_the_rows_are_cut(
    seed: int, one: int, two: int, offset: float
) -> None:
    data = batch(seed)
    mask = data["response_mask"]
    A = torch.where(mask, data["values"] + offset, math.nan)
    chosen = tokens(A, mask)
    parts = torch.tensor_split(torch.arange(len(A)), sorted((one, two)))
    pieces = [advantage_moments(A[rows], mask[rows]) for rows in parts]
    gathered = Moments(
        *(torch.cat([getattr(p, name) for p in pieces]) for name in ("count", "mean", "square"))
    )
    mean, deviation = mean_and_deviation(gathered)
    # Not merely close: a row's moments do not know what it was gathered with.
    assert (mean, deviation) == mean_and_deviation(advantage_moments(A, mask))
    if chosen:
        assert mean == pytest.approx(math.fsum(chosen) / len(chosen), rel=1e-9, abs=1e-9)
        spread = math.fsum((a - mean) ** 2 for a in chosen) / len(chosen)
        assert deviation == pytest.approx(math.sqrt(spread), rel=1e-7, abs=1e-9)


def test_moments_of_single_precision_advantages_far_from_zero_keep_their_digits() -> None:
    A = 1e4 + torch.tensor([[0.0, 1.0], [2.0, 3.0]])
    mean, deviation = mean_and_deviation(advantage_moments(A, torch.ones(2, 2)))
    assert mean == 10001.5
    assert deviation == pytest.approx(math.sqrt(1.25), rel=1e-12)


def test_nothing_has_mean_and_deviation_zero() -> None:
    nothing = advantage_moments(torch.full((3, 2), math.nan), torch.zeros(3, 2))
    assert mean_and_deviation(nothing) == (0.0, 0.0)
    assert mean_and_deviation(advantage_moments(torch.ones(0, 0), torch.ones(0, 0))) == (0.0, 0.0)


# --------------------------------------------------------------------------- weights (equation 27)


def loop_weighted(
    A: Tensor, mask: Tensor, w_s: Tensor, w_d: Tensor, whiten: str
) -> list[list[float]]:
    """Whiten over all response tokens, then multiply: one token at a time."""
    chosen = tokens(A, mask)
    mean = math.fsum(chosen) / len(chosen) if chosen else 0.0
    sd = math.sqrt(math.fsum((a - mean) ** 2 for a in chosen) / len(chosen)) if chosen else 0.0
    rows = []
    for i in range(len(A)):
        row = []
        for t in range(A.shape[1]):
            if not mask[i, t]:
                row.append(0.0)
                continue
            a = A[i, t].item()
            if whiten == "full":
                a -= mean
            if whiten != "none" and sd > 0:
                a /= sd
            row.append(w_s[i].item() * w_d[i].item() * a)
        rows.append(row)
    return rows


def weights(seed: int, B: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    return torch.tensor(rng.uniform(0.7, 1.3, B)), torch.tensor(rng.uniform(0, 1.2, B))


@pytest.mark.parametrize("whiten", ["none", "scale", "full"])
@given(seed=seeds)
def test_weighted_advantages_agree_with_their_loop(whiten: str, seed: int) -> None:
    data = batch(seed)
    mask, A = data["response_mask"], data["values"]
    w_s, w_d = weights(seed, len(A))
    dirty = torch.where(mask, A, math.nan)
    mean, deviation = mean_and_deviation(advantage_moments(dirty, mask))
    found = weighted_advantages(
        dirty, mask, w_s=w_s, w_d=w_d, whiten=whiten, mean=mean, deviation=deviation
    )
    expected = torch.tensor(loop_weighted(A, mask, w_s, w_d, whiten), dtype=torch.float64)
    torch.testing.assert_close(found, expected)
    assert found[~mask].eq(0).all()


@pytest.mark.parametrize("whiten", ["none", "scale"])
@given(seed=seeds)
def test_no_sign_flips_unless_the_mean_is_subtracted(whiten: str, seed: int) -> None:
    data = batch(seed)
    mask, A = data["response_mask"], data["values"] + 2
    w_s, w_d = weights(seed, len(A))
    mean, deviation = mean_and_deviation(advantage_moments(A, mask))
    found = weighted_advantages(
        A, mask, w_s=w_s, w_d=w_d, whiten=whiten, mean=mean, deviation=deviation
    )
    assert torch.equal(found[mask].sign(), ((w_d > 0)[:, None] * A)[mask].sign())


def test_full_whitening_flips_signs() -> None:
    A, ones = torch.tensor([[1.0, 2.0, 6.0]]), torch.ones(1)
    found = weighted_advantages(
        A,
        torch.ones(1, 3),
        w_s=ones,
        w_d=ones,
        whiten="full",
        mean=3.0,
        deviation=math.sqrt(14 / 3),
    )
    expected = [-2 / math.sqrt(14 / 3), -1 / math.sqrt(14 / 3), 3 / math.sqrt(14 / 3)]
    assert found[0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("whiten", ["none", "scale", "full"])
def test_a_deviation_of_zero_divides_nothing(whiten: str) -> None:
    A, mask = torch.full((2, 2), 0.7), torch.ones(2, 2)
    mean, deviation = mean_and_deviation(advantage_moments(A, mask))
    assert deviation == 0.0
    found = weighted_advantages(
        A,
        mask,
        w_s=torch.ones(2),
        w_d=torch.full((2,), 0.5),
        whiten=whiten,
        mean=mean,
        deviation=deviation,
    )
    expected = 0.0 if whiten == "full" else 0.35
    assert found.flatten().tolist() == pytest.approx([expected] * 4, abs=1e-7)


def test_unknown_whitening_is_refused() -> None:
    ones = torch.ones(1)
    with pytest.raises(ValueError, match=r"whiten.*'centre'"):
        weighted_advantages(ones[None], ones[None], w_s=ones, w_d=ones, whiten="centre")


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"advantages": torch.ones(1, 3)}, r"advantages.*\[B, T\]"),
        ({"response_mask": torch.ones(1, 3)}, r"response_mask.*\[B, T\]"),
        ({"w_s": torch.ones(1)}, r"w_s must be \[B\] = \[2\], got \(1,\)"),
        ({"w_d": torch.ones(2, 1)}, r"w_d must be \[B\] = \[2\], got \(2, 1\)"),
    ],
)
def test_weights_that_would_broadcast_are_refused(changed: dict[str, Tensor], named: str) -> None:
    whole = {
        "advantages": torch.ones(2, 3),
        "response_mask": torch.ones(2, 3),
        "w_s": torch.ones(2),
        "w_d": torch.ones(2),
    }
    with pytest.raises(ValueError, match=named):
        weighted_advantages(**{**whole, **changed})


def test_moments_under_the_mask_of_another_batch_are_refused() -> None:
    with pytest.raises(ValueError, match=r"advantage_moments.*\[B, T\]"):
        advantage_moments(torch.ones(2, 3), torch.ones(1, 3))


@pytest.mark.parametrize("method", ["grpo", "ppo"])
@pytest.mark.parametrize("short", ["reward", "group"])
def test_one_reward_is_not_spread_over_the_batch(method: str, short: str) -> None:
    rows = {"reward": torch.ones(3), "group": torch.zeros(3, dtype=torch.long)}
    rows[short] = rows[short][:1]
    with pytest.raises(ValueError, match=rf"{short} must be \[B\] = \[3\], got \(1,\)"):
        estimate_advantages(
            METHODS[method],
            rows["reward"],
            rows["group"],
            torch.ones(3, 2),
            values=torch.zeros(3, 2),
        )


@pytest.mark.parametrize("whiten", ["scale", "full"])
def test_a_deviation_that_is_no_number_is_not_passed_over(whiten: str) -> None:
    A, mask, ones = torch.tensor([[1.0, math.nan], [2.0, 3.0]]), torch.ones(2, 2), torch.ones(2)
    mean, deviation = mean_and_deviation(advantage_moments(A, mask))
    found = weighted_advantages(
        A, mask, w_s=ones, w_d=ones, whiten=whiten, mean=mean, deviation=deviation
    )
    assert found.isnan().all()
