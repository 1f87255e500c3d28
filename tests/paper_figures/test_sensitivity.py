"""One constant at a time, and all at once."""

import math

import pytest

from analysis import AnalysisError
from paper_figures.sensitivity import make
from tests.study_logs import write_study

NOISE = 0.02
SIDES = [
    {"parameter": name, "value": value, "difference": difference, "low": low, "high": high}
    | {"default": default, "seed_noise": NOISE}
    for name, default, value, difference, low, high in (
        ("alpha_p", 0.3, 0.0, -0.02, -0.03, -0.01),
        ("alpha_p", 0.3, 0.6, 0.01, 0.0, 0.02),
        ("lambda_p", 50.0, 12.5, 0.0, -0.01, 0.01),
        ("lambda_p", 50.0, 200.0, 0.001, 0.0, 0.002),
    )
]
OUTCOMES = ("final accuracy", "final accuracy beyond the mean weight")


def sobol(totals=(0.2, 0.6)):
    return [
        {"outcome": outcome, "parameter": name, "first": total / 2, "total": total}
        | {"first_low": 0.0, "first_high": 0.5, "total_low": 0.1, "total_high": 0.7}
        for outcome in OUTCOMES
        for name, total in zip(("alpha_p", "lambda_p"), totals, strict=True)
    ]


def study(path, sides=SIDES, indices=None, **options):
    tables = {"one_at_a_time": sides, "sobol": sobol() if indices is None else indices}
    return write_study(path, "sensitivity", tables=tables, points=64, **options)


def test_both_ends_of_a_range_are_told_apart(tmp_path):
    found = make([study(tmp_path / "s")]).table
    alone = found[found["panel"] == "one at a time"].set_index(["parameter", "end"])
    assert alone.loc[("alpha_p", "low"), "value"] == -0.02
    assert alone.loc[("alpha_p", "high"), "setting"] == 0.6
    assert alone.loc[("lambda_p", "high"), "high"] == 0.002


def test_the_constant_of_the_largest_total_index_comes_first_in_both_panels(tmp_path):
    exhibit = make([study(tmp_path / "s")])
    labels = [label.get_text() for label in exhibit.figure.axes[0].get_yticklabels()]
    assert labels == ["lambda_p  50 (12.5 to 200)", "alpha_p  .3 (0 to .6)"]
    bottom, top = exhibit.figure.axes[1].get_ylim()
    assert bottom > top


def test_the_caption_gives_the_noise_and_what_is_no_interaction(tmp_path):
    caption = make([study(tmp_path / "s")]).caption
    assert "(2.0 points)" in caption
    assert "first-order shares sum to 40 %" in caption
    assert "64 points" in caption


def test_one_seed_has_no_noise_and_no_interval(tmp_path):
    sides = [side | {"low": math.nan, "high": math.nan, "seed_noise": math.nan} for side in SIDES]
    exhibit = make([study(tmp_path / "s", sides, seeds=(0,))])
    assert "standard deviation over seeds" not in exhibit.caption
    assert "no interval over seeds" in exhibit.caption


def test_the_drawn_points_are_percent(tmp_path):
    left, right = make([study(tmp_path / "s")]).figure.axes
    drawn = {line.get_label(): line for line in left.lines}
    assert list(drawn["lowest value"].get_xdata()) == pytest.approx([0, -2])
    drawn = {line.get_label(): line for line in right.lines}
    assert list(drawn["of final accuracy"].get_xdata()) == pytest.approx([60, 20])


@pytest.mark.parametrize("nothing", [None, math.nan])
def test_an_outcome_that_does_not_vary_has_no_shares(tmp_path, nothing):
    names = ("first", "first_low", "first_high", "total", "total_low", "total_high")
    indices = [row | dict.fromkeys(names, nothing) for row in sobol()]
    exhibit = make([study(tmp_path / "s", indices=indices)])
    exhibit.figure.draw_without_rendering()
    assert "there is none, since the final accuracy is the same at every point" in exhibit.caption
    assert exhibit.table.loc[exhibit.table["panel"] == "Sobol", "total"].isna().all()


def test_a_constant_that_was_moved_to_one_side_only_is_drawn_there(tmp_path):
    exhibit = make([study(tmp_path / "s", SIDES[1:])])
    alone = exhibit.table[exhibit.table["parameter"] == "alpha_p"]
    assert alone["end"].dropna().tolist() == ["high"]


def test_tables_of_other_constants_are_refused(tmp_path):
    with pytest.raises(AnalysisError, match="not of the same constants"):
        make([study(tmp_path / "s", SIDES[2:])])
