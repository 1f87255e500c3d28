"""Differences paired by problem and seed, and when one is claimed."""

import numpy as np
import pandas as pd
import pytest

from analysis.__main__ import main
from analysis.compare import differences
from analysis.curves import collect
from analysis.sources import open_sources
from cvpo.metrics import holm, p_value, paired_difference
from tests.training_logs import learning, write_run

SIZES = {"a": 12, "b": 20}
STEPS = (0, 10, 20)


def make(folder, method, seeds, rise, *, steps=STEPS, sizes=SIZES, **options):
    return [
        write_run(
            folder / f"{method}-{seed}",
            learning(sizes, rise, seed=seed, steps=steps),
            method=method,
            seed=seed,
            **options,
        )
        for seed in seeds
    ]


def compared(paths, first="cvpo", other="vapo"):
    return differences(collect(open_sources(paths)), first, [other])


def row(table, benchmark, measure="final"):
    return table[(table["benchmark"] == benchmark) & (table["measure"] == measure)].iloc[0]


def test_a_difference_is_paired_by_seed_and_problem(tmp_path):
    paths = make(tmp_path, "cvpo", (1, 2, 3), 0.3) + make(tmp_path, "vapo", (3, 2, 1), 0.1)
    table, notes = compared(paths)
    assert notes == []
    truth = {
        rise: np.stack(
            [learning(SIZES, rise, seed=s, steps=STEPS)[20]["a"].mean(axis=1) for s in (1, 2, 3)]
        )
        for rise in (0.3, 0.1)
    }
    # Problems of the log are sorted by id; the bootstrap draws by position.
    order = sorted(range(SIZES["a"]), key=lambda p: f"p{p}")
    expected = paired_difference(
        truth[0.3][:, order], truth[0.1][:, order], strata=["a"] * 12, num_resamples=2000
    )
    found = row(table, "a")
    assert found["difference"] == pytest.approx(expected.estimate)
    assert (found["low"], found["high"]) == pytest.approx((expected.low, expected.high))
    assert found["p"] == pytest.approx(p_value(expected))
    assert (found["seeds"], found["problems"], found["step"]) == (3, 12, 20)


def test_holm_is_over_all_rows_of_the_table(tmp_path):
    paths = [
        *make(tmp_path, "cvpo", (1, 2), 0.3),
        *make(tmp_path, "vapo", (1, 2), 0.1),
        *make(tmp_path, "ppo", (1, 2), 0.2),
    ]
    table, _ = differences(collect(open_sources(paths)), "cvpo", ["vapo", "ppo"])
    assert len(table) == 2 * (2 + 3)  # two benchmarks, and three measures of the mean
    assert table["p_holm"].tolist() == pytest.approx(holm(table["p"].to_numpy()).tolist())


def test_a_difference_is_claimed_from_five_seeds_on(tmp_path):
    paths = make(tmp_path, "cvpo", range(5), 0.4) + make(tmp_path, "vapo", range(5), 0.0)
    table, _ = compared(paths)
    assert row(table, "mean")["verdict"] == "higher"
    assert row(compared(paths, "vapo", "cvpo")[0], "mean")["verdict"] == "lower"
    table, _ = compared([*paths[:4], *paths[5:9]])
    assert row(table, "mean")["p_holm"] < 0.05
    assert set(table["verdict"]) == {"not claimed: 4 seeds"}


def test_a_difference_without_any_spread_is_not_judged(tmp_path):
    paths = [
        write_run(
            tmp_path / f"{method}-{seed}", {3: {"a": [[right]] * 4}}, method=method, seed=seed
        )
        for method, right in (("cvpo", 1), ("vapo", 0))
        for seed in range(5)
    ]
    table, _ = compared(paths)
    assert row(table, "a")["difference"] == 1
    assert row(table, "a")["verdict"] == "no spread to judge it by"


def test_equal_methods_show_no_difference(tmp_path):
    # One seed's draws are the other method's too: exactly no difference anywhere.
    paths = make(tmp_path, "cvpo", range(5), 0.1) + make(tmp_path, "vapo", range(5), 0.1)
    table, _ = compared(paths)
    assert (table["difference"] == 0).all()
    assert set(table["verdict"]) == {"no difference shown"}


def test_the_seeds_of_both_are_compared_and_the_last_step_of_both(tmp_path):
    paths = make(tmp_path, "cvpo", (1, 2, 3), 0.3)
    paths += make(tmp_path, "vapo", (2, 3, 4), 0.1, steps=(0, 10))
    table, notes = compared(paths)
    assert set(table["seeds"]) == {2}
    assert set(table["step"]) == {10}
    assert "cvpo and vapo are compared on the seeds of both: 2, 3." in notes
    assert any("compared at step 10" in note and "goes on to step 20" in note for note in notes)


def test_without_a_common_seed_runs_are_paired_by_problem_alone(tmp_path):
    paths = make(tmp_path, "cvpo", (1, 2), 0.3) + make(tmp_path, "vapo", (3, 4, 5), 0.1)
    table, notes = compared(paths)
    assert set(table["seeds"]) == {2}
    assert any("no seed in common: paired by problem alone" in note for note in notes)
    assert any("the first 2 runs of each in order of seed" in note for note in notes)


@pytest.mark.parametrize("seeds", [(3, 4, 5), (7,)])
def test_a_difference_of_one_pair_of_runs_is_said_to_be_over_problems(tmp_path, seeds):
    paths = make(tmp_path, "cvpo", (1, 2, 3), 0.3) + make(tmp_path, "vapo", seeds, 0.1)
    table, notes = compared(paths)
    assert set(table["seeds"]) == {1}
    assert "of one pair of runs, an interval is over problems only" in notes[0]
    pair = make(tmp_path / "pair", "cvpo", (3,) if 3 in seeds else (1,), 0.3)
    pair += make(tmp_path / "pair", "vapo", seeds[:1], 0.1)
    alone, _ = compared(pair)
    assert table[["difference", "low", "high"]].equals(alone[["difference", "low", "high"]])


def test_what_cannot_be_compared_is_said_and_not_compared(tmp_path):
    paths = make(tmp_path, "cvpo", (1,), 0.3)
    graded = make(tmp_path, "vapo", (1,), 0.1, verifier="symbolic")
    table, notes = compared(paths + graded)
    assert table.empty
    assert notes == ["cvpo and vapo are not compared: they are judged by different verifiers."]
    late = make(tmp_path, "ppo", (1,), 0.1, steps=(0, 15))
    table, notes = compared(paths + late, "cvpo", "ppo")
    assert table.empty
    assert "no step after the start in common" in notes[0]
    partly = make(tmp_path, "grpo", (1,), 0.1, sizes={"a": 12, "c": 5})
    table, notes = compared(paths + partly, "cvpo", "grpo")
    assert set(table["benchmark"]) == {"a", "mean"}
    assert "cvpo and grpo are not compared on b: cvpo only." in notes
    assert "cvpo and grpo are not compared on c: grpo only." in notes


# -------------------------------------------------------------------------------- command line


def test_the_command_prints_the_table_and_writes_it(tmp_path, capsys):
    paths = make(tmp_path, "vapo", (1, 2), 0.1) + make(tmp_path, "cvpo", (1, 2), 0.3)
    out = tmp_path / "out"
    assert main(["compare", *map(str, paths), "-o", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "vapo - cvpo" in printed  # the first run's label is the one that others are taken from
    assert "not claimed: 2 seeds" in printed
    saved = pd.read_csv(out / "compare.csv")
    expected, _ = compared(paths, "vapo", "cvpo")
    pd.testing.assert_frame_equal(saved, expected, check_dtype=False)
    assert (saved.loc[saved["benchmark"] == "mean", "difference"] < 0).all()


def test_the_command_compares_single_runs(tmp_path, capsys):
    paths = make(tmp_path, "vapo", (1, 2), 0.1)
    options = ["-o", str(tmp_path / "out")]
    assert main(["compare", *map(str, paths), *options]) == 2
    assert "all runs are vapo: there is nothing to compare; use --by run" in capsys.readouterr().err
    assert main(["compare", *map(str, paths), "--by", "run", *options]) == 0
    assert "vapo-1 - vapo-2" in capsys.readouterr().out


def test_the_command_refuses_in_one_line_what_it_cannot_compare(tmp_path, capsys):
    paths = make(tmp_path, "cvpo", (1,), 0.3)
    graded = make(tmp_path, "vapo", (1,), 0.1, verifier="symbolic")
    assert main(["compare", str(paths[0]), str(graded[0]), "-o", str(tmp_path / "out")]) == 2
    assert "judged by different verifiers" in capsys.readouterr().err
    young = make(tmp_path, "ppo", (1,), 0, steps=(0,))
    assert main(["compare", str(young[0]), str(paths[0]), "-o", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert "ppo is left out: it was evaluated before training only" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()
