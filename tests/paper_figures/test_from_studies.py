"""The scripts against the studies themselves, made small: their words and tables are a contract."""

import importlib

import pytest

from analysis.exhibit import save
from analysis.sources import open_source
from tests.study_logs import SMALL_STUDIES, run_small

pytestmark = pytest.mark.slow

SHOWN = {
    "bound": ("bound_tightness", {"panel": {"links", "chain"}}),
    "tracker": (
        "tracker_drift",
        {"quantity": {"error", "coverage", "lag"}, "drift": {"a real run", "frozen", "plateau"}},
    ),
    "trigger": (
        "trigger_study",
        {"policy": {"improving", "stopped", "frozen"}, "panel": {"synthetic", "real run"}},
    ),
    "sensitivity": ("sensitivity", {"end": {"low", "high"}}),
    "weights": ("arms", {"arm": {"none", "constant", "matched", "shuffled", "flipped"}}),
    "curriculum": ("curriculum_samplers", {"budget": {"equal steps", "equal rollouts"}}),
}


@pytest.mark.parametrize("name", SMALL_STUDIES)
def test_an_exhibit_finds_its_rows_in_the_study_s_own_log(tmp_path, name):
    log = open_source(run_small(name, tmp_path))
    script, expected = SHOWN[name]
    make = importlib.import_module(f"paper_figures.{script}").make
    exhibit = make([log])
    for column, values in expected.items():
        assert values <= set(exhibit.table.loc[exhibit.table["value"].notna(), column])
    assert f"python -m sim {name}" in exhibit.caption
    first, again = save(exhibit, tmp_path / "a", "x"), save(make([log]), tmp_path / "b", "x")
    assert len(first) == 4
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in again]
