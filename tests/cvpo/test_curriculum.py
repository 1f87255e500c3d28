"""Tracker, detectors and W_D against plain loops written from section 5 of the method."""

import copy
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cvpo.curriculum import (
    BOTTLENECK,
    EARLY,
    CurriculumConfig,
    Curve,
    DifficultyCurriculum,
    RoundClock,
    RoundReport,
    difficulty_weight,
)
from cvpo.trackers import BetaTracker
from tests.cvpo.states import assert_same_state, through_a_file

property_test = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 2**32 - 1)


# ------------------------------------------------------------------------------------- loops


@dataclass
class LoopTracker:
    """Section 5.1 and 5.2 for one prompt."""

    discount: float
    alpha: float = 1.0
    beta: float = 1.0
    visits: int = 0
    delta: float = math.nan

    @property
    def rho(self) -> float:
        return self.alpha / (self.alpha + self.beta)

    def observe(self, k: float, s: float) -> None:
        before = self.rho
        self.alpha = 1 + self.discount * (self.alpha - 1) + s
        self.beta = 1 + self.discount * (self.beta - 1) + k - s
        if self.visits >= 1:
            self.delta = (self.rho - before) / before
        self.visits += 1


@dataclass
class LoopCurriculum:
    """Section 5.3 and 5.5, a prompt at a time."""

    prompts: list[LoopTracker]
    config: CurriculumConfig
    phase: str = "early"
    round: int = -1
    counts: list[dict[int, list[float]]] = field(default_factory=lambda: [{}])
    sets: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def observe(self, prompt: int, k: float, s: float) -> None:
        self.prompts[prompt].observe(k, s)
        count = self.counts[-1].setdefault(prompt, [0.0, 0.0])
        count[0] += k
        count[1] += s

    def members(self) -> tuple[list[int], list[int]]:
        known = [i for i, prompt in enumerate(self.prompts) if prompt.visits >= 2]
        return (
            [i for i in known if self.prompts[i].rho <= self.config.low],
            [i for i in known if self.prompts[i].rho >= self.config.high],
        )

    def printed(self) -> tuple[bool, bool]:
        low, high = ([i for i in part if i in self.counts[-1]] for part in self.members())
        changes = (
            ([abs(self.prompts[i].delta) for i in low], self.config.low_delta),
            ([self.prompts[i].delta for i in high], self.config.high_delta),
        )
        return tuple(self.quantified(delta, limit) for delta, limit in changes)  # type: ignore[return-value]

    def quantified(self, delta: list[float], limit: float) -> bool:
        if len(delta) < max(1, self.config.min_prompts):
            return False
        if self.config.quantifier == "mean":
            mean = math.fsum(delta) / len(delta)
            assume(abs(mean - limit) > 1e-9)  # two ways of summing may disagree on the very limit
            return mean <= limit
        share = sum(x <= limit for x in delta) / len(delta)
        return share >= (1.0 if self.config.quantifier == "all" else self.config.fraction)

    def pooled(self) -> tuple[bool, bool]:
        w = self.config.window
        if self.round < w + 2:
            return False, False
        low, high = self.sets[self.round - w]
        return self.pooled_set(low), self.pooled_set(high)

    def pooled_set(self, members: list[int]) -> bool:
        if len(members) < max(1, self.config.min_prompts):
            return False
        w = self.config.window
        window = self.counts[self.round - w + 1 : self.round + 1]
        n, s = [0.0, 0.0], [0.0, 0.0]
        for age, counted in enumerate(window):
            for i in members:
                k_s = counted.get(i, [0.0, 0.0])
                n[age // (w // 2)] += k_s[0]
                s[age // (w // 2)] += k_s[1]
        if 0 in n:
            return False
        assume(0 < sum(s) < sum(n))  # a rate of 0 or 1 has its own test
        p1, p2 = s[0] / n[0], s[1] / n[1]
        rise = (p2 - p1) / (w / 2)
        error = math.sqrt(p1 * (1 - p1) / n[0] + p2 * (1 - p2) / n[1]) / (w / 2)
        bound = rise + self.config.z * error
        assume(abs(bound - self.config.margin * p1) > 1e-9)
        return bound <= self.config.margin * p1

    def end_round(self) -> bool:
        self.round += 1
        self.sets.append(self.members())
        test = self.printed if self.config.detector == "printed" else self.pooled
        switched = self.phase == "early" and all(test())
        if switched:
            self.phase = "bottleneck"
        self.counts.append({})
        return switched


def stream(
    seed: int, num_prompts: int, rounds: int, *, settle: float = 0.0
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Rounds of observations: some prompts stay away, some come twice; `settle` freezes rates."""
    rng = np.random.default_rng(seed)
    rate = rng.choice([0.02, 0.1, 0.5, 0.95, 0.99], num_prompts)
    result = []
    for _ in range(rounds):
        ids = rng.permutation(
            np.repeat(np.arange(num_prompts), rng.choice([0, 1, 1, 2], num_prompts))
        )
        k = rng.choice([8, 16], len(ids))
        s = rng.binomial(k, rate[ids])
        result.append((torch.tensor(ids), torch.tensor(k), torch.tensor(s)))
        rate = np.clip(rate + (1 - settle) * rng.normal(0.02, 0.05, num_prompts), 0.01, 0.99)
    return result


# ------------------------------------------------------------------------------------ the curve

GRID = [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0]


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        ("early", [1.062281, 1.112254, 1.184202, 1.209675, 1.182055, 1.101760, 1.044277]),
        ("bottleneck", [1.031646, 1.143682, 1.171473, 0.953500, 0.588517, 0.186903, 0.0]),
    ],
)
def test_curve_golden(phase: str, expected: list[float]) -> None:
    rho = torch.tensor(GRID, dtype=torch.float64)
    assert difficulty_weight(rho, phase=phase).tolist() == pytest.approx(expected, abs=5e-7)


@pytest.mark.parametrize(
    ("phase", "at", "height"), [("early", 0.49818, 1.209677), ("bottleneck", 0.21982, 1.193187)]
)
def test_curve_rises_to_its_one_maximum_and_falls_after_it(
    phase: str, at: float, height: float
) -> None:
    rho = torch.linspace(0, 1, 100_001, dtype=torch.float64)
    weight = difficulty_weight(rho, phase=phase)
    top = int(weight.argmax())
    assert rho[top].item() == pytest.approx(at, abs=1e-5)
    assert weight[top].item() == pytest.approx(height, abs=5e-7)
    assert weight[: top + 1].diff().gt(0).all()
    assert weight[top:].diff().lt(0).all()
    assert weight.ge(0).all()


def test_early_curve_varies_by_eight_percent_only() -> None:
    weight = difficulty_weight(torch.linspace(0, 1, 1001), phase="early")
    assert weight.max().item() / weight.mean().item() < 1.08
    assert weight.min().item() / weight.mean().item() > 0.9


@property_test
@given(
    st.floats(0, 1),
    st.sampled_from(["early", "bottleneck"]),
    st.tuples(st.floats(0, 6), st.floats(-1, 1), st.floats(0, 6), st.floats(-1, 1)),
)
def test_curve_agrees_with_its_formula_for_any_constants(
    rho: float, phase: str, constants: tuple[float, float, float, float]
) -> None:
    k1, c1, k2, c2 = constants
    expected = 2 / (1 + math.exp(-k1 * (rho - c1))) / (1 + math.exp(k2 * (rho - c2)))
    if phase == "bottleneck":
        expected *= 1 - rho**2
    found = difficulty_weight(
        torch.tensor([[rho]], dtype=torch.float64), phase=phase, constants=Curve(*constants)
    )
    assert found.shape == (1, 1)
    assert found.item() == pytest.approx(expected, abs=1e-12)


def test_curve_constants_are_the_papers_and_narrow_floats_are_widened() -> None:
    assert tuple(EARLY) == (1.6, -0.2, 2.0, 1.2)
    assert tuple(BOTTLENECK) == (4.1, -0.1, 2.0, 0.9)
    rho = torch.tensor(GRID).bfloat16()
    for phase in ("early", "bottleneck"):
        found = difficulty_weight(rho, phase=phase)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, difficulty_weight(rho.float(), phase=phase))
    with pytest.raises(ValueError, match="phase"):
        difficulty_weight(rho, phase="late")


# ------------------------------------------------------------------------------- observations


@pytest.mark.parametrize(
    ("prompt", "trials", "successes"),
    [
        ([4], [8], [1]),
        ([-1], [8], [1]),
        ([0], [8], [9]),
        ([0], [8], [-1]),
        ([0], [-8], [-9]),
        ([0], [8], [math.nan]),
        ([0], [math.inf], [1]),
        ([0, 1], [8], [1]),
    ],
)
def test_impossible_observations_are_refused_and_change_nothing(
    prompt: list[int], trials: list[float], successes: list[float]
) -> None:
    curriculum = DifficultyCurriculum(4)
    good = (torch.tensor([1]), torch.tensor([8]), torch.tensor([3]))
    curriculum.observe(*good)
    before = copy.deepcopy(curriculum.state_dict())
    bad = (torch.tensor(prompt), torch.tensor(trials), torch.tensor(successes))
    for observe in (curriculum.observe, curriculum.tracker.observe):
        with pytest.raises(ValueError, match="observe"):
            observe(*bad)
        # A good entry beside the bad one is not taken either.
        with pytest.raises(ValueError, match="observe"):
            observe(*(torch.cat(pair) for pair in zip(good, bad, strict=True)))
    assert_same_state(curriculum.state_dict(), before)


def test_impossible_discounts_are_refused() -> None:
    for discount in (0.0, 1.1, math.nan):
        with pytest.raises(ValueError, match="discount"):
            CurriculumConfig(discount=discount)


# --------------------------------------------------------------------------------- the detectors

configs = st.sampled_from(
    [
        CurriculumConfig(),
        CurriculumConfig(quantifier="all", low_delta=0.4, high_delta=0.05),
        CurriculumConfig(quantifier="fraction", fraction=0.6, low_delta=0.2, high_delta=0.02),
        CurriculumConfig(min_prompts=3, low_delta=0.3),
        CurriculumConfig(discount=0.8, low_delta=0.3, high_delta=0.05),
        CurriculumConfig(detector="pooled", window=2, margin=0.1, z=1.6),
        CurriculumConfig(detector="pooled", window=4, margin=0.1, discount=0.9, z=1.0),
        CurriculumConfig(detector="pooled", window=4, margin=0.2, min_prompts=2, low=0.4, high=0.6),
    ]
)


@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(1, 10), configs, st.sampled_from([0.0, 1.0]))
def test_curriculum_agrees_with_its_loop_round_by_round(
    seed: int, num_prompts: int, config: CurriculumConfig, settle: float
) -> None:
    shipped = DifficultyCurriculum(num_prompts, config=config)
    loop = LoopCurriculum([LoopTracker(config.discount) for _ in range(num_prompts)], config)
    for ids, k, s in stream(seed, num_prompts, 14, settle=settle):
        shipped.observe(ids, k, s)
        for prompt, trials, successes in zip(ids.tolist(), k.tolist(), s.tolist(), strict=True):
            loop.observe(prompt, trials, successes)
        switched = loop.end_round()
        report = shipped.end_round()
        assert report.switched == switched
        assert report.phase == shipped.phase == loop.phase
        assert report.round == loop.round + 1
        expected = difficulty_weight(
            torch.tensor([x.rho for x in loop.prompts], dtype=torch.float64), phase=loop.phase
        )
        torch.testing.assert_close(
            shipped.weight(torch.arange(num_prompts)), expected.float(), rtol=1e-6, atol=1e-6
        )


def test_the_streams_of_the_comparison_lead_both_detectors_to_both_verdicts() -> None:
    for config in (
        CurriculumConfig(),
        CurriculumConfig(detector="pooled", window=2, margin=0.1, z=1.6),
    ):
        phases = set()
        for seed in range(12):
            curriculum = DifficultyCurriculum(10, config=config)
            for observations in stream(seed, 10, 14, settle=1.0):
                curriculum.observe(*observations)
                curriculum.end_round()
            phases.add(curriculum.phase)
        assert phases == {"early", "bottleneck"}


@property_test
@given(seeds, st.integers(1, 10), configs)
def test_renaming_prompts_renames_weights_and_changes_no_verdict(
    seed: int, num_prompts: int, config: CurriculumConfig
) -> None:
    names = torch.tensor(np.random.default_rng(seed).permutation(num_prompts))
    plain, renamed = (DifficultyCurriculum(num_prompts, config=config) for _ in range(2))
    for ids, k, s in stream(seed, num_prompts, 12):
        plain.observe(ids, k, s)
        renamed.observe(names[ids], k, s)
        assert plain.end_round().switched == renamed.end_round().switched
    everyone = torch.arange(num_prompts)
    assert torch.equal(plain.weight(everyone), renamed.weight(names))


def feed(
    curriculum: DifficultyCurriculum, successes: Sequence[float], trials: int = 16
) -> RoundReport:
    """One round in which every prompt is observed once."""
    n = len(successes)
    curriculum.observe(torch.arange(n), torch.full((n,), trials), torch.as_tensor(successes))
    return curriculum.end_round()


@pytest.mark.parametrize("quantifier", ["mean", "all", "fraction"])
@pytest.mark.parametrize("successes", [[], [0], [16], [8, 8]])
def test_empty_sets_never_switch_the_phase(quantifier: Any, successes: list[int]) -> None:
    curriculum = DifficultyCurriculum(2, config=CurriculumConfig(quantifier=quantifier))
    for _ in range(60):
        report = feed(curriculum, successes)
        assert not report.switched
    assert curriculum.phase == "early"


def test_the_printed_rule_switches_at_the_twentieth_visit_and_the_switch_stays() -> None:
    curriculum = DifficultyCurriculum(2)
    reports = [feed(curriculum, [0, 16]) for _ in range(20)]
    assert [r.switched for r in reports] == [False] * 19 + [True]
    assert "low set" in reports[-1].reason
    assert "high set" in reports[-1].reason
    assert reports[-1].low_delta == pytest.approx(0.049689, abs=5e-7)
    # The prompts come apart again, the phase does not.
    for successes in ([16, 0], [0, 16], [16, 0]):
        report = feed(curriculum, successes)
        assert not report.switched
        assert report.phase == "bottleneck"


def test_one_noisy_prompt_a_round_blocks_all_but_not_the_mean() -> None:
    verdicts = {}
    for quantifier in ("all", "mean", "fraction"):
        curriculum = DifficultyCurriculum(31, config=CurriculumConfig(quantifier=quantifier))
        fired = False
        for round_ in range(40):
            lucky = [3 * (round_ % 5 == i) for i in range(5)]
            fired |= feed(curriculum, [*lucky, *[0] * 25, 16]).switched
        verdicts[quantifier] = fired
    assert verdicts == {"all": False, "mean": True, "fraction": True}


def test_a_prompt_not_visited_in_a_round_takes_no_part_in_its_test() -> None:
    curriculum = DifficultyCurriculum(2)
    for _ in range(19):
        feed(curriculum, [0, 16])
    # Visit 20 of the low prompt would fire; without it the low set of this round is empty.
    curriculum.observe(torch.tensor([1]), torch.tensor([16]), torch.tensor([16]))
    report = curriculum.end_round()
    assert (report.low_count, report.high_count, report.switched) == (0, 1, False)


def test_min_prompts_guards_each_set_on_its_own() -> None:
    for successes, fires in (([0, 0, 16], False), ([0, 16, 16], False), ([0, 0, 16, 16], True)):
        curriculum = DifficultyCurriculum(4, config=CurriculumConfig(min_prompts=2))
        assert any(feed(curriculum, successes).switched for _ in range(30)) == fires


def test_the_weight_sees_this_steps_own_rollouts() -> None:
    curriculum = DifficultyCurriculum(2)
    before = curriculum.weight(torch.tensor([0]))
    curriculum.observe(torch.tensor([0]), torch.tensor([16]), torch.tensor([16]))
    after = curriculum.weight(torch.tensor([0]))
    expected = difficulty_weight(torch.tensor([17 / 18]), phase="early")
    assert after.item() == pytest.approx(expected.item())
    assert before.item() != after.item()
    assert after.dtype == torch.float32
    assert curriculum.weight(torch.zeros(0, dtype=torch.long)).shape == (0,)


def pooled_reports(
    counts: Callable[[int], list[int]], rounds: int, *, trials: int = 800, **settings: Any
) -> list[RoundReport]:
    curriculum = DifficultyCurriculum(
        len(counts(0)), config=CurriculumConfig(detector="pooled", **settings)
    )
    return [feed(curriculum, counts(round_), trials) for round_ in range(rounds)]


def switches(reports: list[RoundReport]) -> list[int]:
    """The rounds, from 0, that switched."""
    return [report.round - 1 for report in reports if report.switched]


def test_the_pooled_test_fires_first_at_round_window_plus_two() -> None:
    still = [100] * 20 + [700] * 20
    assert switches(pooled_reports(lambda _: still, 20)) == [10]
    assert switches(pooled_reports(lambda _: still, 20, window=4, margin=0.03)) == [6]


def test_the_pooled_test_does_not_fire_while_the_low_set_rises_by_two_percent_a_round() -> None:
    reports = pooled_reports(lambda e: [100 + 2 * e] * 20 + [700] * 20, 20)
    assert switches(reports) == []
    assert reports[10].high_stopped
    assert not reports[10].low_stopped
    assert reports[10].low_delta == pytest.approx(2 / 109, rel=1e-6)


def test_the_pooled_test_does_not_take_few_rollouts_for_a_stop() -> None:
    assert switches(pooled_reports(lambda _: [1, 7], 40, trials=8)) == []
    assert switches(pooled_reports(lambda _: [0, 8], 20, trials=8)) == []
    # A rate of exactly 0 or 1 has no binomial error; with enough rollouts it is a stop as well.
    assert switches(pooled_reports(lambda _: [0] * 20 + [800] * 20, 20)) == [10]


def test_the_pooled_test_looks_at_sets_fixed_before_its_window() -> None:
    # Half of the low prompts are solved from round 6 on. A set fixed at the window's end would
    # hold only the other half, which stands still; fixed before it, the low set has risen.
    def solved_late(round_: int) -> list[int]:
        return [100 if round_ < 6 else 800] * 10 + [100] * 10 + [700] * 20

    reports = pooled_reports(solved_late, 12, discount=0.5)
    assert reports[10].low_count == 20
    assert reports[10].low_delta > 0.1
    assert switches(reports) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("detector", "other"),
        ("quantifier", "some"),
        ("fraction", 0.0),
        ("fraction", 1.1),
        ("min_prompts", 0),
        ("low", 0.9),
        ("high", 1.1),
        ("window", 7),
        ("window", 0),
        ("margin", -0.1),
        ("low_delta", -0.1),
    ],
)
def test_bad_configuration_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} must"):
        CurriculumConfig(**{name: value})


# --------------------------------------------------------------------------- saving and loading


@property_test
@given(seeds, st.integers(1, 8), configs, st.integers(0, 12))
def test_a_curriculum_goes_on_after_a_resume_as_if_nothing_had_happened(
    seed: int, num_prompts: int, config: CurriculumConfig, cut: int
) -> None:
    rounds = stream(seed, num_prompts, 13)
    kept = DifficultyCurriculum(num_prompts, config=config)
    for observations in rounds[:cut]:
        kept.observe(*observations)
        kept.end_round()
    kept.observe(*rounds[cut])  # in the middle of a round
    resumed = DifficultyCurriculum(num_prompts, config=config)
    resumed.load_state_dict(through_a_file(kept.state_dict()))
    assert_same_state(resumed.state_dict(), kept.state_dict())
    for observations in [None, *rounds[cut + 1 :]]:
        for curriculum in (kept, resumed):
            if observations is not None:
                curriculum.observe(*observations)
        assert repr(kept.end_round()) == repr(resumed.end_round())
    assert torch.equal(
        kept.weight(torch.arange(num_prompts)), resumed.weight(torch.arange(num_prompts))
    )


def test_a_state_is_a_copy_on_both_ways() -> None:
    source, target = DifficultyCurriculum(2), DifficultyCurriculum(2)
    feed(source, [0, 16])
    source.observe(torch.tensor([0]), torch.tensor([16]), torch.tensor([1]))
    state = source.state_dict()
    frozen = copy.deepcopy(state)
    target.load_state_dict(state)
    for curriculum in (source, target):
        feed(curriculum, [3, 12])
    assert_same_state(state, frozen)


def used_curriculum() -> DifficultyCurriculum:
    curriculum = DifficultyCurriculum(3)
    for observations in stream(0, 3, 15):
        curriculum.observe(*observations)
        curriculum.end_round()
    return curriculum


@pytest.mark.parametrize("make", [used_curriculum, lambda: RoundClock(7)])
def test_states_with_missing_or_unknown_fields_are_refused_by_name(make: Callable[[], Any]) -> None:
    for name in make().state_dict():
        lacking = make().state_dict()
        del lacking[name]
        with pytest.raises(ValueError, match=name):
            make().load_state_dict(lacking)
    with pytest.raises(ValueError, match="gamma"):
        make().load_state_dict({**make().state_dict(), "gamma": 1.0})


def test_a_curriculum_refuses_a_state_that_is_not_its_own() -> None:
    with pytest.raises(ValueError, match=r"prompts|round_trials"):
        DifficultyCurriculum(4).load_state_dict(DifficultyCurriculum(3).state_dict())
    with pytest.raises(ValueError, match="phase"):
        DifficultyCurriculum(3).load_state_dict({**used_curriculum().state_dict(), "phase": "late"})


@pytest.mark.parametrize("name", ["round_trials", "round_successes"])
def test_a_curriculum_refuses_round_counts_of_another_problem_set(name: str) -> None:
    state = used_curriculum().state_dict()
    state[name] = torch.zeros(4, dtype=torch.float64)
    with pytest.raises(ValueError, match=name):
        used_curriculum().load_state_dict(state)


@pytest.mark.parametrize("history", [lambda kept: kept[1:], lambda kept: [*kept, kept[0]]])
def test_a_history_of_too_few_or_too_many_rounds_is_refused(history: Callable[..., Any]) -> None:
    # Too short a history is as wrong as too long a one: its first entry is not the round that
    # lies a window ago.
    state = used_curriculum().state_dict()
    state["detector"]["history"] = history(state["detector"]["history"])
    with pytest.raises(ValueError, match="15 rounds, window 8 needs 9"):
        used_curriculum().load_state_dict(state)


OTHER_CONFIGURATION: dict[str, Any] = {
    "discount": 0.9,
    "detector": "pooled",
    "quantifier": "all",
    "fraction": 0.5,
    "min_prompts": 2,
    "low": 0.2,
    "high": 0.9,
    "low_delta": 0.1,
    "high_delta": 0.1,
    "window": 4,
    "margin": 0.02,
    "z": 1.0,
    "early": BOTTLENECK,
    "bottleneck": EARLY,
}


@pytest.mark.parametrize("name", [field.name for field in fields(CurriculumConfig)])
def test_the_state_of_another_configuration_is_refused_by_name(name: str) -> None:
    here = DifficultyCurriculum(3, config=CurriculumConfig(**{name: OTHER_CONFIGURATION[name]}))
    before = copy.deepcopy(here.state_dict())
    with pytest.raises(ValueError, match=rf"the state has {name} .*, here it is "):
        here.load_state_dict(through_a_file(used_curriculum().state_dict()))
    assert_same_state(here.state_dict(), before)


# ------------------------------------------------------------------------------------ rounds


@property_test
@given(st.integers(1, 40), st.lists(st.integers(0, 100), max_size=30))
def test_a_round_ends_with_the_step_that_completes_a_pass(length: int, steps: list[int]) -> None:
    clock, total = RoundClock(length), 0
    for prompts in steps:
        before = total // length
        total += prompts
        assert clock.tick(prompts) == (total // length > before)
        resumed = RoundClock(length)
        resumed.load_state_dict(through_a_file(clock.state_dict()))
        clock = resumed


def test_rounds_can_be_counted_in_steps() -> None:
    clock = RoundClock(1000, round_steps=3)
    assert [clock.tick(256) for _ in range(7)] == [False, False, True] * 2 + [False]
    for arguments in ({"num_prompts": 0}, {"num_prompts": 5, "round_steps": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            RoundClock(**arguments)


@pytest.mark.parametrize(
    ("here", "named"),
    [
        (RoundClock(100, round_steps=10), "round_steps None, here it is 10"),
        (RoundClock(50), "num_prompts 100, here it is 50"),
    ],
)
def test_the_state_of_another_clock_is_refused(here: RoundClock, named: str) -> None:
    clock = RoundClock(100)
    clock.tick(57)  # of 100 prompts; read as steps, the next one would end a round of 10
    with pytest.raises(ValueError, match=named):
        here.load_state_dict(clock.state_dict())
    assert here.elapsed == 0


# ------------------------------------------------------------------------------- one real run

ROLLOUTS = 8


def real_counts() -> list[np.ndarray]:
    """Successes of 8 rollouts, by prompt and epoch, of one real training run."""
    name = "data/runs/one_shot_rlvr_acc_step_500.json"
    path = Path(__file__).resolve().parents[2].parent / "shared" / name
    if not path.exists():
        pytest.skip(f"needs ../shared/{name}, the accuracy history of a real run")
    accuracies = json.loads(path.read_text()).values()
    return [np.round(ROLLOUTS * np.array(history)) for history in accuracies]


def firing_epoch(counts: np.ndarray, **settings: Any) -> int | None:
    """The epoch, from 0, at which the phase switches; counts are [prompts, epochs]."""
    curriculum = DifficultyCurriculum(len(counts), config=CurriculumConfig(**settings))
    for epoch, successes in enumerate(counts.T):
        if feed(curriculum, successes, ROLLOUTS).switched:
            return epoch
    return None


def frozen(counts: np.ndarray, seed: int, *, by_epoch: bool) -> np.ndarray:
    """80 epochs in which every prompt keeps the mean rate of its history.

    The method's ranges are over few seeds, so they hold for the order in which its numbers were
    drawn: epoch by epoch for the printed rule, prompt by prompt for the pooled one.
    """
    rate = counts.mean(axis=1) / ROLLOUTS
    rng = np.random.default_rng(seed)
    if by_epoch:
        return rng.binomial(ROLLOUTS, rate, size=(80, len(rate))).T
    return rng.binomial(ROLLOUTS, rate[:, None], size=(len(rate), 80))


def common_epochs() -> np.ndarray:
    return np.stack([history[:44] for history in real_counts()])


@pytest.mark.parametrize(
    ("discount", "log_likelihood", "squared_error"),
    [
        (1.0, -1.1344, 0.01895),
        (0.95, -1.0820, 0.01641),
        (0.9, -1.0644, 0.01534),
        (0.8, -1.0760, 0.01519),
        (0.7, -1.1049, 0.01589),
        (0.5, -1.1711, 0.01817),
    ],
)
def test_real_drift_is_predicted_best_with_some_forgetting(
    discount: float, log_likelihood: float, squared_error: float
) -> None:
    counts = real_counts()
    tracker = BetaTracker(len(counts), discount=discount)
    likelihoods, errors = [], []
    for epoch in range(max(len(history) for history in counts)):
        ids = [i for i, history in enumerate(counts) if epoch < len(history)]
        prompt = torch.tensor(ids)
        s = torch.tensor([counts[i][epoch] for i in ids], dtype=torch.float64)
        if epoch >= 5:
            a, b = tracker.alpha[prompt], tracker.beta[prompt]
            log_beta = [
                torch.lgamma(x) + torch.lgamma(y) - torch.lgamma(x + y)
                for x, y in ((a + s, b + ROLLOUTS - s), (a, b))
            ]
            log_choose = (
                math.lgamma(ROLLOUTS + 1) - torch.lgamma(s + 1) - torch.lgamma(ROLLOUTS - s + 1)
            )
            likelihoods.append(log_choose + log_beta[0] - log_beta[1])
            errors.append((tracker.rho[prompt] - s / ROLLOUTS).square())
        tracker.observe(prompt, torch.full((len(ids),), ROLLOUTS), s)
    assert len(torch.cat(errors)) == 57_955
    assert torch.cat(likelihoods).mean().item() == pytest.approx(log_likelihood, abs=5.1e-5)
    assert torch.cat(errors).mean().item() == pytest.approx(squared_error, abs=5.1e-6)


@pytest.mark.parametrize(
    ("discount", "epoch"), [(1.0, 22), (0.98, 26), (0.95, 35), (0.9, None), (0.8, None)]
)
def test_printed_rule_on_the_real_run(discount: float, epoch: int | None) -> None:
    assert firing_epoch(common_epochs(), discount=discount) == epoch


def test_printed_rule_fires_on_a_frozen_policy_much_as_on_the_improving_one() -> None:
    counts = common_epochs()
    for seed in range(10):
        control = frozen(counts, seed, by_epoch=True)
        assert firing_epoch(control, discount=1.0) in (20, 21)
        assert firing_epoch(control, discount=0.95) in range(24, 33)
        assert firing_epoch(control, discount=0.9) is None


@pytest.mark.parametrize("margin", [0.005, 0.01, 0.02])
def test_pooled_detector_never_fires_on_the_improving_run(margin: float) -> None:
    epoch = firing_epoch(common_epochs(), detector="pooled", discount=0.9, margin=margin)
    assert epoch is None


def test_pooled_detector_fires_on_every_frozen_policy() -> None:
    counts = common_epochs()
    for seed in range(10):
        epoch = firing_epoch(frozen(counts, seed, by_epoch=False), detector="pooled", discount=0.9)
        assert epoch in range(10, 20)


# ------------------------------------------------------------------------------- odd arguments


def test_observing_tensors_with_gradients_keeps_the_state_free_of_them() -> None:
    curriculum = DifficultyCurriculum(2)
    counts = torch.tensor([4.0], requires_grad=True)
    curriculum.observe(torch.tensor([0]), counts, counts / 2)
    curriculum.end_round()
    assert_same_state(through_a_file(curriculum.state_dict()), curriculum.state_dict())
    assert not curriculum.tracker.rho.requires_grad
    assert not curriculum.weight(torch.tensor([0])).requires_grad


@pytest.mark.parametrize("prompt", [-1, 3])
def test_the_weight_of_an_unknown_prompt_is_refused(prompt: int) -> None:
    with pytest.raises(ValueError, match=r"prompts must lie in 0\.\.2"):
        DifficultyCurriculum(3).weight(torch.tensor([0, prompt]))


@pytest.mark.parametrize("name", ["trials", "successes", "low", "high"])
def test_a_history_that_does_not_fit_is_refused_and_changes_nothing(name: str) -> None:
    source, target = DifficultyCurriculum(3), DifficultyCurriculum(3)
    source.end_round()
    before = copy.deepcopy(target.state_dict())
    state = source.state_dict()
    (whole,) = state["detector"]["history"]
    lacking = {key: entry for key, entry in whole.items() if key != name}
    for bad in (lacking, {**whole, name: torch.ones(4)}):
        detector = {**state["detector"], "history": [bad]}
        with pytest.raises(ValueError, match=f"history.*{name}"):
            target.load_state_dict({**state, "detector": detector})
    assert_same_state(target.state_dict(), before)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("high_delta", math.nan),
        ("early", Curve(1.6, math.nan, 2.0, 1.2)),
        ("bottleneck", (4.1, -0.1)),
    ],
)
def test_constants_that_are_no_numbers_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be"):
        CurriculumConfig(**{name: value})
