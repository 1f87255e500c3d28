"""The bound study: its numbers, and verdicts on worlds in which the opposite is right."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cvpo import read_table
from cvpo.bound import token_mean
from sim.mdp import MDP, Shared
from sim.studies.bound import (
    KINDS,
    STUDY,
    BoundSettings,
    Kind,
    Measured,
    batch_shift,
    bound_rows,
    bound_verdict,
    governs_rows,
    governs_verdict,
    link_rows,
    measure,
    measure_tree,
    random_worlds,
    rescaled_score_bounds,
    two_prompts,
)
from sim.study import Row, SimError, read_settings, run_study
from sim.tree import bigram_policy, chain, sum_rule, token_tree, trajectories

SMALL: dict[str, Any] = {"seeds": (0, 1, 2, 3, 4), "worlds": 6, "length": 3, "chains": (5, 25)}


def find(rows: list[Row], quantity: str, setting: str = "") -> Row:
    (row,) = [row for row in rows if quantity in row.quantity and setting in row.setting]
    return row


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Row], Path]:
    output = tmp_path_factory.mktemp("sim")
    settings = BoundSettings(**SMALL, output=output, jobs=1)
    return run_study(STUDY, settings), output / "bound"


def test_the_verdicts_on_the_first_claim(study: tuple[list[Row], Path]) -> None:
    rows, _ = study
    verdicts = {(row.quantity, row.setting): row.verdict for row in rows if row.claim == 1}
    assert list(verdicts.values()) == ["fails", "holds", "fails"]
    episodic = find(rows, "largest gradient", "episodic")
    assert episodic.value == pytest.approx(2.014753 / 0.608484, rel=1e-5)
    assert find(rows, "largest gradient", "token mean").value < 1
    assert find(rows, "at fixed Var Q").high < 0


def test_the_identities_are_exact(study: tuple[list[Row], Path]) -> None:
    rows, _ = study
    assert find(rows, "|Var A - (Var Q - Var V)|").value < 1e-10
    assert find(rows, "|E sum A^2 - E_q[4p(1-p)]|").value < 1e-10
    assert find(rows, "|within + between - Var V|").value < 1e-10
    assert find(rows, "E sum A^2 / E_q").value < 1
    for name in ("C sqrt(E[T] E_q[4p(1-p)]) / ", "sqrt(E sum ||g||^2) sqrt(E_q[4p(1-p)]) / "):
        assert find(rows, f"{name}||grad J||, smallest").value > 1


def test_the_tables_hold_every_world_and_every_link(study: tuple[list[Row], Path]) -> None:
    rows, log = study
    worlds, linked = read_table(log, "worlds"), read_table(log, "links")
    assert len(worlds) == 5 * len(KINDS) * 6
    assert len(linked) == len(KINDS) * 6
    assert (linked.share_holding == 1).all()
    printed = worlds.link_printed / worlds.link_gradient
    assert printed.median() == pytest.approx(
        find(rows, "(13) C (sigma_Q + sqrt(Var V)) / true gradient").value
    )
    assert linked.ratio_min.min() > 1
    estimators = read_table(log, "advantages").set_index(["seed", "estimator"])
    exact = estimators.xs("exact V", level="estimator")
    assert (exact[["conditional", "overall"]].abs() < 1e-10).all(axis=None)


def test_worlds_are_those_of_their_seed_and_kind() -> None:
    settings = BoundSettings(**SMALL)
    first, again, other = (random_worlds(settings, seed, KINDS[0]) for seed in (0, 0, 1))
    assert [world.gradient for world in first] == [world.gradient for world in again]
    assert not {world.gradient for world in first} & {world.gradient for world in other}
    fixed = random_worlds(settings, 0, Kind("shared", "stochastic", "fixed"))
    assert [world.mean_length for world in fixed] == [pytest.approx(5)] * 6


# ----------------------------------------------------------------------- the opposite verdicts


def test_the_printed_bound_holds_on_the_episodic_gradient_of_single_tokens() -> None:
    settings = BoundSettings(**SMALL, horizon=1)
    kind = Kind("tabular", "deterministic", "fixed")
    worlds = {(0, kind): random_worlds(settings, 0, kind)}
    row = find(bound_rows(worlds, {1: measure(*chain(1))}), "largest gradient", "episodic")
    assert row.verdict == "holds"
    assert find(bound_rows(worlds, {5: measure(*chain(5))}), "largest", "episodic").verdict == (
        "fails"
    )


def cancelling(gap: float) -> tuple[MDP, Shared]:
    """The two prompts of rates .5 and .5 - gap, with one parameter that moves them apart.

    Their gradients cancel but for gap^2, so this gradient does grow with Var V = gap^2.
    """
    mdp, _ = two_prompts(0.0)
    rate = torch.tensor([0.5, 0.5 - gap], dtype=torch.float64)
    offset = (rate / (1 - rate)).log()
    features = torch.zeros(2, 2, 2, dtype=torch.float64)
    features[:, 1, 0] = torch.tensor([1.0, -1.0])
    features[1, 1, 1] = 1e-9  # carries the offset at next to no gradient
    theta = torch.tensor([0.0, offset[1].item() / 1e-9], dtype=torch.float64)
    return mdp, Shared(theta=theta, features=(features,))


def test_var_v_governs_a_family_in_which_it_does() -> None:
    kind = KINDS[0]

    def family(seed: int) -> list[Measured]:
        return [measure(*cancelling(0.05 * (i + 1) + 0.001 * seed)) for i in range(8)]

    worlds = {(seed, kind): family(seed) for seed in range(5)}
    row = find(governs_rows(worlds), "at fixed Var Q")
    assert row.value == pytest.approx(1)
    assert row.verdict == "holds"
    opposite = {
        (seed, kind): [measure(*two_prompts(0.05 * i + 0.001 * seed)) for i in range(1, 9)]
        for seed in range(5)
    }
    row = find(governs_rows(opposite), "at fixed Var Q")
    assert row.value == pytest.approx(-1)
    assert row.verdict == "fails"


def test_worlds_without_any_spread_of_values_decide_nothing() -> None:
    worlds = {(seed, KINDS[0]): [measure(*two_prompts(0.0))] * 4 for seed in range(5)}
    row = find(governs_rows(worlds), "at fixed Var Q")
    assert math.isnan(row.value)
    assert row.verdict == "undecided"


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.1, 0.5, "holds"),
        (-0.5, -0.1, "fails"),
        (-0.1, 0.5, "undecided"),
        (0.0, 0.5, "undecided"),
        (math.nan, math.nan, "undecided"),
    ],
)
def test_the_interval_decides_whether_var_v_governs(low: float, high: float, verdict: str) -> None:
    assert governs_verdict(low, high, seeds=5) == verdict
    assert governs_verdict(low, high, seeds=4) == "undecided"


def test_one_world_is_enough_to_break_a_bound() -> None:
    assert bound_verdict([1.0, 2.0], [1.0, 3.0]) == "holds"
    assert bound_verdict([1.0, 3.1], [1.0, 3.0]) == "fails"
    assert bound_verdict([], []) == "undecided"


def test_a_link_that_fails_in_one_world_fails() -> None:
    settings = BoundSettings(**SMALL)
    worlds = {(0, KINDS[0]): random_worlds(settings, 0, KINDS[0])}
    assert {row.verdict for row in link_rows(worlds) if row.paper} == {"holds"}
    odd = worlds[0, KINDS[0]][3]
    smaller = odd.links._replace(deviation=odd.links.deviation * 0.9)
    worlds[0, KINDS[0]][3] = replace(odd, links=smaller)
    (broken,) = [row for row in link_rows(worlds) if row.verdict == "fails"]
    assert broken.quantity.startswith("(8) C sqrt(Var A), worlds")
    assert broken.value == pytest.approx(5 / 6)


# ------------------------------------------------------------------------------- assumptions


def test_a_perfect_critic_without_weights_leaves_nothing_of_the_bias() -> None:
    found = measure_tree(BoundSettings(**SMALL, critic_error=0.0, coefficient=0.0), 0)
    assert max(x.conditional for x in found.bias.values()) < 1e-10


def test_errors_of_the_critic_and_weights_each_leave_a_bias() -> None:
    found = measure_tree(BoundSettings(**SMALL), 0).bias
    assert found["exact V, whitened"].conditional < 1e-10
    assert found["exact V, W_S A"].conditional > 0.05
    assert found["exact V, W_S A"].overall > 0.01
    assert found["V with error, lambda 1"].conditional > 0.05
    # The more the advantage leans on the wrong values, the more of it is bias.
    biases = [found[f"V with error, lambda {lam:g}"].conditional for lam in (1.0, 0.95, 0.1)]
    assert biases == sorted(biases)
    whitened = found["V with error, lambda 0.1, whitened"]
    assert whitened.conditional > 0.05
    assert abs(whitened.overall) < 1e-12


def test_the_shift_of_whitening_is_that_of_sampled_batches() -> None:
    tree = token_tree(
        sum_rule(torch.tensor([4, 7])), start=torch.ones(2), vocabulary=4, length=4, eos=True
    )
    generator = torch.Generator().manual_seed(0)
    found = trajectories(tree, bigram_policy(tree, torch.randn(5, 4, generator=generator)))
    reward = (2.0 * tree.correct.double() - 1)[:, None]
    exact = (reward - found.values).masked_fill(~tree.mask, 0)
    drawn = torch.multinomial(
        found.probability, 4000 * 50, replacement=True, generator=generator
    ).view(4000, 50)
    means = exact.sum(1)[drawn].sum(1) / tree.mask.sum(1)[drawn].sum(1)
    weight = tree.mask * found.probability[:, None]
    size = token_mean(exact.square(), weight).sqrt()
    measured = (means.std() / size).item()
    assert batch_shift(found, exact, batch=50) == pytest.approx(measured, rel=0.05)


def test_the_size_of_a_shared_score_is_that_of_the_features() -> None:
    found = rescaled_score_bounds(BoundSettings(**SMALL), factors=(1.0, 10.0))
    assert found[10.0] == pytest.approx(10 * found[1.0])


def test_a_constant_is_not_held_against_itself(study: tuple[list[Row], Path]) -> None:
    rows = [row for row in study[0] if "the same policy from features" in row.setting]
    assert [row.verdict for row in rows] == ["", "fails", "fails"]
    assert rows[1].value == pytest.approx(10 * rows[0].value)


def test_two_prompts_keep_var_q_and_move_var_v() -> None:
    for gap in (0.0, 0.1, 0.3):
        world = measure(*two_prompts(gap))
        assert world.variance_q == pytest.approx(1)
        assert world.variance_v == pytest.approx(4 * gap**2, abs=1e-12)
        assert world.gradient == pytest.approx(2 * (0.25 - gap**2))


# ---------------------------------------------------------------------------------- settings


def test_the_smallest_and_longest_worlds_can_be_drawn() -> None:
    for kind in KINDS:
        for horizon in (1, 50):
            settings = BoundSettings(worlds=3, prompts=2, states=2, actions=2, horizon=horizon)
            assert len(random_worlds(settings, 0, kind)) == 3


@pytest.mark.parametrize(
    ("override", "match"),
    [
        ("worlds=2", "worlds"),
        ("chains=[5, 4]", "chains: every length must be odd"),
        ("chains=[5, 5]", "chains: holds something twice"),
        ("lambdas=[1, 1.0]", "lambdas: holds something twice"),
        ("lambdas=[1.0, 1.1]", "lambdas.1"),
        ("length=12", "too many to list"),
        ("coefficient=1.0", "coefficient"),
        ("world=3", "did you mean 'worlds'"),
    ],
)
def test_settings_that_cannot_be_run_are_refused_by_name(override: str, match: str) -> None:
    with pytest.raises(SimError, match=match):
        read_settings(STUDY, [override])
