"""The weights study: exact motions against closed forms, and verdicts that can turn either way."""

import warnings
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cvpo import stochasticity
from cvpo.metrics import paired_t_interval
from cvpo.stochasticity import ARMS
from sim.bandit import BanditConfig, ResponseModel
from sim.differences import difference_row, difference_verdict
from sim.studies.weights import (
    AREA,
    CONTROLLED,
    END,
    STUDY,
    Kinds,
    Scores,
    TreeRun,
    WeightsSettings,
    arm_config,
    at_accuracy,
    bandit_rows,
    bandit_variation,
    closed_form,
    draw_kinds,
    kinds_rows,
    matched_constant,
    mean_token_entropy,
    measure_kinds,
    motion,
    random_tree,
    scores,
    sigma_drift,
    train_tree,
    tree_rows,
    tree_update,
    tree_weight,
    weight_variation,
    weighted_force,
)
from sim.study import Row, SimError, read_settings, run_study
from sim.trace import Trace, simulate
from sim.training import Budget, Setting
from sim.tree import Trajectories, expected_update, trajectories

property_test = settings(max_examples=30, deadline=None)
SMALL = WeightsSettings(
    seeds=(0, 1, 2, 3, 4),
    draws=5,
    prompts=24,
    batch=8,
    rollouts=4,
    steps=10,
    tree_prompts=2,
    vocabulary=3,
    length=4,
    pattern=2,
    tree_steps=5,
)


def literal(coefficient: float = 0.3, sharpness: float = 50.0) -> dict[str, float]:
    return {"coefficient": coefficient, "sharpness": sharpness}


# -------------------------------------------------------------------------------- differences


@pytest.mark.parametrize(
    ("low", "high", "seeds", "sign", "verdict"),
    [
        (0.1, 0.2, 5, 1, "holds"),
        (-0.2, -0.1, 5, 1, "fails"),
        (-0.1, 0.2, 5, 1, "undecided"),
        (0.1, 0.2, 4, 1, "undecided"),
        (0.1, 0.2, 5, -1, "fails"),
        (-0.2, -0.1, 5, -1, "holds"),
        (0.0, 0.0, 5, 1, "fails"),
    ],
)
def test_the_interval_and_the_claimed_sign_decide(
    low: float, high: float, seeds: int, sign: int, verdict: str
) -> None:
    interval = replace(paired_t_interval(np.ones(seeds), np.zeros(seeds)), low=low, high=high)
    assert difference_verdict(interval, sign=sign) == verdict  # type: ignore[arg-type]


def test_one_seed_has_no_interval_and_no_verdict() -> None:
    row = difference_row("x", "y", np.array([1.0]), 0.0, sign=1)
    assert (row.value, row.verdict) == (1, "undecided")
    assert np.isnan(row.low)


def test_what_is_not_claimed_has_no_verdict() -> None:
    assert difference_row("x", "y", np.arange(5.0) + 1, 0.0).verdict == ""


def test_every_arm_of_the_library_is_compared() -> None:
    assert set(CONTROLLED) == {*ARMS, "outcome_group"}
    assert arm_config("outcome_group", **literal()).mu == "outcome_group"


# -------------------------------------------------------------------- prompts of fixed kinds


@property_test
@given(
    seed=st.integers(0, 2**31),
    levels=st.integers(2, 5),
    alpha_p=st.floats(0, 3),
    alpha_n=st.floats(0, 0.99),
    sharpness=st.floats(0, 300),
)
def test_the_measured_motion_is_the_closed_form(
    seed: int, levels: int, alpha_p: float, alpha_n: float, sharpness: float
) -> None:
    kinds = draw_kinds(torch.Generator().manual_seed(seed), levels)
    config = replace(arm_config("literal", **literal(sharpness=sharpness)), alpha_p=alpha_p)
    config = replace(config, alpha_n=alpha_n)
    found = motion(kinds, weighted_force(kinds, config), natural=True)
    printed = closed_form(kinds, alpha_p=alpha_p, alpha_n=alpha_n, sharpness=sharpness)
    assert found == pytest.approx(printed, abs=1e-7)


def test_the_closed_form_of_two_levels_by_hand() -> None:
    share = torch.tensor([0.3, 0.3, 0.2, 0.2], dtype=torch.float64)
    sigma = torch.tensor([0.05, 0.15, 0.05, 0.15], dtype=torch.float64)
    kinds = Kinds(share, torch.tensor([False, False, True, True]), sigma)
    found = closed_form(kinds, alpha_p=0.4, alpha_n=0.2, sharpness=20.0)
    dS = 1 / (1 + np.exp(-1)) - 1 / (1 + np.exp(1))
    assert found.correct == pytest.approx(2 * 0.6 * 0.4 * dS)
    assert found.wrong == pytest.approx(-2 * 0.4 * 0.2 * dS)
    assert found.sigma == pytest.approx(2 * 0.4 * 0.6 * 0.2 * 0.05 * dS / 2)


@property_test
@given(seed=st.integers(0, 2**31), levels=st.integers(2, 4))
def test_the_softmax_gradient_agrees_with_the_sum_over_sampled_kinds(
    seed: int, levels: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    kinds = draw_kinds(generator, levels)
    force = torch.randn(2 * levels, generator=generator, dtype=torch.float64)
    pi = kinds.probability
    velocity = torch.zeros_like(pi)
    for i, j in product(range(2 * levels), repeat=2):
        velocity[j] += pi[i] * force[i] * (float(i == j) - pi[j])
    speed = velocity - (pi * velocity).sum()
    found = motion(kinds, force, natural=False)
    assert found.sigma == pytest.approx((pi * speed * kinds.sigma).sum().item(), abs=1e-8)
    assert found.correct == pytest.approx((speed[-1] - speed[levels]).item(), abs=1e-8)
    assert found.wrong == pytest.approx((speed[levels - 1] - speed[0]).item(), abs=1e-8)


def verdicts(rows: list[Row], claim: int) -> set[str]:
    return {row.verdict for row in rows if row.claim == claim}


def kinds_verdicts(arm: str, claim: int) -> set[str]:
    found = [measure_kinds(SMALL, seed, arm=arm) for seed in SMALL.seeds]
    return verdicts(kinds_rows(SMALL, found), claim)


def test_the_printed_weight_does_the_opposite_of_the_prose_and_the_flipped_one_does_not() -> None:
    assert kinds_verdicts("literal", 2) == {"fails"}
    assert kinds_verdicts("flipped", 2) == {"holds"}


def test_sigma_drifts_to_the_side_whose_weight_is_on() -> None:
    found = [measure_kinds(SMALL, seed) for seed in SMALL.seeds]
    assert all(positive > 0 > negative for positive, negative in (x.unequal for x in found))
    assert all(abs(x.natural.sigma) < 1e-8 for x in found)
    assert "holds" in kinds_verdicts("positive_only", 3)
    assert "fails" in kinds_verdicts("negative_only", 3)


# ---------------------------------------------------------------------------------- token trees


def grown(seed: int) -> Trajectories:
    return trajectories(*random_tree(SMALL, seed))


@pytest.mark.parametrize("seed", [0, 1])
def test_without_a_weight_the_update_is_the_exact_gradient(seed: int) -> None:
    tree, policy = random_tree(SMALL, seed)
    found = trajectories(tree, policy)
    ones = torch.ones_like(found.sigma)
    torch.testing.assert_close(
        tree_update(policy, found, ones), expected_update(policy, found, ones)
    )


@pytest.mark.parametrize("arm", ["literal", "flipped", "outcome_group", "positive_only", "hard"])
def test_the_tree_s_weight_is_that_of_infinitely_many_rollouts(arm: str) -> None:
    found = grown(0)
    config = arm_config(arm, **literal())
    drawn = torch.multinomial(
        found.probability, 200_000, True, generator=torch.Generator().manual_seed(0)
    )
    tree = found.tree
    sampled = stochasticity(
        found.sigma[drawn], tree.prompt[drawn], tree.correct[drawn].float(), config=config
    ).weight
    # At the step of `hard` a difference in mu's last digits is a difference in the weight.
    exact = tree_weight(found, config)[drawn]
    assert ((sampled - exact).abs() < 0.01).double().mean() > 0.99


def test_the_tree_s_shuffled_weight_is_the_mean_of_the_literal_one() -> None:
    found = grown(1)
    one, mean = (tree_weight(found, arm_config(a, **literal())) for a in ("literal", "shuffled"))
    for prompt, outcome in product(range(SMALL.tree_prompts), (False, True)):
        mine = (found.tree.prompt == prompt) & (found.tree.correct == outcome)
        p = found.probability[mine]
        assert mean[mine].max() == pytest.approx(mean[mine].min())
        assert mean[mine][0].item() == pytest.approx(((p * one[mine]).sum() / p.sum()).item())


def test_mean_token_entropy_by_a_loop() -> None:
    found = grown(2)
    tree = found.tree
    for i in range(0, len(tree.prompt), 7):
        T = int(tree.mask[i].sum())
        pi = [found.solution.probs[t][tree.state[i, t]] for t in range(T)]
        entropy = np.mean([float(-(x * x.log()).sum()) for x in pi])
        assert mean_token_entropy(found)[i].item() == pytest.approx(entropy)


def test_sigma_s_drift_splits_into_moving_mass_and_moving_values() -> None:
    tree, policy = random_tree(SMALL, 3)
    found = trajectories(tree, policy)
    direction = torch.randn(len(policy.theta), generator=torch.Generator().manual_seed(0)).double()
    mass, total = sigma_drift(tree, policy, found, direction)
    h = 1e-5
    ends = [
        trajectories(tree, replace(policy, theta=policy.theta + t * direction)) for t in (h, -h)
    ]
    moved = [(end.probability * found.sigma).sum().item() for end in ends]
    assert mass == pytest.approx((moved[0] - moved[1]) / (2 * h), abs=1e-6)
    values = [(found.probability * end.sigma).sum().item() for end in ends]
    assert total - mass == pytest.approx((values[0] - values[1]) / (2 * h), abs=1e-6)


def test_a_constant_weight_does_not_vary() -> None:
    found = grown(0)
    constant, one = (
        tree_weight(found, arm_config(a, **literal())) for a in ("constant", "literal")
    )
    assert weight_variation(found, constant) == pytest.approx((0, 0))
    assert min(weight_variation(found, one)) > 0


def tree_run(accuracy: list[float], sigma: list[float], drift: float = 0.0) -> TreeRun:
    passes = np.ones((len(accuracy), 2))
    return TreeRun(np.array(accuracy), passes, np.array(sigma), drift, drift, (0.0, 0.0))


def test_sigma_is_read_where_an_accuracy_is_first_reached() -> None:
    run = tree_run([0.1, 0.3, 0.2, 0.3, 0.5], [1.0, 2.0, 9.0, 9.0, 4.0])
    assert at_accuracy(run, 0.1) == 1
    assert at_accuracy(run, 0.2) == pytest.approx(1.5)
    assert at_accuracy(run, 0.3) == 2
    assert at_accuracy(run, 0.4) == pytest.approx(3)


@pytest.mark.parametrize(("shift", "verdict"), [(0.1, "holds"), (-0.1, "fails")])
def test_the_trees_verdicts_follow_their_numbers(shift: float, verdict: str) -> None:
    noise = 0.001 * np.arange(5)
    plain = [tree_run([0.2, 0.5 + x], [0.1, 0.1 + x]) for x in noise]
    moved = [
        tree_run([0.2, 0.5 + shift + 2 * x], [0.1, 0.1 + shift + 2 * x], shift + x) for x in noise
    ]
    runs = {arm: moved if arm == "literal" else plain for arm in CONTROLLED}
    rows = tree_rows(runs)
    assert verdicts(rows, 4) == verdicts(rows, 8) == {verdict}
    assert verdict in verdicts(rows, 3)


def test_training_a_tree_raises_its_accuracy() -> None:
    run = train_tree(replace_settings(tree_steps=40), 0, "none")
    assert run.accuracy[-1] > run.accuracy[0] + 0.05
    assert run.passes.shape == (41, 2)
    assert (run.passes[:, 1] >= run.passes[:, 0]).all()


def replace_settings(**changes: object) -> WeightsSettings:
    return WeightsSettings.model_validate(SMALL.model_dump() | changes)


# -------------------------------------------------------------------------------------- the bandit


def trained(
    arm: str, world: BanditConfig, *, steps: int = 40, seeds: int = 5, sharpness: float = 50.0
) -> Trace:
    config = arm_config(arm, coefficient=0.3, sharpness=sharpness)
    setting = Setting(arm, method="cvpo-stochasticity", stochasticity=config)
    return simulate(world, Budget(batch=16, rollouts=8, steps=steps), [setting], range(seeds))


def test_the_bandit_s_vapo_is_the_arm_none() -> None:
    world, budget = BanditConfig(prompts=24), Budget(batch=8, rollouts=4, steps=20)
    none = Setting(
        "none", method="cvpo-stochasticity", stochasticity=arm_config("none", **literal())
    )
    vapo, without = (
        simulate(world, budget, [s], [0, 1]) for s in (Setting("vapo", method="vapo"), none)
    )
    np.testing.assert_array_equal(vapo.rates, without.rates)


def test_the_matched_constant_has_the_mean_weights_of_the_training() -> None:
    trace = trained("literal", BanditConfig(prompts=32), steps=10, seeds=2)
    config = matched_constant(trace)
    wrong, correct = np.nanmean(trace.w_s, axis=(0, 1))
    assert config.arm == "constant"
    assert 1 + config.alpha_p / 2 == pytest.approx(correct)
    assert 1 - config.alpha_n / 2 == pytest.approx(wrong)


def test_an_outcome_that_never_occurs_has_a_constant_that_changes_nothing() -> None:
    trace = trained("literal", BanditConfig(prompts=32), steps=10, seeds=2)
    weight = trace.w_s.copy()
    weight[..., 1] = np.nan
    with warnings.catch_warnings(action="error"):
        config = matched_constant(replace(trace, w_s=weight))
    assert config.alpha_p == 0
    assert config.alpha_n == matched_constant(trace).alpha_n


def test_scores_by_a_loop() -> None:
    trace = trained("literal", BanditConfig(prompts=30), steps=20, seeds=2)
    found = scores(trace)
    for seed in range(2):
        last = trace.rates[-1, seed].astype(float)
        assert found[END][seed] == pytest.approx(np.mean(last))
        assert found["pass@8 at the end"][seed] == pytest.approx(np.mean(1 - (1 - last) ** 8))
        mean = trace.rates[:, seed].mean(1)
        area = np.sum((mean[1:] + mean[:-1]) / 2 * np.diff(trace.steps)) / trace.steps[-1]
        assert found[AREA][seed] == pytest.approx(area)
        hardest = np.argsort(trace.rates[0, seed])[:10]
        assert found[f"{END}, hard third"][seed] == pytest.approx(last[hardest].mean())


def claim_four(world: BanditConfig, measure: str = AREA) -> str:
    """Whether a trajectory's own sigma tells something."""
    a, b = (scores(trained(arm, world))[measure] for arm in ("literal", "shuffled"))
    return difference_row(measure, "", a, b, claim=4, sign=1).verdict


@pytest.mark.parametrize(("foresight", "verdict"), [(1.0, "fails"), (-1.0, "holds")])
def test_a_trajectory_s_own_sigma_can_hurt_or_help(foresight: float, verdict: str) -> None:
    """Where high sigma goes with a small advantage, W_S evens out steps; with a large one it adds.

    A critic that moves early towards the outcome leaves less advantage; one that moves away, more.
    """
    critic = ResponseModel(spread=0.8, foresight=foresight)
    assert claim_four(BanditConfig(prompts=64, responses=critic)) == verdict


def arms_with(effects: dict[str, float]) -> dict[str, Scores]:
    """Made-up scores: each arm's effect on every measure, with a little noise."""
    rng = np.random.default_rng(0)
    measures = scores(trained("none", BanditConfig(prompts=16), steps=2, seeds=1))
    base = rng.random(5)
    return {
        arm: {m: base + effects.get(arm, 0.0) + 1e-3 * rng.random(5) for m in measures}
        for arm in (*CONTROLLED, "matched", "vapo")
    }


@pytest.mark.parametrize(
    ("effects", "four", "eight", "twelve"),
    [
        ({"literal": 0.1}, {"holds"}, {"holds"}, {"holds"}),
        ({"literal": -0.1}, {"fails"}, {"fails"}, {"fails"}),
        (
            {"literal": 0.1, "shuffled": 0.2, "constant": 0.0},
            {"holds", "fails"},
            {"holds"},
            {"holds"},
        ),
    ],
)
def test_the_bandit_s_verdicts_follow_their_numbers(
    effects: dict[str, float], four: set[str], eight: set[str], twelve: set[str]
) -> None:
    rows = bandit_rows({"bandit": arms_with(effects)})
    assert verdicts(rows, 4) == four
    assert verdicts(rows, 8) == eight
    assert verdicts(rows, 12) == twelve


def test_a_larger_sharpness_makes_the_weight_vary_more() -> None:
    few = replace_settings(prompts=64)
    gentle, sharp = (bandit_variation(few, sharpness, 0) for sharpness in (50.0, 200.0))
    assert all(0 < a < b for a, b in zip(gentle, sharp, strict=True))
    assert bandit_variation(few, 0.0, 0) == (0.0, 0.0)


# ---------------------------------------------------------------------------------------- the study


def test_the_study_runs_and_leaves_its_tables_and_logs(tmp_path: Path) -> None:
    few = {"seeds": (0, 1), "steps": 2, "output": tmp_path, "backend": "sequential", "jobs": 1}
    rows = run_study(STUDY, replace_settings(**few))
    assert {row.claim for row in rows} >= {2, 3, 4, 8, 12}
    assert all(row.verdict in ("", "undecided") for row in rows)
    assert all(np.isfinite(row.value) for row in rows)
    same = [row for row in rows if row.setting.endswith("none less vapo")]
    assert [row.value for row in same] == [0.0]
    folder = tmp_path / "weights"
    assert {p.stem for p in (folder / "tables").glob("*.parquet")} >= {"study", "trees", "arms"}
    assert (folder / "runs" / "literal-0" / "run.yaml").exists()


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("coefficient=0.6", "coefficient"),
        ("pattern=6", "pattern"),
        ("batch=1000", "batch"),
        ("vocabulary=10", "vocabulary"),
    ],
)
def test_settings_that_cannot_be_run_are_refused_by_name(override: str, named: str) -> None:
    with pytest.raises(SimError, match=named):
        read_settings(STUDY, [override])
