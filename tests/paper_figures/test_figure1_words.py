"""Figure 1: mean values of tokens are those of the log, and every token can be read."""

import math

import numpy as np
import pandas as pd
import pytest

from analysis import AnalysisError
from analysis.exhibit import save
from analysis.sources import open_sources
from cvpo import RunLog, read_tokens
from paper_figures.figure1_words import MIN_COUNT, make, mean_values, visible
from tests.logs import write_log


def test_mean_and_spread_are_those_of_the_values_themselves():
    values = {3: [0.5, -0.25, 0.75], 8: [0.125], 5: [1.0, 1.0]}
    rows = pd.DataFrame(
        {
            "token_id": list(values),
            "token": ["a", "b", "c"],
            "count": [len(v) for v in values.values()],
            "value_sum": [sum(v) for v in values.values()],
            "value_sq_sum": [sum(x * x for x in v) for v in values.values()],
        }
    )
    table = mean_values(rows)
    assert table["token_id"].tolist() == [5, 3, 8]
    for row in table.to_dict("records"):
        x = values[row["token_id"]]
        assert row["mean"] == pytest.approx(np.mean(x))
        if len(x) > 1:
            assert row["sd"] == pytest.approx(np.std(x, ddof=1))
            assert row["standard_error"] == pytest.approx(np.std(x, ddof=1) / math.sqrt(len(x)))
        else:
            assert math.isnan(row["sd"])


def test_seeds_are_pooled_at_the_last_step(tmp_path):
    paths = [write_log(tmp_path / f"s{seed}", seed=seed, steps=8) for seed in (1, 2)]
    exhibit = make(open_sources(paths))
    logs = [read_tokens(path, steps=[8]) for path in paths]
    for row in exhibit.table.to_dict("records"):
        mine = [log[log["token_id"] == row["token_id"]] for log in logs]
        count = sum(int(rows["count"].iloc[0]) for rows in mine)
        total = sum(float(rows["value_sum"].iloc[0]) for rows in mine)
        assert row["count"] == count
        assert row["mean"] == pytest.approx(total / count)
    assert "step 8 of cvpo (seeds 1, 2)" in exhibit.caption


def test_a_seed_behind_the_others_is_left_out_and_named(tmp_path):
    paths = [
        write_log(tmp_path / "done", seed=1, steps=8),
        write_log(tmp_path / "behind", seed=2, steps=5),
    ]
    exhibit = make(open_sources(paths))
    assert exhibit.table["count"].sum() == read_tokens(paths[0], steps=[8])["count"].sum()
    assert "behind has not come to step 8" in exhibit.caption


def test_cvpo_is_shown_before_other_methods(tmp_path):
    paths = [write_log(tmp_path / m, method=m, steps=4) for m in ("vapo", "cvpo", "ppo")]
    assert set(make(open_sources(paths)).table["label"]) == {"cvpo"}


def test_rare_tokens_are_in_the_table_and_not_in_the_cloud(tmp_path):
    write_tokens(tmp_path / "a", count=[MIN_COUNT, MIN_COUNT - 1, 100])
    exhibit = make(open_sources([tmp_path / "a"]))
    assert len(exhibit.table) == 3
    assert "all 2 tokens" in exhibit.caption
    assert "1 of 3 entries were chosen fewer" in exhibit.caption


def test_only_rare_tokens_are_an_error(tmp_path):
    write_tokens(tmp_path / "a", count=[1, 2, 3])
    with pytest.raises(AnalysisError, match="no token was chosen"):
        make(open_sources([tmp_path / "a"]))


def test_runs_without_a_critic_are_an_error_that_says_what_to_do(tmp_path):
    sources = open_sources([write_log(tmp_path / "a", method="grpo", critic=False)])
    with pytest.raises(AnalysisError, match=r"log\.tokens_every"):
        make(sources)


def test_equal_values_and_entries_that_look_alike_are_drawn(tmp_path):
    write_tokens(tmp_path / "a", count=[50, 50, 50], token=["�", "�", "x"])
    assert make(open_sources([tmp_path / "a"])).figure is not None


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        (" the", "␣the"),
        ("\n\n", "↵↵"),
        ("\t", "⇥"),
        ("", "(empty)"),
        ("\\boxed{", "\\boxed{"),
        ("你", "\\u4f60"),
        ("\x00", "\\x00"),
        ("é", "é"),
    ],
)
def test_every_token_is_visible(token, shown):
    assert visible(token) == shown


def test_the_same_logs_give_the_same_bytes(tmp_path):
    sources = open_sources([write_log(tmp_path / "a", steps=4)])
    files = [save(make(sources), tmp_path / name, "x") for name in ("one", "two")]
    assert [f.read_bytes() for f in files[0]] == [f.read_bytes() for f in files[1]]


def write_tokens(path, *, count, token=("a", "b", "c")):
    log = RunLog.create(path, config={}, seed=1, method="cvpo", verifier="exact")
    count = np.array(count)
    log.tokens(
        1,
        {
            "token_id": range(len(count)),
            "token": list(token),
            "count": count,
            "value_sum": 0.5 * count,
            "value_sq_sum": 0.3 * count,
        },
    )
