"""The scripts against the studies themselves, made small: their words and tables are a contract."""

import importlib
import json

import numpy as np
import pytest

from analysis.exhibit import save
from analysis.sources import open_source
from sim.study import read_settings, run_study

SMALL = {
    "bound": ["worlds=3", "chains=[5, 25]", "length=3"],
    "tracker": ["num_prompts=20", "rounds=8", "discounts=[0.9]", "windows=[3]", "burn_in=2"],
    "trigger": ["num_prompts=60", "rounds=24", "stops=[5]", "growths=[0.1]", "control_seeds=2"],
    "sensitivity": ["points=2", "prompts=8", "rounds=4"],
    "weights": ["prompts=8", "batch=4", "steps=6", "draws=2", "tree_steps=4", "length=3"],
    "curriculum": ["prompts=32", "steps=20"],
}
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
SLOW = ("weights", "curriculum")


def history(path, prompts=30, epochs=30):
    """A run whose hard prompts never and whose easy ones always succeed: the printed rule fires."""
    counts = np.where(np.arange(prompts)[:, None] % 2, 8, np.zeros(epochs, dtype=int))
    counts[:4] = np.random.default_rng(0).integers(0, 9, (4, epochs))
    path.write_text(json.dumps({f"p{i}": row for i, row in enumerate(counts.tolist())}))
    return path


def run(name, folder):
    """The log of a study run with its smallest settings."""
    study = importlib.import_module(f"sim.studies.{name}").STUDY
    seeds = "[0]" if name == "curriculum" else "[0, 1]"
    settings = [f"output={folder}", "jobs=1", "backend=sequential", f"seeds={seeds}", *SMALL[name]]
    if name in ("tracker", "trigger"):
        settings += [f"replay={history(folder / 'run.json')}", "replay_values=counts"]
    run_study(study, read_settings(study, settings))
    return open_source(folder / name)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in SMALL],
)
def test_an_exhibit_finds_its_rows_in_the_study_s_own_log(tmp_path, name):
    log = run(name, tmp_path)
    script, expected = SHOWN[name]
    make = importlib.import_module(f"paper_figures.{script}").make
    exhibit = make([log])
    for column, values in expected.items():
        assert values <= set(exhibit.table.loc[exhibit.table["value"].notna(), column])
    assert f"python -m sim {name}" in exhibit.caption
    first, again = save(exhibit, tmp_path / "a", "x"), save(make([log]), tmp_path / "b", "x")
    assert len(first) == 4
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in again]
