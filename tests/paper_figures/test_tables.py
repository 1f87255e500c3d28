"""The two tables that compare designs and hyper-parameters; they need no run."""

import math

import pytest

from analysis.sources import open_source
from cvpo import METHODS, SAMPLERS, CurriculumConfig, RunLog, StochasticityConfig
from paper_figures import table_designs, table_hyperparameters
from tests.training_logs import config_of


def trained(path, method="cvpo", **sections):
    config = config_of(method) | {"rollout": {"prompts": 32}, "algorithm": {"gamma": 1.0}}
    config["declared"] |= {"length_adaptive_alpha": 1.0}
    config |= sections
    RunLog.create(path, config=config, seed=1, method=method, verifier="exact")
    return open_source(path)


def row(exhibit, name):
    table = exhibit.table
    return table[table["hyper-parameter"].str.contains(name, regex=False)].iloc[0]


# -------------------------------------------------------------------------------------- designs


def test_mopps_is_told_as_its_source_has_it():
    exhibit = table_designs.make([])
    mopps = exhibit.table.set_index("method").loc["MoPPS (Qu et al.)"]
    assert "Beta posterior" in mopps["curriculum"]
    assert "Thompson" in mopps["curriculum"]
    assert mopps["correction"]
    assert len(exhibit.table) == 5
    assert exhibit.text.count("\n") == 6


def test_only_cvpo_uses_the_spread():
    table = table_designs.make([]).table.set_index("method")
    assert table.index[table["within_trajectory"] == "yes"].tolist() == ["CVPO"]


def test_every_name_in_backquotes_is_one_of_this_project():
    named = " ".join(table_designs.make([]).table["here"]).split("`")[1::2]
    assert len(named) == 10
    assert set(named) <= METHODS.keys() | SAMPLERS.keys()


# --------------------------------------------------------------------------------- our constants


def test_the_paper_s_constants_are_the_library_s_defaults():
    exhibit = table_hyperparameters.make([])
    same = exhibit.table.set_index("hyper-parameter")["same"]
    assert (same[["early curve k1, c1, k2, c2", "weight of the positive LM loss"]] == "yes").all()
    assert row(exhibit, "bottleneck curve")["here"] == "4.1 / -.1 / 2 / .9"
    assert row(exhibit, "bottleneck test")["same"] == "yes"
    assert row(exhibit, "sharpness")["here"] == "50 / 50"


def test_lambda_critic_is_marked_as_other_than_the_paper_s():
    exhibit = table_hyperparameters.make([])
    gae = row(exhibit, "GAE")
    assert (gae["here"], gae["same"]) == ("1 / .17 / 1", "no")
    assert "**1 / .17 / 1**" in exhibit.text


def test_without_a_run_what_only_a_run_decides_is_a_dash():
    exhibit = table_hyperparameters.make([])
    assert row(exhibit, "learning rate")["here"] == "- / -"
    assert row(exhibit, "learning rate")["same"] == "-"
    assert "No run of CVPO" in exhibit.caption


def test_keys_are_keys_of_the_configurations_they_are_read_from():
    known = {"stochasticity": StochasticityConfig, "curriculum": CurriculumConfig}
    for entry in table_hyperparameters.ENTRIES:
        for key in entry.keys:
            section, name = key.split(".")
            if section in known and name != "round_steps":
                assert name in known[section].__dataclass_fields__, key


def test_the_runs_values_are_counted_and_held_against_the_paper_s(tmp_path):
    pair = {"alpha_p": 0.1, "alpha_n": 0.1}
    runs = [
        trained(tmp_path / "a", actor={"lr": 1e-6}, critic={"lr": 2e-6}),
        trained(tmp_path / "b", actor={"lr": 1e-6}, critic={"lr": 2e-6}),
        trained(tmp_path / "c", actor={"lr": 1e-4}, critic={"lr": 2e-6}, stochasticity=pair),
        trained(tmp_path / "d", method="vapo", actor={"lr": 9.0}),
    ]
    exhibit = table_hyperparameters.make(runs)
    rate = row(exhibit, "learning rate")
    assert rate["here"] == "1e-6 / 2e-6 (2 of 3 runs); .0001 / 2e-6 (1 of 3 runs)"
    assert rate["same"] == "no"
    assert table_hyperparameters.make(runs[:2]).table["same"][0] == "yes"
    assert row(exhibit, "alpha_P")["here"] == ".3 / .3 (2 of 3 runs); .1 / .1 (1 of 3 runs)"
    assert row(exhibit, "GAE")["here"] == "1 / 1 / 1"
    assert "3 runs of CVPO" in exhibit.caption


def test_a_half_of_cvpo_says_nothing_about_the_weight_it_does_not_use(tmp_path):
    half = trained(tmp_path / "a", method="cvpo-stochasticity", curriculum={"quantifier": "all"})
    exhibit = table_hyperparameters.make([half])
    assert row(exhibit, "must meet")["here"] == "-"
    assert row(exhibit, "alpha_P")["here"] == ".3 / .3"


def test_a_log_without_the_declaration_gets_the_method_s_own(tmp_path):
    algorithm = {"lambda_critic": 0.1, "clip_low": None, "gamma": 0.99}
    config = {"rollout": {}, "algorithm": algorithm, "pretraining": {"max_steps": 8}}
    RunLog.create(tmp_path / "a", config=config, seed=1, method="cvpo", verifier="exact")
    exhibit = table_hyperparameters.make([open_source(tmp_path / "a")])
    assert row(exhibit, "GAE")["here"] == ".1 / .17 / .99"
    assert row(exhibit, "clip")["here"] == ".2 / .28"
    assert row(exhibit, "value pretraining")["here"] == "8"


def test_a_configuration_with_sections_left_empty_is_read_all_the_same(tmp_path):
    config = {"rollout": {}, "algorithm": None, "pretraining": None, "declared": None}
    RunLog.create(tmp_path / "a", config=config, seed=1, method="cvpo", verifier="exact")
    exhibit = table_hyperparameters.make([open_source(tmp_path / "a")])
    assert row(exhibit, "GAE")["here"] == "1 / .17 / -"
    assert row(exhibit, "alpha_P")["here"] == "- / -"


@pytest.mark.parametrize("make", [table_designs.make, table_hyperparameters.make])
def test_the_table_is_the_same_each_time_and_has_no_hole(make):
    first, again = make([]), make([])
    assert first.text == again.text
    assert not first.table.map(lambda x: isinstance(x, float) and math.isnan(x)).any(axis=None)
