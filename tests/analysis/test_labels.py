"""What a training is called, which runs are its seeds, and that labels look different."""

import itertools

import matplotlib.pyplot as plt
import pytest

from analysis import METHOD_COLORS, AnalysisError
from analysis.exhibit import style
from analysis.labels import (
    coefficient,
    color,
    dash,
    groups,
    label,
    marker,
    of_methods,
    trainings,
)
from analysis.panels import legend_above
from analysis.sources import open_source, open_sources
from cvpo import METHODS, RunLog
from tests.training_logs import config_of, write_run

VERDICTS = {0: {"b": [[0, 1]]}}


def source(path, method="cvpo", seed=1, config=None):
    return open_source(write_run(path, VERDICTS, method=method, seed=seed, config=config))


def with_keys(method, **sections):
    config = config_of(method)
    for section, keys in sections.items():
        config[section] = {**config.get(section, {}), **keys}
    return config


@pytest.mark.parametrize(
    ("method", "sections", "expected"),
    [
        ("cvpo", {}, "cvpo"),
        ("cvpo", {"stochasticity": {"alpha_p": 0.1, "alpha_n": 0.1}}, "cvpo c=.1"),
        ("cvpo", {"stochasticity": {"alpha_p": 0.3, "alpha_n": 0.0}}, "cvpo alpha_n=0"),
        (
            "cvpo-stochasticity",
            {"stochasticity": {"arm": "constant"}},
            "cvpo-stochasticity (constant)",
        ),
        (
            "cvpo",
            {"stochasticity": {"lambda_p": 200.0, "lambda_n": 200.0, "mu": "outcome_group"}},
            "cvpo lambda=200 mu=outcome_group",
        ),
        (
            "cvpo",
            {"curriculum": {"discount": 0.9, "early": [1.6, -0.2, 2.0, 1.2]}},
            "cvpo discount=.9",
        ),
        ("vapo", {"declared": {"lambda_critic": 0.1}}, "vapo lambda_critic=.1"),
        ("vapo", {"rollout": {"sampler": "mopps"}}, "vapo sampler=mopps"),
        ("cvpo", {"declared": {"curriculum": False}}, "cvpo without W_D"),
        # What a method does not use does not tell its runs apart.
        ("vapo", {"stochasticity": {"alpha_p": 0.1, "alpha_n": 0.1}}, "vapo"),
        ("cvpo-stochasticity", {"curriculum": {"discount": 0.9}}, "cvpo-stochasticity"),
    ],
)
def test_a_label_is_the_method_and_what_is_not_its_default(tmp_path, method, sections, expected):
    found = source(tmp_path / "run", method, config=with_keys(method, **sections))
    assert label(found) == expected


def test_a_method_of_a_users_own_and_a_bare_configuration_have_a_label(tmp_path):
    assert label(source(tmp_path / "run", "mine", config={})) == "mine"
    assert label(source(tmp_path / "other", "cvpo", config={})) == "cvpo"


def test_groups_are_in_order_of_methods_and_seeds(tmp_path):
    sources = [
        source(tmp_path / "a", "cvpo", 2),
        source(tmp_path / "b", "cvpo", 1),
        source(tmp_path / "c", "cvpo", 1, config_of("cvpo", alpha_p=0.5, alpha_n=0.5)),
        source(tmp_path / "d", "cvpo", 1, config_of("cvpo", alpha_p=0.1, alpha_n=0.1)),
        source(tmp_path / "e", "cvpo-curriculum", 7),
        source(tmp_path / "f", "vapo", 3),
        source(tmp_path / "g", "mine", 1, {}),
    ]
    found = groups(sources)
    assert list(found) == ["vapo", "cvpo-curriculum", "cvpo c=.1", "cvpo", "cvpo c=.5", "mine"]
    assert [run.seed for run in found["cvpo"]] == [1, 2]
    assert groups(sources[::-1]) == found


def test_runs_that_differ_in_training_are_no_seeds_of_each_other(tmp_path):
    slow, fast = (with_keys("vapo", actor={"lr": rate}) for rate in (1e-4, 2e-4))
    slow["evaluation"] = {"every": 5}
    slow["steps"] = 50
    sources = [source(tmp_path / "a", "vapo", 1, slow), source(tmp_path / "b", "vapo", 2, fast)]
    assert list(groups(sources)) == ["vapo actor.lr=.0001", "vapo actor.lr=.0002"]


def test_runs_that_differ_in_how_they_are_logged_are_seeds_of_one_training(tmp_path):
    often = with_keys("vapo", evaluation={"every": 5}, log={"text_share": 0.5}) | {"steps": 7}
    sources = [source(tmp_path / "a", "vapo", 1, often), source(tmp_path / "b", "vapo", 2)]
    assert list(groups(sources)) == ["vapo"]


def test_a_copy_is_no_second_seed(tmp_path):
    sources = [source(tmp_path / name, "vapo", 4) for name in "ab"]
    with pytest.raises(AnalysisError, match=r"a and .*b are both vapo with seed 4"):
        groups(sources)


def test_studies_and_logs_without_a_method_are_no_trainings(tmp_path):
    study = RunLog.create(
        tmp_path / "study", config={"study": "bound"}, seed=0, method="sim-bound", verifier="exact"
    )
    scores = tmp_path / "scores.csv"
    scores.write_text("step,task,metric,value\n0,b,acc,0.5\n")
    sources = open_sources([study.path, scores])
    assert trainings(sources) == []
    with pytest.raises(AnalysisError, match="does not say which method"):
        label(sources[1])


def test_labels_of_one_figure_differ_by_more_than_colour():
    names = [*METHODS, "cvpo c=.1", "cvpo c=.5"]
    arms = [f"cvpo-stochasticity{arm}" for arm in ("", " (constant)", " (flipped)", " (shuffled)")]
    for group in (names, arms):
        for a, b in itertools.combinations(group, 2):
            assert (dash(a), marker(a)) != (dash(b), marker(b)), (a, b)


def test_a_method_keeps_its_colour_and_c_makes_it_lighter_or_darker():
    assert color("cvpo") == METHOD_COLORS["cvpo"]
    assert color("cvpo (constant)") == METHOD_COLORS["cvpo"]
    shades = [
        sum(int(color(name)[i : i + 2], 16) for i in (1, 3, 5))
        for name in ("cvpo c=.1", "cvpo c=.2", "cvpo", "cvpo c=.5", "cvpo c=.9")
    ]
    assert shades == sorted(shades, reverse=True)
    assert len(set(shades)) == len(shades)
    assert (coefficient("cvpo"), coefficient("cvpo c=.1")) == (0.3, 0.1)


def test_arms_and_settings_are_left_out_where_methods_can_be_compared(tmp_path):
    def run(name, method, **settings):
        return source(tmp_path / name, method, config=config_of(method, **settings))

    vapo, cvpo = run("a", "vapo"), run("b", "cvpo")
    small, arm = run("c", "cvpo", alpha_p=0.1, alpha_n=0.1), run("d", "cvpo", arm="flipped")
    shown, why = of_methods([vapo, small, cvpo, arm])
    assert shown == [vapo, cvpo]
    assert "cvpo (flipped), cvpo c=.1" in why
    # With one method alone its settings are what there is to see.
    assert of_methods([small, cvpo, arm]) == ([small, cvpo, arm], "")
    assert of_methods([vapo, cvpo]) == ([vapo, cvpo], "")


def test_a_legend_has_as_many_columns_as_fit():
    figure, panel = plt.subplots(figsize=(3.4, 2), layout="constrained")
    for name in ("cvpo-stochasticity (shuffled) (3 seeds)", "vapo", "cvpo"):
        panel.plot([0, 1], label=name)
    with style():
        legend_above(figure, panel)
        figure.canvas.draw()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.width
    plt.close(figure)
