"""The table of claims: its numbers against the logs' own, its verdicts, and every gap told."""

import importlib
import math
import pkgutil
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest

import sim.studies
from analysis import AnalysisError
from analysis.compare import differences
from analysis.curves import collect
from analysis.exhibit import save
from analysis.sources import open_sources
from cvpo import RunLog, pass_at_k, read_scores, read_trajectories
from cvpo.metrics import holm
from paper_figures.table_claims import CLAIMS, LAST_ROUNDS, STUDIES, _enough, make
from sim.claims import CLAIMS as SIMULATED
from tests.logs import Effect, write_log
from tests.study_logs import write_study
from tests.training_logs import config_of, learning, write_run

SIZES = {"easy": 6, "fair": 6, "hard": 6}
STEPS = (0, 10, 20)
ABLATION = "cvpo-stochasticity"


def train(path, rise, *, method="cvpo", seed=1, sizes=SIZES, steps=STEPS, **options):
    """A run; what sets it apart from its method's default is in `arm`, `c` and `lambda_critic`."""
    changes = {"arm": options.pop("arm")} if "arm" in options else {}
    if "c" in options:
        changes |= dict.fromkeys(("alpha_p", "alpha_n"), options.pop("c"))
    config = config_of(method, **changes)
    config["declared"] |= {k: options.pop(k) for k in ("lambda_critic",) if k in options}
    found = learning(sizes, rise, seed=seed, steps=steps)
    return write_run(path, found, method=method, seed=seed, config=config, **options)


def rows(exhibit, claim, containing="", source="trainings"):
    table = exhibit.table
    own = (table["claim"] == claim) & (table["source"] == source) & (table["measure"] != "")
    return table[own & table["measure"].str.contains(containing, regex=False)]


def row(exhibit, claim, containing="", source="trainings"):
    found = rows(exhibit, claim, containing, source)
    assert len(found) == 1, found["measure"].tolist()
    return found.iloc[0]


def gaps(exhibit, claim):
    table = exhibit.table
    return " ".join(table.loc[(table["claim"] == claim) & (table["measure"] == ""), "verdict"])


# ------------------------------------------------------------------------------------- the claims


def test_the_claims_are_the_simulator_s_word_for_word():
    assert CLAIMS == SIMULATED


def test_every_study_that_is_named_exists():
    names = {
        importlib.import_module(f"sim.studies.{module.name}").STUDY.name
        for module in pkgutil.iter_modules(sim.studies.__path__)
    }
    assert {name for studies in STUDIES.values() for name in studies} <= names


# ------------------------------------------------------------------------- differences of accuracy


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Two seeds of every training that a claim asks for, under names that tell nothing."""
    folder = tmp_path_factory.mktemp("sweep")
    wanted = [
        ("vapo", 0.1, {"seconds": 5.0}),
        ("vapo", 0.0, {"lambda_critic": 0.1}),
        ("cvpo", 0.3, {"seconds": 10.0}),
        ("cvpo", 0.2, {"c": 0.1}),
        ("cvpo", 0.25, {"c": 0.5}),
        ("cvpo-curriculum", 0.2, {}),
        *((ABLATION, 0.2, {"arm": arm}) for arm in ("literal", "constant", "shuffled", "flipped")),
    ]
    paths = [
        train(folder / f"run{index}-{seed}", rise, method=method, seed=seed, **options)
        for index, (method, rise, options) in enumerate(wanted)
        for seed in (1, 2)
    ]
    sources = open_sources(paths)
    return sources, make(sources)


@pytest.mark.parametrize(
    ("claim", "a", "b"),
    [
        (4, ABLATION, f"{ABLATION} (constant)"),
        (4, ABLATION, f"{ABLATION} (shuffled)"),
        (4, ABLATION, f"{ABLATION} (flipped)"),
        (8, ABLATION, "vapo"),
        (8, "cvpo-curriculum", "vapo"),
        (9, "cvpo", ABLATION),
        (9, "cvpo", "cvpo-curriculum"),
        (14, "vapo lambda_critic=.1", "vapo"),
    ],
)
def test_differences_are_those_of_the_comparison(sweep, claim, a, b):
    sources, exhibit = sweep
    expected, _ = differences(collect(sources), a, [b])
    for measure, words in (("final", "at step 20"), ("area", "area to step 20")):
        mine = row(exhibit, claim, f"{a} less {b}, {words}")
        its = expected[(expected["benchmark"] == "mean") & (expected["measure"] == measure)].iloc[0]
        ends = [100 * its[name] for name in ("difference", "low", "high")]
        assert mine[["value", "low", "high"]].tolist() == pytest.approx(ends)
        assert mine[["unit", "n", "verdict"]].tolist() == [
            "points",
            "2 seeds, 18 problems",
            "not claimed: 2 seeds",
        ]


def test_few_seeds_are_named_as_what_is_lacking(sweep):
    assert "what other seeds would give: a claim takes 5 of them, here: 2" in gaps(sweep[1], 9)


def test_coefficients_are_compared_on_the_easiest_and_the_hardest_third(sweep):
    sources, exhibit = sweep
    curves = collect(sources).curves
    start = np.mean([mine.accuracy[:, 0] for mine in curves.values()], axis=(0, 1))
    by_benchmark = pd.Series(start, index=curves["cvpo"].problems).groupby("benchmark").mean()
    for kind, name in (("easiest", by_benchmark.idxmax()), ("hardest", by_benchmark.idxmin())):
        for a, b in (("cvpo", "cvpo c=.1"), ("cvpo c=.5", "cvpo")):
            mine, its = (curves[x].of_benchmarks([name]).accuracy[:, -1].mean() for x in (a, b))
            found = row(exhibit, 10, f"{a} less {b}, at step 20, {kind} third ({name})")
            assert found["value"] == pytest.approx(100 * (mine - its))
            assert found["n"] == "2 seeds, 6 problems"
    assert rows(exhibit, 10, "claimed below 0")["measure"].str.contains("c=.5 less").all()
    assert len(rows(exhibit, 10, "claimed below 0")) == 1


def test_equal_cost_is_the_largest_that_both_have_come_to(sweep):
    sources, exhibit = sweep
    curves = collect(sources).curves
    # VAPO, half as dear, has spent 100 seconds at step 20, CVPO at step 10 already.
    mine, its = curves["cvpo"].accuracy[:, 1].mean(), curves["vapo"].accuracy[:, 2].mean()
    found = row(exhibit, 12, "at equal device-seconds (100)")
    assert found["value"] == pytest.approx(100 * (mine - its))
    tokens = row(exhibit, 12, "at equal tokens (20,000)")
    mine = curves["cvpo"].accuracy[:, 2].mean()
    assert tokens["value"] == pytest.approx(100 * (mine - its))


def test_pass_at_k_is_of_the_most_samples_there_are(sweep):
    sources, exhibit = sweep
    mine, its = (
        np.mean(pass_at_k(8, np.round(8 * collect(sources).curves[x].accuracy[:, -1]), 8))
        for x in ("cvpo", "vapo")
    )
    assert row(exhibit, 12, "pass@8 at step 20")["value"] == pytest.approx(100 * (mine - its))
    assert "pass@32: there are 8 samples of a problem" in gaps(exhibit, 12)


def test_the_early_lead_is_that_of_the_first_evaluation(sweep):
    sources, exhibit = sweep
    curves = collect(sources).curves
    mine, its = (curves[x].accuracy[:, 1].mean() for x in ("cvpo-curriculum", "vapo"))
    assert row(exhibit, 13, "at step 10, the first")["value"] == pytest.approx(100 * (mine - its))


def test_from_five_seeds_on_a_difference_is_claimed_if_holm_s_p_value_allows(tmp_path):
    wanted = [("vapo", 0.0, "literal"), (ABLATION, 0.06, "literal"), (ABLATION, 0.05, "constant")]
    wanted += [(ABLATION, 0.03, "shuffled")]
    options = {"sizes": {"b": 30}, "steps": (0, 20)}
    sources = open_sources(
        [
            train(tmp_path / f"{n}-{seed}", rise, method=method, seed=seed, arm=arm, **options)
            for n, (method, rise, arm) in enumerate(wanted)
            for seed in range(5)
        ]
    )
    exhibit = make(sources)
    others = ["vapo", f"{ABLATION} (constant)", f"{ABLATION} (shuffled)"]
    alone, _ = differences(collect(sources), ABLATION, others)
    alone = alone[(alone["benchmark"] == "mean") & (alone["measure"] != "best")]
    adjusted = holm(alone["p"].to_numpy())
    assert ((alone["p"] < 0.05) & (adjusted > 0.05)).any()  # so the adjustment tells
    for other, measure, p in zip(alone["b"], alone["measure"], adjusted, strict=True):
        words = {"final": "at", "area": "area to"}[measure]
        found = row(exhibit, 8 if other == "vapo" else 4, f"{other}, {words} step 20")
        assert found["verdict"] == ("higher" if p <= 0.05 else "no difference shown")
    assert "what other seeds would give" not in gaps(exhibit, 8)
    assert "Holm's adjustment is over all 6 of them" in exhibit.caption


# ------------------------------------------------------------------------- sigma, seconds, critic


def test_spread_is_a_ratio_of_medians_under_either_critic(tmp_path):
    paths = {
        (method, seed): write_log(
            tmp_path / f"{method}{seed}",
            method=method,
            seed=seed,
            effect=Effect(shift=0.3 * (method != "vapo")),
            scored_by="judge",
            without=["evals"],
        )
        for method in ("vapo", ABLATION)
        for seed in (1, 2)
    }
    exhibit = make(open_sources(list(paths.values())))
    for words, read in (
        ("each under its own critic", read_trajectories),
        ("all under critic judge", lambda path, steps: read_scores(path, "judge", steps=steps)),
    ):
        medians = {
            key: np.median(read(path, steps=range(3, 13))["sigma"] ** 2)
            for key, path in paths.items()
        }
        logs = [math.log(medians[ABLATION, seed] / medians["vapo", seed]) for seed in (1, 2)]
        found = row(exhibit, 3, words)
        assert found["value"] == pytest.approx(math.exp(np.mean(logs)))
        half = 12.7062 * abs(logs[0] - logs[1]) / 2  # t of one degree of freedom
        assert found["high"] == pytest.approx(math.exp(np.mean(logs) + half), rel=1e-4)
        assert found[["unit", "n"]].tolist() == ["ratio", "2 seeds"]
    assert "cvpo over vapo, all under critic judge: no seed" in gaps(exhibit, 3)


def test_without_scores_a_shift_may_be_the_critic_s(tmp_path):
    runs = [write_log(tmp_path / m, method=m) for m in ("vapo", "cvpo")]
    exhibit = make(open_sources(runs))
    assert "policy's or its critic's" in gaps(exhibit, 3)
    assert math.isnan(row(exhibit, 3)["low"])


def timed(path, seed, weights, tracker):
    def scalars(step):
        spent = {"rollout": 10.0, "eval": 90.0, "weights": weights, "tracker": tracker}
        explained = {"critic/explained_variance": 0.1 * seed + 0.001 * step}
        return {f"seconds/{name}": value for name, value in spent.items()} | explained

    steps = range(1, 21)
    return train(path, 0.1, method="cvpo", seed=seed, scalars=scalars, logged=steps)


def test_the_overhead_is_a_share_of_the_training_seconds(tmp_path):
    spent = [(0.01, 0.02), (0.02, 0.02), (0.03, 0.02)]
    paths = [timed(tmp_path / f"{seed}", seed, *own) for seed, own in enumerate(spent)]
    exhibit = make(open_sources(paths))
    shares = [100 * w / (10 + w + t) for w, t in spent]
    assert row(exhibit, 11, "W_S, of a step")["value"] == pytest.approx(np.mean(shares))
    both = row(exhibit, 11, "both")
    assert both["value"] == pytest.approx(np.mean([100 * (w + t) / (10 + w + t) for w, t in spent]))
    assert both[["n", "verdict"]].tolist() == ["3 runs", "below 1 %"]
    assert row(make(open_sources(paths[:1])), 11, "both")["verdict"] == "not claimed: 1 run"


def test_the_critic_is_judged_by_its_last_steps(tmp_path):
    options = {"method": "vapo", "logged": range(1, 21), "steps": (0, 20)}
    paths = [
        train(
            tmp_path / f"{index}",
            0.1,
            lambda_critic=value,
            scalars=lambda step, own=value: {"critic/explained_variance": own + 0.01 * step},
            **options,
        )
        for index, value in enumerate((1.0, 0.1))
    ]
    exhibit = make(open_sources(paths))
    last = 0.01 * np.mean(range(11, 21))
    assert row(exhibit, 14, "vapo: explained")["value"] == pytest.approx(1 + last)
    assert row(exhibit, 14, "lambda_critic=.1: explained")["value"] == pytest.approx(0.1 + last)


# ------------------------------------------------------------------------------------- curriculum

TRIALS = 8
ROUND = 4  # steps


def counted(path, successes, *, method="cvpo-curriculum", seed=1, switch=None, w_d=None):
    """A run's rounds, of given successes [rounds, prompts]; `switch`: last round of phase 1."""
    log = RunLog.create(path, config=config_of(method), seed=seed, method=method, verifier="exact")
    alpha = beta = np.ones(len(successes[0]))
    for number, solved in enumerate(np.asarray(successes, dtype=float)):
        alpha, beta = alpha + solved, beta + TRIALS - solved
        late = switch is not None and number > switch
        n = len(solved)
        table = {
            "step": np.full(n, ROUND * (number + 1)),
            "round": np.full(n, number),
            "prompt_id": np.arange(n),
            "visits": np.full(n, number + 1),
            "trials": np.full(n, TRIALS),
            "successes": solved,
            "alpha": alpha,
            "beta": beta,
            "rho": alpha / (alpha + beta),
            "phase": np.full(n, "bottleneck" if late else "early"),
        }
        log.prompts(number, table if w_d is None else table | {"w_d": w_d[int(late)]})
    for step in range(1, ROUND * len(successes) + 3):
        late = switch is not None and step > ROUND * (switch + 1)
        scalars = {"curriculum/phase": float(late), "weights/w_d_cv": 0.01 * step}
        log.metrics(step, time=0.0, device_seconds=step, tokens=step, scalars=scalars)
    return path


def rising(rounds, prompts=40, seed=0):
    """Successes of prompts, hard ones first, all of which improve from round to round."""
    rng = np.random.default_rng(seed)
    start = np.linspace(-3, 3, prompts)
    rate = 1 / (1 + np.exp(-start - 0.15 * np.arange(rounds)[:, None]))
    return rng.binomial(TRIALS, rate)


def followed(successes, discount):
    """Errors of rho after and before each round, prompt by prompt in a plain loop."""
    after, before = [], []
    for solved in np.transpose(successes):
        a = b = 1.0
        for number, count in enumerate(solved):
            rate = count / TRIALS
            if number:
                before.append((number, a / (a + b) - rate))
            a, b = 1 + discount * (a - 1) + count, 1 + discount * (b - 1) + TRIALS - count
            after.append((number, a / (a + b) - rate))
    first = len(successes) - LAST_ROUNDS
    return [[x for number, x in errors if number >= first] for errors in (after, before)]


def test_the_tracker_is_replayed_with_and_without_forgetting(tmp_path):
    seen = {seed: rising(9, seed=seed) for seed in (1, 2, 3)}
    paths = [counted(tmp_path / f"{seed}", found, seed=seed) for seed, found in seen.items()]
    exhibit = make(open_sources(paths))
    for discount, name in ((1.0, "no forgetting"), (0.8, "discount 0.8")):
        after = [followed(found, discount)[0] for found in seen.values()]
        size = row(exhibit, 5, f"|rho - rate of the round|, last 5 rounds, {name}")
        assert size["value"] == pytest.approx(100 * np.mean(np.abs(after)))
        lag = rows(exhibit, 5, f"rho - rate of the round, last 5 rounds, {name}").iloc[0]
        assert lag["value"] == pytest.approx(100 * np.mean(after))
        assert lag["value"] < 0
    ahead = [
        [np.mean(np.abs(followed(found, discount)[1])) for found in seen.values()]
        for discount in (1.0, 0.8)
    ]
    found = row(exhibit, 5, "next round")
    excess = np.subtract(*ahead)
    assert found["value"] == pytest.approx(100 * excess.mean())
    half = 4.302653 * excess.std(ddof=1) / math.sqrt(3)  # t of two degrees of freedom
    assert found["high"] == pytest.approx(100 * (excess.mean() + half), rel=1e-5)
    assert found[["n", "verdict"]].tolist() == ["3 runs of 3 seeds", "not claimed: 3 seeds"]


def test_the_replay_without_forgetting_is_the_logged_tracker(tmp_path):
    successes = rising(9)
    source = open_sources([counted(tmp_path / "a", successes)])
    logged = source[0].read("prompts", ["round", "rho", "successes", "trials"])
    last = logged[logged["round"] >= 9 - LAST_ROUNDS]
    error = (last["rho"] - last["successes"] / last["trials"]).abs().mean()
    found = row(make(source), 5, "|rho - rate of the round|, last 5 rounds, no forgetting")
    assert found["value"] == pytest.approx(100 * error)


def test_runs_of_one_seed_are_one_observation(tmp_path):
    paths = [
        counted(tmp_path / f"{method}{seed}", rising(9, seed=seed), method=method, seed=seed)
        for method in ("vapo", "cvpo")
        for seed in (1, 2)
    ]
    both, one = make(open_sources(paths)), make(open_sources(paths[:2]))
    ends = ["value", "low", "high"]
    assert row(both, 5, "next")[ends].tolist() == pytest.approx(row(one, 5, "next")[ends].tolist())
    assert row(both, 5, "next")["n"] == "4 runs of 2 seeds"


def test_a_switch_is_counted_with_its_round_and_the_low_set_then(tmp_path):
    paths = [
        counted(tmp_path / "a", rising(14), seed=1, switch=11),
        counted(tmp_path / "b", rising(14, seed=1), seed=2),
        counted(tmp_path / "c", np.zeros((14, 40)), seed=3),
    ]
    exhibit = make(open_sources(paths))
    switched = row(exhibit, 6, "runs whose phase switched")
    assert switched[["value", "n"]].tolist() == [1, "3 runs"]
    assert row(exhibit, 6, "round of the switch")["value"] == 12
    assert row(exhibit, 6, "low set's success rate, 8 rounds up to the switch")["value"] > 0
    then = row(exhibit, 6, "had not surely stopped rising, up to the switch")
    assert then[["value", "n"]].tolist() == [1, "1 run"]
    at_end = row(exhibit, 6, "had not surely stopped rising, at the end")
    assert at_end[["value", "n"]].tolist() == [1, "2 runs"]  # that of zeros has stopped


def test_a_switch_before_the_detector_can_tell_is_a_gap(tmp_path):
    exhibit = make(open_sources([counted(tmp_path / "a", rising(14), switch=5)]))
    assert row(exhibit, 6, "round of the switch")["value"] == 6
    assert "the low set of 1 run up to the switch: too few rounds" in gaps(exhibit, 6)
    assert rows(exhibit, 6, "surely stopped").empty


def test_without_a_switch_there_is_no_round_of_one(tmp_path):
    w_d = [np.ones(40)]
    exhibit = make(open_sources([counted(tmp_path / "a", rising(14), w_d=w_d)]))
    assert row(exhibit, 6, "runs whose phase switched")["value"] == 0
    assert "round of the switch" in gaps(exhibit, 6)
    assert "no run of cvpo or cvpo-curriculum switched" in gaps(exhibit, 7)


def test_the_hardest_third_s_share_is_taken_around_the_switch(tmp_path):
    n = 6
    successes = np.tile([0, 0, 4, 4, 8, 8], (4, 1))
    w_d = [np.array([1.0, 1, 1, 1, 1, 1]), np.array([2.0, 1, 1, 1, 0.5, 0.5])]
    path = counted(tmp_path / "a", successes, switch=1, w_d=w_d)
    exhibit = make(open_sources([path]))
    assert row(exhibit, 7, "last round of phase 1")["value"] == pytest.approx(100 * 2 / n)
    assert row(exhibit, 7, "first round of phase 2")["value"] == pytest.approx(100 * 3 / 6)
    assert row(exhibit, 7, "rise at the switch")["value"] == pytest.approx(100 * (1 / 2 - 1 / 3))


def test_the_early_curriculum_is_told_until_the_first_evaluation(tmp_path):
    def scalars(step):
        return {"curriculum/phase": float(step > 10), "weights/w_d_cv": 0.01 * step}

    options = {"scalars": scalars, "logged": range(1, 21)}
    paths = [
        train(tmp_path / "a", 0.1, method="cvpo-curriculum", **options),
        train(tmp_path / "b", 0.1, method="vapo"),
    ]
    exhibit = make(open_sources(paths))
    assert row(exhibit, 13, "in phase early at step 10")["value"] == 100
    found = row(exhibit, 13, "coefficient of variation of W_D, mean of steps 1-10")
    assert found["value"] == pytest.approx(100 * 0.01 * np.mean(range(1, 11)))


# -------------------------------------------------------------------------------------- simulator


def said(claim, verdict, **more):
    blank = {"quantity": "q", "setting": "s", "unit": "share", "value": 0.5}
    return blank | {"claim": claim, "verdict": verdict} | more


def test_a_study_s_verdicts_stand_as_they_are(tmp_path):
    given = [
        said(5, "fails", quantity="excess", setting="steady", low=0.4, high=0.6, n=7),
        said(5, ""),
        said(None, ""),
        said(8, "holds"),
    ]
    exhibit = make([write_study(tmp_path / "tracker", "tracker", given)])
    found = row(exhibit, 5, source="simulator")
    columns = ["measure", "value", "low", "high", "unit", "n", "verdict"]
    assert found[columns].tolist() == ["excess: steady", 0.5, 0.4, 0.6, "share", "n = 7", "fails"]
    assert row(exhibit, 8, source="simulator")["verdict"] == "holds"
    assert "tracker (5 seeds)" in exhibit.caption


def test_a_study_that_is_missing_or_silent_is_named(tmp_path):
    exhibit = make([write_study(tmp_path / "a", "curriculum", [said(8, "holds")])])
    assert "no log of the study bound (python -m sim bound)" in gaps(exhibit, 1)
    assert "the study curriculum, as it was set, has no verdict on it" in gaps(exhibit, 7)
    assert "no log of the study weights" in gaps(exhibit, 8)


def test_a_study_that_cannot_be_read_is_a_gap_of_its_claims(tmp_path):
    sources = [
        write_study(tmp_path / "a", "curriculum", [said(8, "holds")]),
        write_study(tmp_path / "b", "tracker", finished=False),
        *(write_study(tmp_path / name, "bound", [said(1, "holds")]) for name in "cd"),
    ]
    exhibit = make(sources)
    assert "has not finished" in gaps(exhibit, 5)
    assert "several logs of the study 'bound'" in gaps(exhibit, 1)
    assert "has not finished" in exhibit.caption
    assert row(exhibit, 8, source="simulator")["verdict"] == "holds"


# ------------------------------------------------------------------------------------------ gaps


def test_every_claim_stands_whatever_is_given(tmp_path):
    exhibit = make(open_sources([write_log(tmp_path / "a", method="grpo", critic=False)]))
    assert exhibit.table["claim"].drop_duplicates().tolist() == list(CLAIMS)
    assert (exhibit.table.groupby("claim").size() > 0).all()
    for number, text in CLAIMS.items():
        assert f"## {number}. {text}" in exhibit.text
        assert "cannot say: " in gaps(exhibit, number)
    assert "no run of cvpo or vapo that was evaluated" in gaps(exhibit, 12)


def test_a_damaged_part_costs_only_the_claims_that_read_it(tmp_path):
    path = counted(tmp_path / "a", rising(9))
    file = path / "prompts" / "00000003.parquet"
    file.write_bytes(file.read_bytes()[:100])
    exhibit = make(open_sources([path]))
    assert str(file) in gaps(exhibit, 5)
    assert str(file) in exhibit.caption
    assert row(exhibit, 6)["value"] == 0


def test_impossible_counts_are_refused_by_file_and_prompt(tmp_path):
    successes = rising(9)
    successes[4, 2] = TRIALS + 1
    exhibit = make(open_sources([counted(tmp_path / "a", successes)]))
    assert "a/prompts, round 4: prompt 2 has 9 successes in 8 trials" in gaps(exhibit, 5)


def test_partial_credit_has_no_pass_at_k(tmp_path):
    paths = [
        write_run(
            tmp_path / method,
            {step: {"b": np.full((3, 2), 0.3 + 0.005 * step)} for step in STEPS},
            method=method,
        )
        for method in ("vapo", "cvpo")
    ]
    exhibit = make(open_sources(paths))
    assert "graded with partial credit" in gaps(exhibit, 12)
    assert row(exhibit, 12, "equal tokens")["value"] == pytest.approx(0)


def test_without_a_cost_there_is_none_to_be_equal(tmp_path):
    paths = [train(tmp_path / m, 0.1, method=m, logged=[]) for m in ("vapo", "cvpo")]
    exhibit = make(open_sources(paths))
    assert "its cost is not logged" in gaps(exhibit, 12)
    assert len(rows(exhibit, 12, "pass@8")) == 1


def test_with_nothing_to_judge_by_it_says_what_to_give(tmp_path):
    with pytest.raises(AnalysisError, match=r"no claim can be judged: give runs of cvpo and vapo"):
        make([])
    study = write_study(tmp_path / "s", "sensitivity", [said(None, "")])
    with pytest.raises(AnalysisError, match="python -m sim NAME"):
        make([study])


def test_the_overview_counts_verdicts(tmp_path):
    given = [said(5, verdict, setting=verdict) for verdict in ("holds", "fails", "undecided")]
    given += [said(5, "fails", setting="again")]
    text = make([write_study(tmp_path / "s", "tracker", given)]).text
    line = next(line for line in text.splitlines() if line.startswith("| 5 "))
    assert "fails (2), holds (1), undecided (1)" in line


def test_the_same_logs_give_the_same_bytes(tmp_path):
    paths = [train(tmp_path / f"{m}", 0.1, method=m) for m in ("vapo", "cvpo", ABLATION)]
    made = [
        save(make(open_sources(given)), tmp_path / f"{index}", "x")
        for index, given in enumerate((paths, paths, paths[::-1]))
    ]
    assert {file.suffix for file in made[0]} == {".csv", ".txt", ".md"}
    for one, other in pairwise(made):
        assert [file.read_bytes() for file in one] == [file.read_bytes() for file in other]


def test_the_seeds_it_would_take_are_those_of_the_power_formula():
    seen = {"seeds": 3, "unit": "points", "value": 4.0, "low": 4 - 1.96 * 2, "high": 4 + 1.96 * 2}
    # 3 seeds have a standard error of 2, and (1.960 + .842) 2 / 4 squared is 1.962.
    assert _enough(seen) == 6
    assert _enough(seen | {"value": 2.0}) == math.ceil(3 * 4 * 1.9622)
    ratio = {"unit": "ratio", "value": math.exp(0.4), "low": math.exp(0.008)}
    assert _enough(seen | ratio | {"high": math.exp(0.792)}) == 6
    assert _enough(seen | {"low": 3.9, "high": 4.1}) == 5  # never fewer
    for lacking in ({"seeds": 1}, {"value": 0.0}, {"low": math.nan}):
        assert math.isnan(_enough(seen | lacking))
