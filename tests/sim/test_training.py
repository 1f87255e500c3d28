"""Whole training steps against a plain loop in double precision, and runs beside each other."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cvpo import (
    METHODS,
    SAMPLERS,
    CurriculumConfig,
    Curve,
    DifficultyCurriculum,
    Feedback,
    Pool,
    RoundClock,
    ShuffledEpochs,
    StochasticityConfig,
    difficulty_weight,
    stochasticity,
    thompson_weight,
)
from cvpo.curriculum import BOTTLENECK, EARLY
from cvpo.samplers.vcrl import VCRL, variance_share
from cvpo.stochasticity import ARMS
from sim.bandit import BanditConfig, Draws, ResponseModel
from sim.study import Desk, Settings
from sim.trace import Trace, compare, simulate
from sim.training import RETRIES, Budget, Setting, Step, Training

property_test = settings(max_examples=15, deadline=None)
SMALL = BanditConfig(prompts=24, held_out=4)
SHORT = Budget(batch=6, rollouts=4, steps=8, every=4)
EASILY = CurriculumConfig(low_delta=1e9, high_delta=1e9)
"""Of a detector that fires as soon as both sets have a prompt that was seen twice."""
ALL_METHODS = sorted(name for name, method in METHODS.items() if not method.lag)


def stream(seed: int, purpose: int) -> torch.Generator:
    """The generator that a run uses for one purpose."""
    state = np.random.SeedSequence([seed, purpose]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0] >> 1))


# ---------------------------------------------------------------------------------- a plain loop


@dataclass
class LoopRun:
    """One run, a response and a token at a time, by sections 2 to 6 of the method."""

    world: BanditConfig
    budget: Budget
    setting: Setting
    own: list[list[float]]
    loading: list[list[float]]
    error: list[float]
    learnable: list[float]
    generator: torch.Generator
    skill: list[float] = field(default_factory=list)
    alpha: list[float] = field(default_factory=list)
    beta: list[float] = field(default_factory=list)

    def step(self, prompts: Sequence[int]) -> dict[str, list[Any]]:
        n, g = len(prompts), self.budget.rollouts
        drawn = Draws.of(self.generator, n, g, self.world.responses.tokens)
        self.drawn = {name: getattr(drawn, name).double().tolist() for name in drawn._fields}
        chance = [self.probability(prompt) for prompt in prompts]
        kind = [
            [self.kind(chance[m], self.drawn["kind"][m][i]) for i in range(g)] for m in range(n)
        ]
        correct = [[self.credit(kind[m][i], m, i) for i in range(g)] for m in range(n)]
        values = [
            [self.values(prompts[m], chance[m], kind[m][i], correct[m][i], m, i) for i in range(g)]
            for m in range(n)
        ]
        raw = self.advantages(prompts, correct, values)
        sigma = [[deviation(values[m][i]) for i in range(g)] for m in range(n)]
        mu = [
            mean([s for k in range(n) if prompts[k] == prompts[m] for s in sigma[k]])
            for m in range(n)
        ]
        for m, prompt in enumerate(prompts):
            d, solved = self.setting.curriculum.discount, sum(correct[m])
            self.alpha[prompt] = 1 + d * (self.alpha[prompt] - 1) + solved
            self.beta[prompt] = 1 + d * (self.beta[prompt] - 1) + g - solved
        w_d = [self.difficulty_weight(prompt) for prompt in prompts]
        w_s = [
            [self.spread_weight(sigma[m][i] - mu[m], correct[m][i]) for i in range(g)]
            for m in range(n)
        ]
        self.update(prompts, chance, kind, self.multipliers(correct, raw, w_s, w_d))
        return {
            "kind": kind, "correct": correct, "values": values, "raw": raw,
            "sigma": sigma, "w_s": w_s, "w_d": w_d,
        }  # fmt: skip

    def probability(self, prompt: int) -> list[float]:
        lift = sum(a * b for a, b in zip(self.loading[prompt], self.skill, strict=True))
        logits = [own + (lift if k >= 2 else 0) for k, own in enumerate(self.own[prompt])]
        powers = [math.exp(logit - max(logits)) for logit in logits]
        return [power / sum(powers) for power in powers]

    def kind(self, chance: list[float], uniform: float) -> int:
        for k in range(3):
            uniform -= chance[k]
            if uniform < 0:
                return k
        return 3

    def credit(self, kind: int, m: int, i: int) -> float:
        share, parts = self.world.partial, self.world.parts
        if kind >= 2 or share == 0:
            return float(kind >= 2)
        uniform = self.drawn["credit"][m][i]
        others, each = parts - 1, min(1.0, share * parts / (parts - 1))
        for right in range(others):
            uniform -= math.comb(others, right) * each**right * (1 - each) ** (others - right)
            if uniform <= 0:
                return right / parts
        return others / parts

    def values(
        self, prompt: int, chance: list[float], kind: int, correct: float, m: int, i: int
    ) -> list[float]:
        model, rate = self.world.responses, chance[2] + chance[3]
        first = 2 * (rate + (1 - rate) * self.world.partial) - 1 + self.error[prompt]
        when = model.settles_high if kind % 2 else model.settles_low
        when += model.jitter * (2 * self.drawn["settles"][m][i] - 1)
        towards = 2 * correct - 1
        if self.drawn["foreseen"][m][i] >= (1 + model.foresight) / 2:
            towards = -towards
        return [
            first
            + model.noise * self.drawn["noise"][m][i][t]
            + (model.spread * (towards - first) if (t + 0.5) / model.tokens >= when else 0)
            for t in range(model.tokens)
        ]

    def advantages(
        self, prompts: Sequence[int], correct: list[list[float]], values: list[list[list[float]]]
    ) -> list[list[list[float]]]:
        """Of each token; lambda 1."""
        kind = METHODS[self.setting.method].advantage
        found = []
        for m, prompt in enumerate(prompts):
            rewards = [2 * r - 1 for k, p in enumerate(prompts) if p == prompt for r in correct[k]]
            group = []
            for i, r in enumerate(2 * r - 1 for r in correct[m]):
                v = values[m][i]
                if kind == "gae":
                    row, following, ahead = [0.0] * len(v), 0.0, 0.0
                    for t in reversed(range(len(v))):
                        following += (r if t == len(v) - 1 else 0) + ahead - v[t]
                        row[t], ahead = following, v[t]
                else:
                    number = r - mean(rewards)
                    if min(rewards) == max(rewards):
                        number = 0.0
                    elif kind == "grpo":
                        spread = sum((x - mean(rewards)) ** 2 for x in rewards)
                        number /= math.sqrt(spread / (len(rewards) - 1)) + 1e-6
                    elif kind == "rloo":
                        number = r - (sum(rewards) - r) / (len(rewards) - 1)
                    row = [number] * len(v)
                group.append(row)
            found.append(group)
        return found

    def spread_weight(self, deviation: float, R: float) -> float:
        if not METHODS[self.setting.method].stochasticity:
            return 1.0
        c = self.setting.stochasticity
        plus = 1 + float(c.alpha_p) * sigmoid(float(c.lambda_p) * deviation)
        minus = 1 - float(c.alpha_n) * sigmoid(-float(c.lambda_n) * deviation)
        return R * plus + (1 - R) * minus

    def difficulty_weight(self, prompt: int) -> float:
        if not METHODS[self.setting.method].curriculum:
            return 1.0
        rho = self.alpha[prompt] / (self.alpha[prompt] + self.beta[prompt])
        k1, c1, k2, c2 = self.setting.curriculum.early
        return 2 * sigmoid(k1 * (rho - c1)) * sigmoid(-k2 * (rho - c2))

    def multipliers(
        self,
        correct: list[list[float]],
        raw: list[list[list[float]]],
        w_s: list[list[float]],
        w_d: list[float],
    ) -> list[list[float]]:
        """Of each response's grad log pi: W_S W_D A, and the positive LM loss."""
        total = sum(sum(group) for group in correct)
        count = sum(len(group) for group in correct)
        lm = METHODS[self.setting.method].lm_coefficient
        return [
            [
                w_s[m][i] * w_d[m] * mean(raw[m][i])
                + (lm * correct[m][i] * count / total if total else 0)
                for i in range(len(correct[m]))
            ]
            for m in range(len(correct))
        ]

    def update(
        self,
        prompts: Sequence[int],
        chance: list[list[float]],
        kind: list[list[int]],
        multiplier: list[list[float]],
    ) -> None:
        for m, prompt in enumerate(prompts):
            if not self.learnable[prompt]:
                continue
            for k in range(4):
                slope = mean(
                    [
                        multiplier[m][i] * ((kind[m][i] == k) - chance[m][k])
                        for i in range(len(kind[m]))
                    ]
                )
                self.own[prompt][k] += self.world.own_rate * slope
                if k >= 2:
                    for j, load in enumerate(self.loading[prompt]):
                        self.skill[j] += self.world.skill_rate / self.budget.batch * load * slope


def mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def deviation(numbers: Sequence[float]) -> float:
    return math.sqrt(mean([(x - mean(numbers)) ** 2 for x in numbers]))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def loop_of(training: Training) -> LoopRun:
    bandit = training.bandit
    return LoopRun(
        training.world,
        training.budget,
        training.settings[0],
        own=bandit.own.double().tolist(),
        loading=bandit.loading[0].double().tolist(),
        error=bandit.error[0].double().tolist(),
        learnable=bandit.learnable[0].tolist(),
        generator=stream(training.seeds[0], 1),
        skill=[0.0] * training.world.skills,
        alpha=[1.0] * training.prompts,
        beta=[1.0] * training.prompts,
    )


MESSY = replace(
    SMALL,
    unlearnable=0.3,
    partial=0.35,
    high_log_odds=1.0,
    responses=ResponseModel(tokens=7, foresight=0.4, noise=0.1, bias=0.2, spread=0.6),
)
OTHER = StochasticityConfig(alpha_p=0.5, alpha_n=0.2, lambda_p=20.0, lambda_n=80.0)
CASES: dict[str, tuple[BanditConfig, Budget, Setting]] = {
    **{name: (SMALL, SHORT, Setting(name, name)) for name in ALL_METHODS if name != "dapo"},
    **{
        f"{name}, messy": (MESSY, SHORT, Setting(name, name))
        for name in ("cvpo", "vapo", "grpo", "dr-grpo", "rloo")
    },
    "constants": (
        MESSY,
        SHORT,
        Setting(
            "x",
            stochasticity=OTHER,
            curriculum=CurriculumConfig(discount=0.7, early=Curve(3.0, 0.1, 1.0, 0.8)),
        ),
    ),
    # Five do not divide twelve: a step over the border of an epoch draws prompts twice.
    "repeated prompts": (replace(MESSY, prompts=7), Budget(5, 4, 12), Setting("x")),
    "repeated prompts, grpo": (replace(MESSY, prompts=7), Budget(5, 4, 12), Setting("x", "grpo")),
    "the whole world in a batch": (SMALL, Budget(24, 3, 4), Setting("x")),
    "one prompt": (replace(SMALL, prompts=1), Budget(1, 4, 8), Setting("x")),
    "one rollout": (SMALL, Budget(6, 1, 8), Setting("x")),
    "one rollout, grpo": (SMALL, Budget(6, 1, 8), Setting("x", "grpo")),
    "two tokens": (replace(SMALL, responses=ResponseModel(tokens=2)), SHORT, Setting("x")),
    "many tokens": (replace(SMALL, responses=ResponseModel(tokens=32)), SHORT, Setting("x")),
    "one skill": (replace(SMALL, skills=1), SHORT, Setting("x")),
}


def assert_equals_loop(training: Training, steps: int) -> None:
    loop = loop_of(training)
    for _ in range(steps):
        step = training.step()
        found = {
            "kind": step.responses.kind,
            "correct": step.responses.correct,
            "values": step.responses.values,
            "raw": step.raw.view(step.responses.values.shape),
            "sigma": step.sigma.view(step.responses.kind.shape),
            "w_s": step.w_s.view(step.responses.kind.shape),
            "w_d": step.w_d,
        }
        expected = loop.step(step.responses.row.tolist())
        for name, tensor in found.items():
            wanted = torch.tensor(expected[name], dtype=torch.float64)
            assert torch.allclose(tensor.double(), wanted, rtol=1e-4, atol=1e-4), name
        for name, tensor in (
            ("own", training.bandit.own),
            ("skill", training.bandit.skill[0]),
            ("alpha", training.tracker.alpha),
            ("beta", training.tracker.beta),
        ):
            wanted = torch.tensor(getattr(loop, name), dtype=torch.float64)
            assert torch.allclose(tensor.double(), wanted, rtol=1e-4, atol=1e-4), name


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_that_of_the_loop(case: str) -> None:
    world, budget, setting = CASES[case]
    training = Training(world, budget, [setting], [3])
    before = training.bandit.own.clone()
    assert_equals_loop(training, budget.steps)
    moved = not torch.equal(training.bandit.own, before)
    assert moved == (case != "one rollout, grpo")  # a group of one has nobody to compare with


worlds = st.builds(
    BanditConfig,
    prompts=st.integers(5, 12),
    held_out=st.integers(0, 3),
    difficulty_mean=st.floats(-2, 2),
    difficulty_sd=st.floats(0, 3),
    skills=st.integers(1, 5),
    interference=st.floats(0, 1),
    own_rate=st.floats(0, 2),
    skill_rate=st.floats(0, 2),
    unlearnable=st.floats(0, 1),
    high_share=st.floats(0.05, 0.95),
    high_log_odds=st.floats(-2, 2),
    partial=st.sampled_from([0.0, 0.3, 0.75]),
    responses=st.builds(
        ResponseModel,
        tokens=st.integers(2, 20),
        spread=st.floats(0, 1),
        foresight=st.floats(-1, 1),
        noise=st.floats(0, 0.5),
        bias=st.floats(0, 0.5),
    ),
)


@property_test
@given(
    world=worlds,
    method=st.sampled_from(["cvpo", "vapo", "grpo", "dr-grpo", "rloo"]),
    seed=st.integers(0, 2**31),
)
def test_a_step_in_any_world_is_that_of_the_loop(
    world: BanditConfig, method: str, seed: int
) -> None:
    assert_equals_loop(Training(world, Budget(5, 3, 4), [Setting("x", method)], [seed]), 4)


def test_rloo_refuses_a_group_of_one() -> None:
    with pytest.raises(ValueError, match="one rollout"):
        Training(SMALL, Budget(6, 1, 8), [Setting("x", "rloo")], [0]).step()


# -------------------------------------------------------------------- the library's functions alone


def of_run(step: Step, run: int) -> tuple[Tensor, Tensor]:
    """Which groups, and which responses, are a run's."""
    mine = step.run == run
    return mine, mine.repeat_interleave(step.responses.kind.shape[1])


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("unit", ["absolute", "deviation_sd"])
def test_w_s_is_what_the_library_gives_for_each_run_alone(arm: Any, unit: Any) -> None:
    numbers = [(0.3, 0.3, 50.0, 50.0), (0.9, 0.1, 5.0, 300.0)]
    if unit == "deviation_sd":
        numbers = [(0.3, 0.3, 1.0, 1.0), (0.9, 0.1, 0.5, 3.0)]
    configs = [
        StochasticityConfig(*row, arm=arm, sharpness_unit=unit, mu="outcome_group")
        for row in numbers
    ]
    forms = [Setting(f"{i}", "cvpo-stochasticity", config) for i, config in enumerate(configs)]
    training = Training(MESSY, SHORT, forms, [0, 1])
    shuffles = [stream(seed, 2) for seed in training.seeds]
    for _ in range(3):
        step = training.step()
        for run, seed in enumerate(training.seeds):
            assert training.seeds[run] == seed
            mine, rows = of_run(step, run)
            found = stochasticity(
                step.sigma[rows],
                step.responses.row[mine].repeat_interleave(4),
                step.responses.correct[mine].flatten(),
                config=training.settings[run].stochasticity,
                entropy=step.responses.entropy[mine].flatten(),
                generator=shuffles[run],
            )
            torch.testing.assert_close(step.w_s[rows], found.weight)
            torch.testing.assert_close(step.mu[rows], found.mu)
    if arm not in ("none", "negative_only"):
        one, other = of_run(step, 0)[1], of_run(step, 2)[1]
        right = step.responses.correct.flatten() == 1
        assert not torch.allclose(step.w_s[one & right].mean(), step.w_s[other & right].mean())


@pytest.mark.parametrize("discount", [1.0, 0.8])
def test_tracker_rounds_switch_and_w_d_are_those_of_each_run_alone(discount: float) -> None:
    # Five does not divide 24: rounds end within steps. The first switches soon, the second never.
    soon = replace(EASILY, discount=discount, bottleneck=Curve(3.0, 0.1, 2.0, 0.7))
    never = CurriculumConfig(discount=discount, high_delta=-1e9)
    forms = [Setting("soon", curriculum=soon), Setting("never", curriculum=never)]
    training = Training(SMALL, Budget(5, 4, 60), forms, [0, 1])
    curricula = [DifficultyCurriculum(24, config=s.curriculum) for s in training.settings]
    clocks = [RoundClock(24) for _ in curricula]
    phases: list[list[str]] = [[] for _ in curricula]
    for number in range(1, 61):
        step = training.step()
        for run, curriculum in enumerate(curricula):
            mine, _ = of_run(step, run)
            prompt = step.responses.row[mine] - run * training.bandit.size
            solved = step.responses.correct[mine].sum(1)
            curriculum.observe(prompt, torch.full((5,), 4), solved)
            phases[run].append(curriculum.phase)
            torch.testing.assert_close(step.w_d[mine], curriculum.weight(prompt))
            every = curriculum.weight(torch.arange(24))
            counts = curriculum.round_trials.clone(), curriculum.round_successes.clone()
            if clocks[run].tick(5):
                report = curriculum.end_round()
                ended = step.ended.pop(run)
                assert ended.report == report or math.isnan(report.low_delta + report.high_delta)
                assert ended.report.reason == report.reason
                assert ended.phase == phases[run][-1]
                torch.testing.assert_close(ended.w_d, every)
                assert torch.equal(ended.trials, counts[0])
                torch.testing.assert_close(ended.successes, counts[1])
                if report.switched:
                    assert training.switched[run] == number
            torch.testing.assert_close(training.weights()[run], curriculum.weight(torch.arange(24)))
        assert not step.ended
    assert [set(names) for names in phases] == [{"early", "bottleneck"}] * 2 + [{"early"}] * 2
    for run in (0, 1):
        # The step that ends the round is still weighed by the early curve.
        assert phases[run].index("bottleneck") == int(training.switched[run])
    assert bool(training.switched[2:].isnan().all())


@pytest.mark.parametrize("kind", ["tracked", "oracle", "constant", "thompson"])
def test_w_d_comes_from_where_the_setting_says(kind: Any) -> None:
    curves = [CurriculumConfig(), CurriculumConfig(early=Curve(4.0, 0.5, 0.5, 0.5))]
    forms = [Setting(f"{i}", curriculum=c, difficulty=kind) for i, c in enumerate(curves)]
    training = Training(SMALL, SHORT, forms, [0, 1])
    for _ in range(6):
        before = training.rates()
        step = training.step()
        for run in range(4):
            mine, _ = of_run(step, run)
            prompt = step.responses.row[mine] - run * training.bandit.size
            own = slice(24 * run, 24 * (run + 1))
            curve = training.settings[run].curriculum.early
            tracked = difficulty_weight(
                training.tracker.rho[own][prompt], phase="early", constants=curve
            )
            alpha, beta = training.tracker.alpha[own], training.tracker.beta[own]
            expected = {
                "tracked": tracked,
                "oracle": difficulty_weight(before[run][prompt], phase="early", constants=curve),
                "constant": tracked.mean().expand(6),
                "thompson": thompson_weight(alpha, beta, candidates=16)[prompt],
            }[kind]
            torch.testing.assert_close(step.w_d[mine], expected.float(), rtol=1e-4, atol=1e-5)
    assert training.weights().shape == (4, 24)


def test_a_method_without_a_weight_does_not_use_it() -> None:
    training = Training(SMALL, SHORT, [Setting("x", "vapo")], [0])
    step = training.step()
    assert bool((step.w_s == 1).all())
    assert bool((step.w_d == 1).all())
    assert bool((training.weights() == 1).all())
    assert training.tracker.visits.sum() == 6  # it watches all the same


# ------------------------------------------------------------------------------ runs side by side


def numbers(seed: int) -> list[Setting]:
    """Settings that differ in numbers only."""
    rng = np.random.default_rng(seed)
    return [
        Setting(
            f"{i}",
            stochasticity=StochasticityConfig(
                alpha_p=rng.uniform(0, 0.9),
                alpha_n=rng.uniform(0, 0.9),
                lambda_p=rng.uniform(0, 90),
            ),
            curriculum=EASILY if rng.random() < 0.5 else CurriculumConfig(),
        )
        for i in range(4)
    ]


def assert_same(one: Trace, other: Trace) -> None:
    for entry in fields(Trace):
        found, expected = getattr(one, entry.name), getattr(other, entry.name)
        if isinstance(found, np.ndarray):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5, err_msg=entry.name)
        else:
            assert found == expected


def all_kinds() -> list[Setting]:
    return [
        *(Setting(method, method) for method in ALL_METHODS),
        *(Setting(f"sampler {name}", sampler=name) for name in SAMPLERS),
        *(
            Setting(f"dapo, {name}", "dapo", sampler=name)
            for name in ("mopps", "e2h-cosine", "sec")
        ),
        Setting("vcrl without a critic", "grpo", sampler="vcrl"),
        Setting("shuffled", stochasticity=StochasticityConfig(arm="shuffled")),
        Setting("sd", stochasticity=StochasticityConfig(sharpness_unit="deviation_sd")),
        Setting("thompson", difficulty="thompson"),
        Setting("constant", difficulty="constant"),
        Setting("oracle", difficulty="oracle"),
    ]


@pytest.mark.parametrize("setting", all_kinds(), ids=lambda setting: setting.name)
def test_a_run_is_the_same_alone_and_beside_others(setting: Setting) -> None:
    budget = Budget(batch=5, rollouts=4, steps=12, every=4)
    other = replace(
        setting,
        name="other",
        stochasticity=replace(setting.stochasticity, alpha_p=0.8, lambda_n=7.0),
        curriculum=replace(setting.curriculum, early=Curve(5.0, 0.5, 1.0, 0.5)),
    )
    together = simulate(SMALL, budget, [other, setting], [4, 9, 2])
    for index, seed in ((3, 4), (4, 9)):
        assert together.seeds[index] == seed
        assert_same(together.run(index), simulate(SMALL, budget, [setting], [seed]))


@property_test
@given(seed=st.integers(0, 2**31), order=st.permutations(range(4)))
def test_the_order_of_settings_changes_nothing(seed: int, order: list[int]) -> None:
    given_ = numbers(seed)
    one = simulate(SMALL, SHORT, given_, [1, 2])
    other = simulate(SMALL, SHORT, [given_[i] for i in order], [1, 2])
    for place, index in enumerate(order):
        for k in range(2):
            assert_same(other.run(2 * place + k), one.run(2 * index + k))


def test_settings_of_one_seed_respond_with_the_same_random_numbers() -> None:
    # Equal numbers under two names: the very same run.
    trace = simulate(SMALL, SHORT, [Setting("a"), Setting("b")], [5])
    assert np.array_equal(trace.rates[:, 0], trace.rates[:, 1])
    # And other methods begin with the same responses.
    one, other = (
        Training(SMALL, SHORT, [Setting("x", method)], [5]).step().responses
        for method in ("cvpo", "grpo")
    )
    assert torch.equal(one.row, other.row)
    assert torch.equal(one.kind, other.kind)
    assert torch.equal(one.values, other.values)


def test_other_seeds_are_other_runs() -> None:
    trace = simulate(SMALL, SHORT, [Setting("a")], [5, 6])
    assert not np.allclose(trace.rates[-1, 0], trace.rates[-1, 1])
    assert not np.allclose(trace.accuracy[:, 0], trace.accuracy[:, 1])


# -------------------------------------------------------------------------------- dropped groups


def steps_of(training: Training, count: int) -> list[Step]:
    return [training.step() for _ in range(count)]


def test_dynamic_sampling_trains_on_mixed_groups_and_counts_the_others() -> None:
    world = BanditConfig(prompts=60, difficulty_sd=4)
    training = Training(world, Budget(8, 4, 20), [Setting("x", "dapo")], [0, 1])
    trained = torch.zeros(2, dtype=torch.int64)
    visits = 0
    for step in steps_of(training, 20):
        solved = step.responses.correct.sum(1)
        assert bool(((solved > 0) & (solved < 4)).all())
        groups = torch.bincount(step.run, minlength=2)
        assert bool((groups <= 8).all())
        trained += 4 * groups
        visits = int(training.tracker.visits.sum())
    assert bool((training.discarded > 0).all())
    assert torch.equal(training.rollouts, trained + training.discarded)
    assert visits * 4 == training.rollouts.sum()  # the tracker observes dropped groups too
    assert bool((training.rollouts <= 20 * 4 * 8 * (1 + RETRIES)).all())


@pytest.mark.parametrize("odds", [-20.0, 20.0])
@pytest.mark.parametrize("setting", ["dapo", "vcrl", "vcrl, cvpo"])
def test_a_step_of_which_every_group_is_dropped_trains_on_nothing(
    odds: float, setting: str
) -> None:
    world = BanditConfig(prompts=20, difficulty_mean=odds, difficulty_sd=0)
    form = {
        "dapo": Setting("x", "dapo"),
        "vcrl": Setting("x", "grpo", sampler="vcrl"),
        "vcrl, cvpo": Setting("x", sampler="vcrl"),
    }[setting]
    trace = simulate(world, Budget(4, 4, 3, every=1), [form], [0, 1])
    assert np.array_equal(trace.rates[0], trace.rates[-1])
    assert bool((trace.rollouts[-1] == 3 * 4 * 4 * (1 + RETRIES)).all())
    assert np.array_equal(trace.discarded, trace.rollouts)
    assert np.isnan(trace.accuracy).all()


class Listening(ShuffledEpochs):
    """Epochs in order, and everything that was fed back."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self.heard: list[Feedback] = []

    def observe(self, feedback: Feedback) -> None:
        self.heard.append(feedback)


@pytest.mark.parametrize("method", ["dapo", "cvpo", "grpo"])
def test_a_sampler_hears_of_all_groups_once_a_step(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setitem(SAMPLERS, "listening", Listening)
    training = Training(SMALL, SHORT, [Setting("x", method, sampler="listening")], [0, 1])
    before = training.rollouts.clone()
    for number in range(1, 9):
        step = training.step()
        for run, sampler in enumerate(training.samplers):
            assert isinstance(sampler, Listening)
            assert len(sampler.heard) == number
            heard = sampler.heard[-1]
            assert heard.trials.sum() == (training.rollouts - before)[run]
            mine, rows = of_run(step, run)
            kept = int(mine.sum())
            prompt = step.responses.row[mine] - run * training.bandit.size
            assert torch.equal(heard.prompt[:kept], prompt)
            assert torch.equal(heard.successes[:kept], step.responses.correct[mine].sum(1).double())
            size = step.raw[rows].abs().mean(1).view(kept, -1).mean(1)
            torch.testing.assert_close(heard.mean_abs_advantage[:kept], size)
            # Dropped by dynamic sampling: all alike, so worth 0 to each other.
            assert bool((heard.mean_abs_advantage[kept:] == 0).all())
            if METHODS[method].critic:
                assert heard.value_first is not None
                assert torch.equal(heard.value_first, step.responses.values[mine][:, 0, 0])
            else:
                assert heard.value_first is None
        before = training.rollouts.clone()
    assert bool((training.discarded > 0).all()) == (method == "dapo")


def test_vcrl_keeps_what_varies_and_counts_a_step_as_one() -> None:
    world = BanditConfig(prompts=60)
    training = Training(world, Budget(8, 4, 30), [Setting("x", "grpo", sampler="vcrl")], [0])
    sampler, seen = training.samplers[0], set[int]()
    assert isinstance(sampler, VCRL)
    for number in range(30):
        assert sampler.steps == number
        kappa = 0.3 if number < 20 else 0.8
        step = training.step()
        solved = step.responses.correct.sum(1)
        share = variance_share(torch.full_like(solved, 4), solved)
        assert len(step.responses.row.unique()) == len(solved) <= 8
        # What came from the bank is kept untested, but only to replace what was dropped.
        fresh = ~torch.isin(step.responses.row, torch.tensor(sorted(seen)))
        assert bool((share[fresh] >= kappa).all())
        seen |= set(step.responses.row.tolist())
    assert training.discarded[0] > 0


def test_dropped_groups_of_a_critic_have_an_unknown_advantage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[Feedback] = []

    class Choosy(Listening):
        def keep(self, prompt: Tensor, trials: Tensor, successes: Tensor) -> Tensor:
            assert prompt.shape == trials.shape == successes.shape
            return prompt % 2 == 0

        def observe(self, feedback: Feedback) -> None:
            heard.append(feedback)

    monkeypatch.setitem(SAMPLERS, "vcrl", Choosy)
    Training(SMALL, SHORT, [Setting("x", sampler="vcrl")], [0]).step()
    Training(SMALL, SHORT, [Setting("x", "grpo", sampler="vcrl")], [0]).step()
    critic, group = heard
    assert critic.value_first is not None
    odd = critic.prompt % 2 == 1
    assert bool(odd.any())
    assert torch.equal(critic.mean_abs_advantage.isnan(), odd)
    assert torch.equal(critic.value_first.isnan(), odd)
    odd = group.prompt % 2 == 1
    alike = (group.successes == 0) | (group.successes == 4)
    assert bool((group.mean_abs_advantage[odd & alike] == 0).all())
    assert bool(group.mean_abs_advantage[odd & ~alike].isnan().all())
    assert bool(group.mean_abs_advantage[~odd].isfinite().all())


# ------------------------------------------------------------------------- what samplers are told


def test_the_pool_tells_the_critics_values_true_rates_and_measured_difficulty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pools: list[Pool] = []

    class Asking(Listening):
        def __init__(self, pool: Pool) -> None:
            pools.append(pool)
            super().__init__(pool)

    monkeypatch.setitem(SAMPLERS, "asking", Asking)
    late = ResponseModel(noise=0.0, settles_low=1, settles_high=1, jitter=0)
    world = replace(SMALL, prompts=200, partial=0.4, responses=late)
    form = Setting("x", sampler="asking")
    training = Training(world, replace(SHORT, batch=50), [form, replace(form, name="y")], [0, 1])
    start = training.rates()
    steps_of(training, 3)
    for run, pool in enumerate(pools):
        assert pool.truth is not None
        assert pool.predict is not None
        assert pool.difficulty is not None
        torch.testing.assert_close(pool.truth(), training.rates()[run])
        sixteen = 16 * pool.difficulty
        torch.testing.assert_close(sixteen, sixteen.round())
        error = pool.difficulty.float() - (1 - start[run])
        assert error.square().mean().item() == pytest.approx(
            (start[run] * (1 - start[run]) / 16).mean().item(), rel=0.4
        )
        assert torch.equal(pool.difficulty.float(), training.difficulty[run % 2])
    before = [pool.predict(torch.arange(200)) for pool in pools if pool.predict]
    step = training.step()
    for run in range(4):
        mine, _ = of_run(step, run)
        prompt = step.responses.row[mine] - run * training.bandit.size
        torch.testing.assert_close(step.responses.values[mine][:, 0, 0], before[run][prompt])


# ------------------------------------------------------------------------------ extreme worlds


@pytest.mark.parametrize("name", [s.name for s in all_kinds()])
def test_saturated_prompts_make_no_nan(name: str) -> None:
    setting = next(s for s in all_kinds() if s.name == name)
    world = BanditConfig(
        prompts=24,
        difficulty_sd=20,
        own_rate=300,
        skill_rate=300,
        responses=ResponseModel(spread=1),
    )
    training = Training(world, SHORT, [setting], [0, 1])
    training.bandit.own[::5, 2:] -= 500
    training.bandit.own[1::5, :2] -= 500
    for step in steps_of(training, 6):
        parts = (training.bandit.own, training.bandit.skill, training.bandit.rates())
        for tensor in (*parts, training.tracker.rho, training.weights(), step.w_s, step.w_d):
            assert bool(tensor.isfinite().all())
        assert bool((step.w_s > 0).all())
        assert bool((step.w_d >= 0).all())
    rates = training.rates()
    assert bool(((rates >= 0) & (rates <= 1)).all())
    assert bool(((rates == 0) | (rates >= 1 - 2e-7)).any())


def test_held_out_prompts_are_never_rolled_out_and_move_through_the_skills() -> None:
    world = BanditConfig(prompts=20, held_out=30, interference=0)
    for rate in (0.5, 0.0):
        training = Training(replace(world, skill_rate=rate), SHORT, [Setting("x")], [0, 1])
        before = training.bandit.rates()[:, 20:]
        for step in steps_of(training, 10):
            assert bool((step.responses.row % 50 < 20).all())
        after = training.bandit.rates()[:, 20:]
        if rate:
            assert bool((after > before).all())
        else:
            assert torch.equal(after, before)


def test_a_frozen_policy_never_moves_while_the_tracker_learns() -> None:
    trace = simulate(replace(SMALL, stops_after=0), SHORT, [Setting("x")], [0, 1])
    assert np.array_equal(trace.rates[0], trace.rates[-1])
    assert not np.array_equal(trace.tracked[0], trace.tracked[-1])


def test_a_plateau_begins_after_its_step() -> None:
    budget = replace(SHORT, every=1)
    trace = simulate(replace(SMALL, stops_after=3), budget, [Setting("x")], [0])
    same = [np.array_equal(trace.rates[s], trace.rates[s + 1]) for s in range(8)]
    assert same == [False] * 3 + [True] * 5
    free = simulate(SMALL, budget, [Setting("x")], [0])
    assert np.array_equal(trace.rates[:4], free.rates[:4])


def test_a_gradient_step_of_many_responses_follows_the_mean_reward() -> None:
    # Without weights, LM loss, noise and foreseen outcome, A = r - V_0.
    model = ResponseModel(spread=0, noise=0, bias=0)
    world = BanditConfig(prompts=4, own_rate=1, skill_rate=1, responses=model)
    n = 100_000
    training = Training(world, Budget(4, n, 1), [Setting("x", "vc-ppo")], [0])
    own = training.bandit.own.double().requires_grad_()
    skill = torch.zeros(8, dtype=torch.float64, requires_grad=True)
    lift = training.bandit.loading[0].double() @ skill
    correct = torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    p = torch.softmax(own + lift[:, None] * correct, 1)
    (2 * p[:, 2:].sum(1) - 1).sum().backward()
    before = training.bandit.own.double()
    training.step()
    assert own.grad is not None
    assert skill.grad is not None
    error = 5 * 2 / math.sqrt(n)  # |A| <= 2, and a score's components are below 1
    torch.testing.assert_close(training.bandit.own.double() - before, own.grad, rtol=0, atol=error)
    torch.testing.assert_close(
        training.bandit.skill[0].double(), skill.grad / 4, rtol=0, atol=error
    )


# ------------------------------------------------------------------------------------- traces


def test_a_trace_is_read_at_the_start_every_so_often_and_at_the_end() -> None:
    trace = simulate(SMALL, Budget(6, 4, 10, every=4), [Setting("a"), Setting("b")], [3, 1])
    assert trace.steps.tolist() == [0, 4, 8, 10]
    assert trace.settings == ("a", "a", "b", "b")
    assert trace.seeds == (3, 1, 3, 1)
    assert trace.rates.shape == (4, 4, 28)
    assert trace.tracked.shape == trace.weight.shape == (4, 4, 24)
    assert trace.accuracy.shape == trace.sigma.shape == (10, 4)
    assert trace.w_s.shape == (10, 4, 2)
    assert trace.rollouts[:, 0].tolist() == [0, 96, 192, 240]
    assert not trace.discarded.any()


def test_a_trace_says_what_happened_in_each_step() -> None:
    seen: list[Step] = []
    rates: list[Tensor] = []

    def watch(training: Training, step: Step | None) -> None:
        rates.append(training.bandit.rates())
        if step is not None:
            seen.append(step)

    trace = simulate(SMALL, replace(SHORT, every=1), [Setting("a")], [0, 1], watch=watch)
    assert len(rates) == 9
    np.testing.assert_array_equal(trace.rates, torch.stack(rates).numpy())
    for s, step in enumerate(seen):
        for run in range(2):
            mine, rows = of_run(step, run)
            correct = step.responses.correct[mine].flatten()
            assert trace.accuracy[s, run] == pytest.approx(correct.mean().item())
            assert trace.sigma[s, run] == pytest.approx(step.sigma[rows].mean().item())
            for outcome in (0, 1):
                weight = step.w_s[rows][correct == outcome]
                expected = weight.mean().item() if len(weight) else math.nan
                assert trace.w_s[s, run, outcome] == pytest.approx(expected, nan_ok=True)


def desk(folder: Any, **keys: Any) -> Desk:
    given_ = {"seeds": (2, 0), "output": folder, "jobs": 1, "backend": "sequential", **keys}
    return Desk("trial", Settings(**given_))


def test_compare_sorts_settings_of_any_kind_and_finds_each_by_its_name(tmp_path: Any) -> None:
    forms = [Setting("a"), Setting("b", "grpo"), numbers(0)[1], Setting("c", sampler="mopps")]
    traces = compare(desk(tmp_path), SMALL, SHORT, forms, desc="trying")
    assert list(traces) == ["a", "b", "1", "c"]
    for form in forms:
        assert traces[form.name].seeds == (0, 2)
        assert traces[form.name].settings == (form.name,) * 2
        assert_same(traces[form.name], simulate(SMALL, SHORT, [form], [0, 2]))


def test_compare_refuses_two_settings_of_one_name(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="distinct names"):
        compare(desk(tmp_path), SMALL, SHORT, [Setting("a"), Setting("a", "grpo")], desc="trying")


# ------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("world", "budget", "forms", "message"),
    [
        (SMALL, SHORT, [], "settings: give at least one"),
        (SMALL, SHORT, [Setting("a"), Setting("b", "grpo")], "'a' and 'b' differ in more than"),
        (SMALL, SHORT, [Setting("a", "grpo-async")], "no method with lag"),
        (SMALL, replace(SHORT, batch=25), [Setting("a")], "batch: 25 prompts"),
    ],
)
def test_what_cannot_run_side_by_side_is_refused(
    world: BanditConfig, budget: Budget, forms: list[Setting], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Training(world, budget, forms, [0])


@pytest.mark.parametrize("name", ["batch", "rollouts", "steps", "every"])
def test_a_budget_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be at least 1, got 0"):
        Budget(**{name: 0})


def test_the_curves_are_the_papers_by_default() -> None:
    config = Setting("x").curriculum
    assert (config.early, config.bottleneck) == (EARLY, BOTTLENECK)
