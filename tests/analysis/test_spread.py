"""The variance of values within a trajectory, over the last logged steps."""

import numpy as np
import pytest

from analysis.sources import open_source
from analysis.spread import read_spread
from cvpo import RunLog, read_trajectories
from tests.logs import write_log


def test_the_variance_is_sigma_squared_of_the_last_steps(tmp_path):
    path = write_log(tmp_path / "a", steps=12)
    found = read_spread(open_source(path), steps=3)
    rows = read_trajectories(path, steps=[10, 11, 12])
    assert found.variance == pytest.approx([sigma**2 for sigma in rows["sigma"]])
    assert found.steps == (10, 11, 12)


def test_scores_of_a_frozen_critic_are_read_alike(tmp_path):
    path = write_log(tmp_path / "a", scored_by="judge")
    own = read_spread(open_source(path), steps=4)
    frozen = read_spread(open_source(path), "scores/judge", steps=4)
    assert frozen.variance == pytest.approx(4 * own.variance)


def test_trajectories_without_sigma_are_left_out(tmp_path):
    log = RunLog.create(tmp_path / "a", config={}, seed=1, method="vapo", verifier="exact")
    for step, sigma in ((1, [0.1, np.nan]), (2, [np.nan, np.nan])):
        log.trajectories(
            step,
            {
                "prompt_id": [0, 0],
                "sample": [0, 1],
                "length": [3, 0],
                "truncated": [False] * 2,
                "reward": [1.0, -1.0],
                "correct": [1.0, 0.0],
                "sigma": sigma,
            },
        )
    source = open_source(tmp_path / "a")
    assert read_spread(source).variance == pytest.approx([0.01])
    assert read_spread(source).steps == (1,)
    assert len(read_spread(source, steps=1).variance) == 0
