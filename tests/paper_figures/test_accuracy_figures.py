"""Figures 2 and 4, accuracy over cost, and pass@k: their numbers, gaps and bytes."""

import itertools
import warnings

import numpy as np
import pytest

from analysis import AnalysisError
from analysis.exhibit import plt, save, style
from analysis.sources import open_sources
from paper_figures import accuracy_cost, figure2_accuracy, figure4_coefficient, pass_at_k
from tests.training_logs import config_of, learning, write_run

SIZES = {"add-1": 8, "AMC23": 12}
STEPS = (0, 10, 20)


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def verdicts(rise, seed, steps=STEPS):
    return learning(SIZES, rise, seed=seed, steps=steps)


def run(folder, method, seed, rise, **options):
    path = folder / f"{method}-{seed}-{len(list(folder.iterdir()))}"
    return write_run(path, verdicts(rise, seed), method=method, seed=seed, **options)


@pytest.fixture
def paths(tmp_path):
    return [
        run(tmp_path, method, seed, rise, seconds=seconds)
        for method, rise, seconds in (("vapo", 0.1, 360.0), ("cvpo", 0.3, 720.0))
        for seed in (1, 2)
    ]


def ablation(folder, coefficients=(0.1, 0.3, 0.5), method="cvpo"):
    return [
        run(folder, method, seed, c, config=config_of(method, alpha_p=c, alpha_n=c))
        for c in coefficients
        for seed in (1, 2)
    ]


@pytest.mark.parametrize("module", [figure2_accuracy, accuracy_cost, pass_at_k])
def test_a_figure_is_the_same_bytes_whatever_the_order_of_the_logs(tmp_path, paths, module):
    first = save(module.make(open_sources(paths)), tmp_path / "first", "x")
    again = save(module.make(open_sources(paths[::-1])), tmp_path / "again", "x")
    for one, other in zip(first, again, strict=True):
        assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("module", [figure2_accuracy, accuracy_cost, pass_at_k])
def test_one_run_is_drawn_and_said_to_be_one(paths, module):
    exhibit = module.make(open_sources(paths[:1]))
    assert "vapo has one run" in exhibit.caption
    assert exhibit.figure is not None


@pytest.mark.parametrize("module", [figure2_accuracy, accuracy_cost, pass_at_k])
def test_no_run_is_an_error_that_says_what_is_missing(module):
    with pytest.raises(AnalysisError, match="evals"):
        module.make([])


def test_figure_2_shows_the_mean_over_seeds_and_benchmarks(paths):
    table = figure2_accuracy.make(open_sources(paths)).table
    for label, rise in (("vapo", 0.1), ("cvpo", 0.3)):
        for step in STEPS:
            means = {
                name: np.mean([verdicts(rise, seed)[step][name].mean() for seed in (1, 2)])
                for name in SIZES
            }
            means["mean"] = np.mean(list(means.values()))
            for name, expected in means.items():
                row = table[
                    (table["label"] == label)
                    & (table["benchmark"] == name)
                    & (table["step"] == step)
                ]
                assert row["accuracy"].tolist() == pytest.approx([expected])
                assert (row["low"] >= 0).all()
                assert (row["high"] <= 1).all()


def test_figure_2_of_runs_without_a_common_benchmark_shows_each(tmp_path):
    first = write_run(tmp_path / "a", learning({"a": 4}, 0.1, seed=1))
    second = write_run(tmp_path / "b", learning({"b": 4}, 0.1, seed=1), method="ppo")
    exhibit = figure2_accuracy.make(open_sources([first, second]))
    assert set(exhibit.table["benchmark"]) == {"a", "b"}
    assert "no mean" in exhibit.caption


def titles(exhibit):
    return [panel.get_title() for panel in exhibit.figure.axes]


def legend(exhibit):
    return [text.get_text().split(" (")[0] for text in exhibit.figure.legends[0].get_texts()]


@pytest.mark.parametrize("module", [figure2_accuracy, pass_at_k])
def test_every_benchmark_has_a_panel_and_a_mean_only_what_is_common(tmp_path, module):
    def make(*sizes):
        paths = [
            write_run(
                tmp_path / f"{len(sizes)}-{method}", learning(size, 0.1, seed=1), method=method
            )
            for method, size in zip(("vapo", "ppo"), sizes, strict=True)
        ]
        return module.make(open_sources(paths))

    apart = make({"a": 4}, {"b": 4})
    assert titles(apart) == ["a", "b"]
    assert sorted(legend(apart)) == ["ppo", "vapo"]
    for run in tmp_path.iterdir():
        run.rename(run.with_name(f"old-{run.name}"))
    partly = make({"a": 4, "b": 4, "c": 4}, {"a": 4, "b": 4})
    assert titles(partly) == ["mean of 2 benchmarks", "a", "b", "c"]


NAMES = {"数学 90 %": 4, "AMC 23/24 $x$": 4, "a_b^{c}\n": 4, "x" * 90: 4}
METHOD = "méthode 法 " + " ".join(["rather-long"] * 12)


@pytest.mark.parametrize("module", [figure2_accuracy, accuracy_cost, pass_at_k])
def test_names_of_any_kind_are_drawn_and_inside_the_figure(tmp_path, module):
    sources = open_sources(
        [
            write_run(tmp_path / name, learning(NAMES, 0.1, seed=1), method=method, config={})
            for name, method in (("a", "vapo"), ("b", METHOD))
        ]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a letter that the font lacks, of panels without room
        exhibit = module.make(sources)
        with style():
            exhibit.figure.canvas.draw()
    figure = exhibit.figure
    texts = [*figure.legends[0].get_texts(), *(panel.title for panel in figure.axes)]
    for box in (text.get_window_extent() for text in texts if text.get_text()):
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.width
    assert len(set(titles(exhibit))) == len(figure.axes) or module is accuracy_cost


# --------------------------------------------------------------------------------- figure 4


def test_figure_4_shows_every_coefficient_beside_the_papers(tmp_path):
    others = [run(tmp_path, "vapo", 1, 0.1)]
    exhibit = figure4_coefficient.make(open_sources(ablation(tmp_path) + others))
    ours = exhibit.table[exhibit.table["measure"] == "final"]
    ours = ours[ours["label"].notna() & (ours["benchmark"] == "AMC23")]
    assert ours["c"].tolist() == [0.1, 0.3, 0.5]
    for c, accuracy in zip(ours["c"], ours["accuracy"], strict=True):
        expected = np.mean([verdicts(c, seed)[20]["AMC23"].mean() for seed in (1, 2)])
        assert accuracy == pytest.approx(expected)
    paper = exhibit.table[exhibit.table["label"] == "paper"]
    assert paper[paper["benchmark"] == "AIME24"]["accuracy"].tolist() == [0.169, 0.220, 0.167]
    assert ".237" in exhibit.caption
    assert "25 of AMC23's 40 problems" in exhibit.caption
    assert "In the mean cvpo - cvpo c=.1 is" in exhibit.caption
    assert "not claimed: 2 seeds" in exhibit.caption
    assert set(legend(exhibit)) == {"add-1", "AMC23", "mean", "AIME24", "AIME25"}


def test_figure_4_takes_runs_that_differ_in_c_alone(tmp_path):
    constant = config_of("cvpo", alpha_p=0.5, alpha_n=0.5, arm="constant")
    paths = [*ablation(tmp_path, (0.1, 0.3)), run(tmp_path, "cvpo", 1, 0.1, config=constant)]
    exhibit = figure4_coefficient.make(open_sources(paths))
    ours = exhibit.table[exhibit.table["label"].notna() & (exhibit.table["label"] != "paper")]
    assert set(ours["c"]) == {0.1, 0.3}
    halves = [*ablation(tmp_path, (0.1, 0.3, 0.5), "cvpo-stochasticity"), *paths]
    caption = figure4_coefficient.make(open_sources(halves)).caption
    assert "cvpo-stochasticity c=.5" in caption  # more coefficients than cvpo has


def test_figure_4_of_one_coefficient_says_what_to_train(tmp_path):
    with pytest.raises(AnalysisError, match=r"alpha_p and alpha_n at \.1, \.3 and \.5"):
        figure4_coefficient.make(open_sources(ablation(tmp_path, (0.3,))))
    untrained = write_run(
        tmp_path / "young",
        verdicts(0, 1, (0,)),
        method="cvpo",
        config=config_of("cvpo", alpha_p=0.1, alpha_n=0.1),
    )
    with pytest.raises(AnalysisError, match="evaluated before training only"):
        figure4_coefficient.make(open_sources([*ablation(tmp_path, (0.3,)), untrained]))


def test_figure_4_without_the_default_coefficient_has_no_difference(tmp_path):
    exhibit = figure4_coefficient.make(open_sources(ablation(tmp_path, (0.1, 0.5))))
    assert "no run at c = .3, so no difference" in exhibit.caption


# ------------------------------------------------------------------------------------ cost


def test_at_equal_cost_the_dearer_method_is_read_off_earlier(paths):
    exhibit = accuracy_cost.make(open_sources(paths))
    equal = exhibit.table[exhibit.table["kind"] == "equal cost"]
    seconds = equal[equal["axis"] == "device_seconds"].set_index("label")
    assert set(seconds["cost"]) == {7200.0}  # vapo ends there; cvpo is at step 10
    for label, rise, step in (("vapo", 0.1, 20), ("cvpo", 0.3, 10)):
        expected = np.mean(
            [verdicts(rise, seed)[step][name].mean() for seed in (1, 2) for name in SIZES]
        )
        assert seconds.loc[label, "accuracy"] == pytest.approx(expected)
    tokens = equal[equal["axis"] == "tokens"].set_index("label")
    assert set(tokens["cost"]) == {20_000.0}
    assert "2 device-hours" in exhibit.caption


def test_a_method_whose_cost_is_not_logged_is_named_and_not_guessed(tmp_path, paths):
    bare = run(tmp_path, "ppo", 1, 0.1, logged=[])
    exhibit = accuracy_cost.make(open_sources([*paths, bare]))
    assert "ppo is not shown over device-hours" in exhibit.caption
    assert "There is no cost in device-hours that all runs have come to." in exhibit.caption
    assert set(exhibit.table["kind"]) == {"curve"}
    with pytest.raises(AnalysisError, match=r"metrics\.jsonl"):
        accuracy_cost.make(open_sources([bare]))


def test_without_a_common_benchmark_there_is_no_accuracy_over_cost(tmp_path):
    first = write_run(tmp_path / "a", learning({"a": 4}, 0.1, seed=1))
    second = write_run(tmp_path / "b", learning({"b": 4}, 0.1, seed=1), method="ppo")
    with pytest.raises(AnalysisError, match="no mean over benchmarks"):
        accuracy_cost.make(open_sources([first, second]))


# ---------------------------------------------------------------------------------- pass@k


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(paths):
    table = pass_at_k.make(open_sources(paths)).table
    assert sorted(set(table["k"])) == [1, 2, 4, 8]
    for k in (1, 2, 8):
        cells = [
            np.mean([any(draw) for draw in itertools.combinations(samples, k)])
            for seed in (1, 2)
            for samples in verdicts(0.3, seed)[20]["AMC23"]
        ]
        row = table[
            (table["label"] == "cvpo") & (table["benchmark"] == "AMC23") & (table["k"] == k)
        ]
        assert row["pass_at_k"].tolist() == pytest.approx([np.mean(cells)])


def test_pass_at_k_goes_up_to_the_fewest_samples(tmp_path):
    verdicts = {0: {"b": [[0, 1, 1]]}, 5: {"b": [[0, 1, 1], [1, 0, 0, 0, 1, 1]]}}
    table = pass_at_k.make(open_sources([write_run(tmp_path / "run", verdicts)])).table
    assert table["k"].tolist() == [1, 2, 3]
    expected = [(2 / 3 + 1 / 2) / 2, (1 + 4 / 5) / 2, (1 + 19 / 20) / 2]
    assert table["pass_at_k"].tolist() == pytest.approx(expected)


def test_a_benchmark_s_k_is_not_cut_short_by_another_s(tmp_path):
    verdicts = {5: {"few": [[0, 1]] * 3, "many": [[0, 1] * 4] * 3}}
    table = pass_at_k.make(open_sources([write_run(tmp_path / "run", verdicts)])).table
    ks = {name: rows["k"].tolist() for name, rows in table.groupby("benchmark")}
    assert ks == {"few": [1, 2], "many": [1, 2, 4, 8], "mean": [1, 2]}


def test_partial_credit_has_no_pass_at_k(tmp_path, paths):
    partly = write_run(tmp_path / "partly", {5: {"b": [[0.5, 1]], "AMC23": [[0, 1]]}}, method="ppo")
    with pytest.raises(AnalysisError, match="partial credit"):
        pass_at_k.make(open_sources([partly]))
    shared = {20: {name: [[0.5, 1.0]] * size for name, size in SIZES.items()}}
    other = write_run(tmp_path / "other", shared, method="rloo")
    exhibit = pass_at_k.make(open_sources([*paths, other]))
    assert "rloo has partial credit, and no pass@k." in exhibit.caption
    assert "rloo" not in set(exhibit.table["label"])
