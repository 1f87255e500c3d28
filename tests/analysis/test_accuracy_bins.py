"""The share of prompts in each accuracy bin."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.accuracy_bins import BINS, accuracy_bin, read_bins
from analysis.sources import open_source
from cvpo import RunLog, read_prompts
from tests.logs import write_log


def bin_of(successes, trials):
    """The bin's name from exact fractions."""
    rate = Fraction(successes, trials)
    if rate == 0:
        return "0"
    if rate == 1:
        return "1"
    quarter = next(q for q in (1, 2, 3, 4) if rate <= Fraction(q, 4))
    return ("(0, .25]", "(.25, .5]", "(.5, .75]", "(.75, 1)")[quarter - 1]


@given(st.integers(1, 64).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_every_rate_lies_in_the_bin_that_exact_fractions_say(counts):
    successes, trials = counts
    assert BINS[int(accuracy_bin(np.array(successes / trials)))] == bin_of(successes, trials)


def test_shares_are_those_of_a_plain_count(tmp_path):
    path = write_log(tmp_path / "a")
    found = read_bins(open_source(path))
    for number, rows in found.groupby("round"):
        prompts = read_prompts(path, rounds=[number])
        names = [
            bin_of(int(s), int(t))
            for s, t in zip(prompts["successes"], prompts["trials"], strict=True)
        ]
        assert rows["share"].tolist() == pytest.approx([names.count(b) / len(names) for b in BINS])
        assert rows["step"].unique().tolist() == [4 * (number + 1)]
        assert rows["true_share"].isna().all()


def test_prompts_that_a_round_did_not_roll_out_take_no_part(tmp_path):
    log = RunLog.create(tmp_path / "a", config={}, seed=1, method="vapo", verifier="exact")
    log.prompts(0, round_of(trials=[4, 0, 4], successes=[4.0, 0.0, 1.0]))
    log.prompts(1, round_of(number=1, trials=[0, 0, 0], successes=[0.0] * 3))
    found = read_bins(open_source(tmp_path / "a"))
    assert found["share"].tolist() == [0, 0.5, 0, 0, 0, 0.5]
    assert found["prompts"].unique().tolist() == [2]
    assert found["round"].unique().tolist() == [0]


def test_a_simulation_says_the_true_rates_too(tmp_path):
    log = RunLog.create(tmp_path / "a", config={}, seed=1, method="vapo", verifier="exact")
    rows = round_of(trials=[2, 2, 2], successes=[0.0, 1.0, 2.0])
    log.prompts(0, rows | {"true_rho": [0.1, 0.6, np.nan]})
    found = read_bins(open_source(tmp_path / "a"))
    assert found["true_share"].tolist() == [0, 0.5, 0, 0.5, 0, 0]


def round_of(*, trials, successes, number=0):
    n = len(trials)
    return {
        "step": [number + 1] * n,
        "round": [number] * n,
        "prompt_id": range(n),
        "visits": [1] * n,
        "trials": trials,
        "successes": successes,
        "alpha": [1.0] * n,
        "beta": [1.0] * n,
        "rho": [0.5] * n,
        "phase": ["early"] * n,
    }
