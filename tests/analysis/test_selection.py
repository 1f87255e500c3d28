"""Which trainings an exhibit can use, where they end, and what their seeds say together."""

import math

import pytest
from scipy import stats

from analysis import AnalysisError
from analysis.selection import (
    about_seeds,
    at_the_end,
    describe,
    headline,
    holding,
    last_step,
    over_seeds,
    paragraph,
    recent,
    steps_of,
    which_steps,
)
from analysis.sources import open_source, open_sources
from cvpo import RunLog
from tests.logs import write_log


def test_runs_without_the_part_are_named_with_the_reason(tmp_path):
    sources = open_sources(
        [
            write_log(tmp_path / "a", method="vapo"),
            write_log(tmp_path / "b", method="grpo", critic=False),
            write_log(tmp_path / "c", method="cvpo", without=["trajectories"]),
        ]
    )
    found = holding(sources, "trajectories", ["sigma"], remedy="train vapo")
    assert [run.name for runs in found.groups.values() for run in runs] == ["a"]
    assert any(note.startswith("b is left out") and "sigma" in note for note in found.notes)
    assert any(note.startswith("c is left out") and "trajectories" in note for note in found.notes)


def test_when_no_run_holds_the_part_the_error_says_how_to_get_it(tmp_path):
    sources = open_sources([write_log(tmp_path / "b", method="grpo", critic=False)])
    with pytest.raises(AnalysisError, match=r"sigma in trajectories: train vapo\..*b is left out"):
        holding(sources, "trajectories", ["sigma"], remedy="train vapo")


def test_logs_of_unknown_methods_are_no_trainings(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "data": {"critic/rewards/mean": 0.5}}\n')
    with pytest.raises(AnalysisError, match="None of the logs says which method"):
        holding(open_sources([file]), "trajectories", remedy="train vapo")


def test_a_run_that_has_not_come_as_far_is_not_compared_at_the_end(tmp_path):
    sources = open_sources(
        [
            write_log(tmp_path / "a", method="vapo", steps=20),
            write_log(tmp_path / "b", method="cvpo", steps=18),
            write_log(tmp_path / "c", method="cvpo", seed=2, steps=17),
        ]
    )
    found = at_the_end(holding(sources, "trajectories", remedy=""))
    assert [run.name for runs in found.groups.values() for run in runs] == ["a", "b"]
    assert found.notes == ("c is left out: it has come to step 17 only, of 20.",)


@pytest.fixture(scope="module", params=[(), ("metrics",)], ids=["", "no-metrics"])
def long_run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return open_source(write_log(folder / "a", steps=24, without=request.param))


@pytest.mark.parametrize("count", [1, 3, 10, 50])
@pytest.mark.parametrize("part", ["trajectories", "tokens"])
def test_recent_gives_what_the_end_of_a_whole_read_gives(long_run, count, part):
    found = recent(long_run, part, ["step"], count)
    every = [frame["step"].iloc[0] for frame in long_run.scan(part, ["step"])]
    assert [frame["step"].iloc[0] for frame in found] == every[-count:]


def test_a_part_without_a_row_is_an_error_that_names_the_run(tmp_path):
    log = RunLog.create(tmp_path / "a", config={}, seed=1, method="vapo", verifier="exact")
    log.tokens(1, {"token_id": [], "token": [], "count": []})
    with pytest.raises(AnalysisError, match="a: tokens has no row"):
        recent(open_source(tmp_path / "a"), "tokens", ["step"], 1)


def test_recent_of_a_long_run_opens_few_files(tmp_path):
    path = write_log(tmp_path / "a", steps=40)
    (path / "trajectories" / "00000001.parquet").write_bytes(b"damaged")
    source = open_source(path)
    assert len(recent(source, "trajectories", ["step"], 3)) == 3
    with pytest.raises(AnalysisError, match=r"00000001\.parquet"):
        recent(source, "trajectories", ["step"], 40)


def test_a_run_without_metrics_is_at_step_0(tmp_path):
    assert last_step(open_source(write_log(tmp_path / "a", without=["metrics"]))) == 0
    assert last_step(open_source(write_log(tmp_path / "b", steps=7))) == 7


def test_the_interval_over_seeds_is_the_t_interval():
    values = [0.1, 0.4, 0.2, math.nan]
    found = over_seeds(values)
    low, high = stats.t.interval(0.95, 2, loc=0.7 / 3, scale=stats.sem(values[:3]))
    assert found.estimate == pytest.approx(0.7 / 3)
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-6)


def test_one_seed_has_no_interval_and_none_has_no_mean():
    assert over_seeds([0.5]).estimate == 0.5
    assert math.isnan(over_seeds([0.5]).low)
    assert math.isnan(over_seeds([math.nan]).estimate)
    assert math.isnan(over_seeds([]).estimate)


def test_captions_name_the_seeds(tmp_path):
    sources = open_sources(
        [
            *(write_log(tmp_path / f"a{s}", method="vapo", seed=s, steps=1) for s in (1, 2, 3)),
            *(write_log(tmp_path / f"b{s}", method="grpo", seed=s, steps=1) for s in (1, 4)),
            write_log(tmp_path / "c", steps=1),
        ]
    )
    groups = holding(sources, "trajectories", remedy="").groups
    text = describe(groups)
    assert "vapo (seeds 1-3)" in text
    assert "grpo (seeds 1, 4)" in text
    assert "cvpo (seed 1)" in text
    assert "cvpo has one seed and no interval" in about_seeds(groups)
    assert "nothing is said about other seeds" in about_seeds({"cvpo": groups["cvpo"]})
    assert "one seed" not in about_seeds({"vapo": groups["vapo"]})


def test_the_headline_is_cvpo_then_a_variant_then_any():
    assert headline({"vapo": [], "cvpo c=.1": [], "cvpo": []}) == "cvpo"
    assert headline({"vapo": [], "cvpo c=.1": [], "cvpo-curriculum": []}) == "cvpo c=.1"
    assert headline({"vapo": [], "ppo": []}) == "vapo"


def test_a_paragraph_has_the_sentences_that_there_are():
    assert paragraph("One.", None, "Two.", "") == "One. Two."


def test_runs_left_out_for_one_reason_have_one_sentence(tmp_path):
    sources = open_sources(
        [
            write_log(tmp_path / "a", method="vapo", steps=1),
            *(
                write_log(tmp_path / name, method="grpo", seed=seed, critic=False, steps=1)
                for seed, name in enumerate("bc")
            ),
        ]
    )
    notes = holding(sources, "trajectories", ["sigma"], remedy="").notes
    assert [note for note in notes if "left out" in note] == [
        "b, c are left out: no sigma in trajectories (null in every row of 00000001.parquet)."
    ]


def test_a_run_without_metrics_is_not_said_to_stand_at_the_start(tmp_path):
    sources = open_sources(
        [
            write_log(tmp_path / "a", method="vapo"),
            write_log(tmp_path / "b", without=["metrics"]),
        ]
    )
    found = at_the_end(holding(sources, "trajectories", remedy=""))
    assert found.notes == ("b is left out: without metrics it is not known how far it has come.",)


def test_recent_finds_steps_that_stand_between_those_of_the_metrics(tmp_path):
    path = write_log(tmp_path / "a", steps=40)
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text("".join(lines[4::5]))
    frames = recent(open_source(path), "trajectories", ["step"], 3)
    assert [frame["step"].iloc[0] for frame in frames] == [38, 39, 40]


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([7], "step 7"),
        (range(31, 41), "steps 31-40"),
        ([2, 4, 9], "steps 2, 4, 9"),
        (range(5, 41, 5), "every 5th step from 5 to 40"),
        ([*range(10, 100, 10), 98], "every 10th step from 10 to 90, and step 98"),
        (range(2, 12, 2), "every 2nd step from 2 to 10"),
        ([5, 10, 15, 20, 40], "5 steps between 5 and 40"),
        ([1, 2, 3, 10, 11, 20, 30, 40], "8 steps between 1 and 40"),
    ],
)
def test_steps_are_told_in_words_without_a_gap_passed_over(steps, words):
    assert which_steps(steps) == words


def test_runs_of_other_steps_are_named():
    assert steps_of({"a": [1, 2], "b": [1, 2]}) == "steps 1-2"
    assert steps_of({"a": [1, 2], "b": [2], "c": [2]}) == "steps 1-2 (a); step 2 (b, c)"
