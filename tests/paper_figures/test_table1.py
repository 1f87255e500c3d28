"""Table 1 against the log's own numbers, its stars, and the paper's block."""

import pytest

from analysis import AnalysisError
from analysis.paper import BENCHMARKS, TABLE_1, paper_accuracy, paper_benchmark
from analysis.sources import open_sources
from paper_figures.table1 import make, reference
from tests.training_logs import learning, write_run

PAPER = {"AIME24": 10, "aime25": 10, "AMC23": 12, "amc-24": 12, "MATH500": 20}
LAPTOP = {"add-1": 10, "add-2": 16}


def runs(folder, sizes, seeds=(1, 2), methods=(("vapo", 0.1), ("cvpo", 0.3))):
    return [
        write_run(
            folder / f"{method}-{seed}",
            learning(sizes, rise, seed=seed, steps=(0, 10, 20)),
            method=method,
            seed=seed,
        )
        for method, rise in methods
        for seed in seeds
    ]


def line(text, start):
    found = [row for row in text.splitlines() if row.startswith(f"| {start} ")]
    assert found, text
    return [cell.strip() for cell in found[0].strip("|").split("|")]


def test_levels_are_those_of_the_log_with_the_papers_number_beside(tmp_path):
    exhibit = make(open_sources(runs(tmp_path, PAPER)))
    truth = [
        learning(PAPER, 0.3, seed=seed, steps=(0, 10, 20))[20]["AIME24"].mean() for seed in (1, 2)
    ]
    accuracy = sum(truth) / 2
    cell = line(exhibit.text, "cvpo")[3]  # after label, seeds and step
    assert cell.startswith(f"{100 * accuracy:.1f} [")
    assert cell.endswith("(paper 23.7)")
    table = exhibit.table
    row = table[
        (table["label"] == "cvpo")
        & (table["benchmark"] == "AIME24")
        & (table["measure"] == "final")
    ].iloc[0]
    assert row["accuracy"] == pytest.approx(accuracy)
    assert row["paper"] == 0.237
    assert line(exhibit.text, "before training")[1:3] == ["2", "0"]


def test_the_overlap_of_amc23_and_the_papers_disagreement_are_stated(tmp_path):
    caption = make(open_sources(runs(tmp_path, PAPER))).caption
    assert "25 of AMC23's 40 problems" in caption
    assert ".220" in caption
    assert ".237" in caption


def test_for_other_benchmarks_the_papers_table_stands_below(tmp_path):
    exhibit = make(open_sources(runs(tmp_path, LAPTOP)))
    assert "(paper" not in exhibit.text
    assert "The paper's table 1" in exhibit.text
    assert exhibit.text.count("| 23.7 ") == 1
    assert "AMC23's 40 problems" not in exhibit.caption


def test_few_seeds_are_shown_and_not_claimed(tmp_path):
    exhibit = make(open_sources(runs(tmp_path, LAPTOP)))
    below = exhibit.text.split("Differences, cvpo minus:")[1]
    assert line(below, "vapo")[-1] == "not claimed: 2 seeds"
    assert "*" not in below.split("The paper's")[0]
    assert "the family is all 5 differences" in exhibit.caption


def test_five_seeds_may_be_claimed(tmp_path):
    exhibit = make(open_sources(runs(tmp_path, LAPTOP, range(5))))
    cells = line(exhibit.text.split("Differences, cvpo minus:")[1], "vapo")
    assert cells[-1] == "claimed where starred"
    assert "*" in cells[5]  # the mean, after label, seeds, step and two benchmarks


def test_one_run_says_that_it_is_one(tmp_path):
    exhibit = make(open_sources(runs(tmp_path, LAPTOP, (1,), (("vapo", 0.1),))))
    assert "vapo has one run" in exhibit.caption
    assert "There is one method only, so no difference." in exhibit.caption
    assert "Differences" not in exhibit.text


def test_the_same_logs_give_the_same_table(tmp_path):
    paths = runs(tmp_path, LAPTOP)
    first, again = make(open_sources(paths)), make(open_sources(paths[::-1]))
    assert first.text == again.text
    assert first.table.equals(again.table)


def test_without_a_training_there_is_no_table():
    with pytest.raises(AnalysisError, match="evals"):
        make([])


def test_differences_are_taken_of_cvpo():
    assert reference(["vapo", "cvpo c=.1", "cvpo", "cvpo c=.5"]) == "cvpo"
    assert reference(["vapo", "cvpo-curriculum"]) == "cvpo-curriculum"


def test_the_papers_numbers_are_found_by_any_spelling_of_a_benchmark():
    assert [paper_benchmark(name) for name in PAPER] == list(BENCHMARKS)
    assert paper_benchmark("add-1") is None
    assert paper_accuracy("vapo", "math_500") == 0.452
    assert paper_accuracy("grpo-async", "AIME24") is None
    assert paper_accuracy("cvpo", "add-1") is None
    assert all(len(row) == len(BENCHMARKS) for row in TABLE_1.values())
