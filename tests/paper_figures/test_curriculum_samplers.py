"""Differences against plain VAPO, at equal steps and at equal rollouts."""

import math

from paper_figures.curriculum_samplers import make
from tests.study_logs import write_study

MEASURES = ("final accuracy", "area under the accuracy curve")


def rows(**values):
    """Setting -> difference, or a pair of them for one that discards rollouts."""
    found = []
    for name, value in values.items():
        method = name.replace("__", "=")
        budgets = (
            {"equal steps": value[0], "equal rollouts": value[1]}
            if isinstance(value, tuple)
            else {"equal steps and rollouts": value}
        )
        found += [
            {"quantity": measure, "setting": f"{method} - vapo; {budget}", "value": difference}
            | {"low": difference - 0.01, "high": difference + 0.01, "n": 5}
            for measure in MEASURES
            for budget, difference in budgets.items()
        ]
        if isinstance(value, tuple):
            what = "share of rollouts that are discarded"
            found.append({"quantity": what, "setting": method, "value": 0.8, "n": 5})
    return found


ROWS = [
    *rows(cvpo=0.03, w_d__constant=0.02, sampler__mopps=0.04, dapo=(0.08, -0.01), grpo=0.0),
    # Other comparisons of the study are not against VAPO at a budget.
    {"quantity": "final accuracy", "setting": "cvpo - sampler=mopps; equal rollouts", "value": 9.0},
]


def study(path, rows=ROWS, **options):
    return write_study(path, "curriculum", rows, prompts=64, steps=60, **options)


def test_what_discards_nothing_counts_for_both_budgets(tmp_path):
    found = make([study(tmp_path / "s")]).table
    final = found[found["measure"] == "final accuracy"].set_index(["method", "budget"])
    assert final.loc[("sampler=mopps", "equal steps"), "value"] == 0.04
    assert final.loc[("sampler=mopps", "equal rollouts"), "value"] == 0.04
    assert final.loc[("dapo", "equal steps"), "value"] == 0.08
    assert final.loc[("dapo", "equal rollouts"), "low"] == -0.02
    assert 9.0 not in set(found["value"])
    assert len(found) == 2 * 2 * 5


def test_own_weights_come_first_then_rivals_by_accuracy_at_equal_rollouts(tmp_path):
    exhibit = make([study(tmp_path / "s")])
    labels = [label.get_text() for label in exhibit.figure.axes[0].get_yticklabels()]
    assert labels == ["cvpo", "w_d=constant", "mopps", "grpo", "dapo (80% discarded)"]


def test_the_caption_names_who_discards_and_the_size(tmp_path):
    caption = make([study(tmp_path / "s")]).caption
    assert "dapo discard rollouts" in caption
    assert "64 prompts, 60 steps" in caption


def test_one_seed_draws_points_without_intervals(tmp_path):
    bare = [row | {"low": math.nan, "high": math.nan} for row in ROWS]
    exhibit = make([study(tmp_path / "s", bare, seeds=(0,))])
    assert "seed 0 only" in exhibit.caption
    assert exhibit.table["low"].isna().all()
