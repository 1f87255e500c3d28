"""The partial-credit study: what fractional rewards do to W_S, tracker, W_D and trainings."""

from pathlib import Path

import numpy as np
import pytest
import torch

from cvpo import difficulty_weight
from sim.bandit import Bandit, Draws
from sim.studies.partial_credit import (
    STUDY,
    SWITCH,
    PartialCreditSettings,
    converge,
    difficulty_rows,
    expected_credit,
    misallocation,
    switch_rows,
    tracker_rows,
    train,
    weight_curve,
    weight_rows,
)
from sim.studies.weights import AREA
from sim.study import Desk, SimError, read_settings, run_study


def small(tmp_path: Path, **changes: object) -> PartialCreditSettings:
    given = {
        "credits": (0.25,),
        "prompts": 24,
        "batch": 8,
        "rollouts": 4,
        "steps": 30,
        "frozen_steps": 30,
        "output": tmp_path,
        "backend": "sequential",
        "jobs": 1,
    }
    return PartialCreditSettings.model_validate(given | changes)


def test_w_s_is_the_mix_of_its_branches_to_float_precision(tmp_path: Path) -> None:
    numbers = {row.quantity: row.value for row in weight_rows(weight_curve(small(tmp_path)))}
    assert numbers["largest distance of W_S from (15)-(16), R in {0, 1}"] < 1e-15
    assert numbers["largest distance of W_S from the convex mix, R in (0, 1)"] < 1e-15
    assert 0.7 < numbers["smallest W_S"] < 0.71
    assert 1.29 < numbers["largest W_S"] < 1.3
    assert numbers["smallest rise of W_S with R"] > 0


def test_a_weight_that_is_no_mix_is_found_out(tmp_path: Path) -> None:
    curve = weight_curve(small(tmp_path))
    rounded = curve | {"weight": torch.where(curve["R"] >= 0.5, curve["plus"], curve["minus"])}
    numbers = {row.quantity: row.value for row in weight_rows(rounded)}
    assert numbers["largest distance of W_S from (15)-(16), R in {0, 1}"] < 1e-15
    assert numbers["largest distance of W_S from the convex mix, R in (0, 1)"] > 0.1


def test_expected_credit_is_the_mean_of_sampled_grades(tmp_path: Path) -> None:
    world = small(tmp_path).world(0.3)
    bandit = Bandit(world, [0])
    draws = Draws.of(torch.Generator().manual_seed(0), 24, 2000, world.responses.tokens)
    graded = bandit.respond(torch.arange(24), draws).correct.mean(1)
    torch.testing.assert_close(graded, expected_credit(bandit.rates()[0], 0.3), atol=0.03, rtol=0)


def test_the_tracker_converges_to_the_expected_credit(tmp_path: Path) -> None:
    settings = small(tmp_path, rollouts=16, frozen_steps=150)
    tracked, rates = converge(Desk("partial-credit", settings), settings, 0.25)
    rows = {row.quantity: row for row in tracker_rows(0.25, tracked, rates)}
    shift = 0.25 * (1 - rates).mean()
    assert rows["rho less E[R], mean"].value == pytest.approx(0, abs=0.01)
    assert rows["rho less the rate of full marks, mean"].value == pytest.approx(shift, abs=0.01)
    assert rows["rho less E[R], root mean square"].value < 0.04


def test_misallocation_by_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    seen, true = torch.rand(2, 3, 10, generator=generator).double()
    found = misallocation(seen, true, phase="bottleneck")
    for seed in range(3):
        weights = [
            [difficulty_weight(rho, phase="bottleneck").item() for rho in row[seed]]
            for row in (seen, true)
        ]
        shares = [[w / sum(of) for w in of] for of in weights]
        too_much = sum(max(a - b, 0) for a, b in zip(*shares, strict=True))
        assert found[seed] == pytest.approx(too_much)


@pytest.mark.parametrize("phase", ["early", "bottleneck"])
def test_rates_that_are_seen_right_misallocate_nothing(phase: str) -> None:
    rates = torch.rand(3, 10, generator=torch.Generator().manual_seed(1))
    np.testing.assert_array_equal(misallocation(rates, rates, phase=phase), 0)


def test_the_bottleneck_curve_suffers_more_than_the_early_one(tmp_path: Path) -> None:
    rates = Bandit(small(tmp_path).world(0.25), range(5)).rates()
    rows = [row for row in difficulty_rows(0.25, rates) if row.unit == "share"]
    early, bottleneck = (row.value for row in rows)
    assert 0 < early < bottleneck < 1


def test_larger_steps_make_up_for_the_smaller_gap_in_advantage(tmp_path: Path) -> None:
    """Without them a credit of one half halves every step."""
    settings = small(tmp_path, seeds=(0, 1), prompts=32, batch=16, rollouts=8, steps=40)
    desk = Desk("partial-credit", settings)
    strict = train(desk, settings, 0.0)["vapo"][AREA]
    plain = train(desk, settings, 0.5)["vapo"][AREA]
    larger = train(desk, settings, 0.5, larger_steps=True)["vapo"][AREA]
    assert (plain < strict - 0.02).all()
    assert (np.abs(larger - strict) < 0.3 * (strict - plain)).all()


def test_switches_are_counted() -> None:
    steps = {SWITCH: np.array([40.0, np.nan, 48.0, np.nan])}
    rows = switch_rows("", {"cvpo-curriculum": steps, "cvpo": {SWITCH: np.full(4, np.nan)}})
    assert [row.value for row in rows] == [0.5, 0.0]


def test_the_study_claims_nothing(tmp_path: Path) -> None:
    rows = run_study(STUDY, small(tmp_path, seeds=(0, 1), steps=3))
    assert rows
    assert {row.verdict for row in rows} == {""}
    assert all(np.isfinite(row.value) for row in rows)
    tables = {p.stem for p in (tmp_path / "partial-credit" / "tables").glob("*.parquet")}
    assert tables == {"study", "weight", "trainings"}


@pytest.mark.parametrize(
    ("credits", "message"), [("[1.0]", "credits"), ("[0.1, 0.1]", "credits: holds something twice")]
)
def test_credits_that_cannot_be_measured_are_refused(credits: str, message: str) -> None:
    with pytest.raises(SimError, match=message):
        read_settings(STUDY, [f"credits={credits}"])
