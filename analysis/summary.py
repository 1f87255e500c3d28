"""Where runs began, where they are, and what changed: a table and a figure of learning curves.

Accuracy is that of the run's headline verifier. Every problem of a benchmark weighs the same
however many samples it has, and so does every benchmark in the mean. Standard errors are over
problems: they say how far other problems of the same kind would move the number, and nothing about
other training seeds. Changes are paired by problem. A benchmark of which every problem scores the
same (all wrong, say) has a standard error of 0.
"""

import argparse
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from scipy.special import stdtrit

from analysis import AnalysisError
from analysis.evaluations import Evaluations, cost, read_evaluations
from analysis.exhibit import COLUMN, DASHES, fitted, style
from analysis.labels import color, label
from analysis.panels import benchmark_panels, legend_above
from analysis.sources import Source, open_sources
from cvpo.metrics import avg_at_k, paired_t_interval, pass_at_k

CONFIDENCE = 0.95

Evaluation = dict[str, pd.DataFrame]
"""Benchmark, in order of names -> a row per problem_id: samples and correct (summed verdicts)."""


@dataclass
class Run:
    """What the summary keeps of a run.

    Attributes:
        name: how the table calls it.
        label: how the figure calls it: its method, and what differs from the method's default.
        method: from `run.yaml`, as are `seed` and `verifier`.
        curve: a row per evaluated step and benchmark: step, benchmark, accuracy, standard_error,
            problems, and the fewest and most samples of a problem (samples_min, samples_max).
        first: the first evaluation.
        last: the last one; the same as `first` if there is only one.
        spent: device_seconds and tokens by step.
    """

    name: str
    label: str
    method: str
    seed: int | None
    verifier: str
    curve: pd.DataFrame
    first: Evaluation
    last: Evaluation
    spent: pd.DataFrame

    @property
    def steps(self) -> tuple[int, int]:
        """Steps of the first and the last evaluation."""
        return int(self.curve["step"].iloc[0]), int(self.curve["step"].iloc[-1])


@dataclass
class Summary:
    """The table (columns as `summarize` says), the benchmarks its means are over, and its gaps."""

    table: pd.DataFrame
    benchmarks: list[str]
    notes: list[str] = field(default_factory=list)


# ------------------------------------------------------------------------------------ reading


def load_runs(sources: Sequence[Source]) -> list[Run]:
    """Read what the summary needs.

    Raises:
        AnalysisError: a source has no evaluation, or as `read_evaluations`.
    """
    return [_load_run(source) for source in sources]


def _load_run(source: Source) -> Run:
    read = read_evaluations(source)
    curve = [
        {
            "step": step,
            "benchmark": benchmark,
            "accuracy": accuracy,
            "standard_error": error,
            "problems": len(problems),
            "samples_min": problems["samples"].min(),
            "samples_max": problems["samples"].max(),
        }
        for row, step in enumerate(read.steps)
        for benchmark, problems in _evaluation(read, row).items()
        for accuracy, error in [_accuracy(problems)]
    ]
    return Run(
        name=source.name,
        label="-" if source.method is None else label(source),
        method=source.method or "-",
        seed=source.seed,
        verifier=str(source.verifier),
        curve=pd.DataFrame(curve),
        first=_evaluation(read, 0),
        last=_evaluation(read, -1),
        spent=cost(source),
    )


def _evaluation(read: Evaluations, row: int) -> Evaluation:
    sums = {"samples": read.samples[row], "correct": read.correct[row]}
    frame = pd.DataFrame(sums, index=read.problems)[read.samples[row] > 0]
    by_benchmark = frame.groupby(level="benchmark")
    return {str(name): rows.droplevel("benchmark") for name, rows in by_benchmark}


def _accuracy(problems: pd.DataFrame) -> tuple[float, float]:
    means = (problems["correct"] / problems["samples"]).to_numpy()
    return avg_at_k(means[:, None])


# -------------------------------------------------------------------------------------- table


def summarize(runs: Sequence[Run], k: int | None = None) -> Summary:
    """The table: per run, for its first and last evaluation and the change between them.

    Args:
        runs: as `load_runs` gives them.
        k: of pass@k. Default: the fewest samples that any problem has in these evaluations.

    Returns:
        Columns run, method, seed, verifier, evaluation (first, last, change), step, benchmark (its
        name, or `mean` over those that every run has in both evaluations), problems, samples_min,
        samples_max (the k of avg@k), accuracy (avg@k in [0, 1], or its change), standard_error,
        low and high (95 %, t distribution; Welch's degrees of freedom for the mean), pass_k,
        pass_at_k, device_seconds and tokens (cumulative; spent between the two in a change).
        What the log does not say is NaN. In the rows `change` everything is over the problems that
        both evaluations hold, and step is that of the last one.

    Raises:
        AnalysisError: the runs share no benchmark, or k is below 1.
    """
    if k is not None and k < 1:
        raise AnalysisError(f"--k must be at least 1, got {k}")
    benchmarks = sorted(set.intersection(*(run.first.keys() & run.last.keys() for run in runs)))
    if not benchmarks:
        listing = "; ".join(
            f"{run.name}: {', '.join(sorted(run.first.keys() | run.last.keys()))}" for run in runs
        )
        raise AnalysisError(
            f"no benchmark stands in the first and last evaluation of every run ({listing}); "
            "summarize the runs separately"
        )
    if k is None:
        shown = [frame for run in runs for e in (run.first, run.last) for frame in e.values()]
        k = int(min(frame["samples"].min() for frame in shown))
    notes = [note for run in runs for note in _gaps(run)]
    notes += _disagreements(runs, benchmarks)
    rows = []
    for run in runs:
        evaluations = {"first": (run.first, run.steps[0])}
        if run.steps[0] != run.steps[1]:
            evaluations["last"] = (run.last, run.steps[1])
        for which, (evaluation, step) in evaluations.items():
            levels = {name: _level_row(frame, k) for name, frame in evaluation.items()}
            rows += _label(run, which, step, levels, benchmarks, _spent(run, step), k)
            notes += _missing_pass_notes(run, step, evaluation, k)
        if "last" in evaluations:
            changes = {
                name: _change_row(first, run.last[name], k)
                for name, first in run.first.items()
                if name in run.last
            }
            spent = _spent(run, run.steps[1]) - _spent(run, run.steps[0])
            rows += _label(run, "change", run.steps[1], changes, benchmarks, spent, k)
    return Summary(pd.DataFrame(rows), benchmarks, notes)


def _level_row(problems: pd.DataFrame, k: int) -> dict[str, float]:
    accuracy, error = _accuracy(problems)
    return {
        "problems": len(problems),
        "samples_min": problems["samples"].min(),
        "samples_max": problems["samples"].max(),
        "accuracy": accuracy,
        "standard_error": error,
        "pass_at_k": _pass_at_k(problems, k),
    }


def _change_row(first: pd.DataFrame, last: pd.DataFrame, k: int) -> dict[str, float]:
    """Paired by problem. Without a problem in common there is no change to speak of."""
    common = first.index.intersection(last.index)
    first, last = first.loc[common], last.loc[common]
    if common.empty:
        nothing = dict.fromkeys(("accuracy", "standard_error", "pass_at_k"), math.nan)
        return {"problems": 0, "samples_min": math.nan, "samples_max": math.nan} | nothing
    difference = paired_t_interval(
        (last["correct"] / last["samples"]).to_numpy(),
        (first["correct"] / first["samples"]).to_numpy(),
    )
    samples = pd.concat([first["samples"], last["samples"]])
    return {
        "problems": len(common),
        "samples_min": samples.min(),
        "samples_max": samples.max(),
        "accuracy": difference.estimate,
        "standard_error": difference.standard_error,
        "pass_at_k": _pass_at_k(last, k) - _pass_at_k(first, k),
    }


def _pass_at_k(problems: pd.DataFrame, k: int) -> float:
    """Mean over problems; NaN where it is not defined: too few samples, or partial credit."""
    correct = problems["correct"].to_numpy()
    if problems["samples"].min() < k or np.any(correct != np.round(correct)):
        return math.nan
    return float(np.mean(pass_at_k(problems["samples"].to_numpy(), np.round(correct), k)))


def _mean_row(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Every benchmark weighs the same; their errors are independent."""
    columns = pd.DataFrame(rows)
    return {
        "problems": columns["problems"].sum(),
        "samples_min": columns["samples_min"].min(),
        "samples_max": columns["samples_max"].max(),
        "accuracy": columns["accuracy"].mean(skipna=False),
        "standard_error": _mean_error(columns["standard_error"]),
        "pass_at_k": columns["pass_at_k"].mean(skipna=False),
    }


def _mean_error(errors: Iterable[float]) -> float:
    parts = np.asarray(list(errors))
    return float(np.sqrt(np.sum(parts**2)) / len(parts))


def _half_width(errors: Sequence[float], problems: Sequence[float]) -> float:
    """Half the interval of the mean of benchmarks with these errors and numbers of problems.

    The t quantile at Welch and Satterthwaite's degrees of freedom; n - 1 for one benchmark.
    """
    squares = np.asarray(errors) ** 2
    if not squares.any():
        return 0.0
    freedom = squares.sum() ** 2 / np.sum(squares**2 / np.maximum(np.asarray(problems) - 1, 1))
    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) * _mean_error(errors)


def _spent(run: Run, step: int) -> pd.Series:
    """Cumulative cost at a step, NaN where the log has no line of that very step."""
    return run.spent.astype(float).reindex([step]).iloc[0]


def _label(
    run: Run,
    evaluation: str,
    step: int,
    rows: dict[str, dict[str, float]],
    benchmarks: Sequence[str],
    spent: pd.Series,
    k: int,
) -> list[dict[str, Any]]:
    """One evaluation's rows, mean included, with interval, cost and whose they are."""
    parts = {name: [name] for name in rows} | {"mean": list(benchmarks)}
    values = rows | {"mean": _mean_row([rows[name] for name in benchmarks])}
    labelled = []
    for name, row in values.items():
        half = _half_width(
            [rows[part]["standard_error"] for part in parts[name]],
            [rows[part]["problems"] for part in parts[name]],
        )
        lowest = -1.0 if evaluation == "change" else 0.0
        labelled.append(
            {
                "run": run.name,
                "method": run.method,
                "seed": run.seed,
                "verifier": run.verifier,
                "evaluation": evaluation,
                "step": step,
                "benchmark": name,
                "problems": row["problems"],
                "samples_min": row["samples_min"],
                "samples_max": row["samples_max"],
                "accuracy": row["accuracy"],
                "standard_error": row["standard_error"],
                "low": np.maximum(row["accuracy"] - half, lowest),
                "high": np.minimum(row["accuracy"] + half, 1.0),
                "pass_k": k,
                "pass_at_k": row["pass_at_k"],
                "device_seconds": spent["device_seconds"],
                "tokens": spent["tokens"],
            }
        )
    return labelled


# --------------------------------------------------------------------------------------- gaps


def _gaps(run: Run) -> list[str]:
    """What a reader of the run's numbers has to know about it."""
    notes = []
    first, last = run.steps
    if first == last:
        notes.append(f"{run.name}: one evaluation only (step {first}), so there is no change")
    elif first > 0:
        notes.append(f"{run.name}: the first evaluation is of step {first}, not before training")
    logged = int(run.spent.index.max()) if len(run.spent) else -1
    if logged > last:
        notes.append(
            f"{run.name}: the log goes on to step {logged}, the last evaluation is of step {last}"
        )
    notes += [
        f"{run.name}: metrics.jsonl has no line of step {step}, so its cost is not known"
        for step in sorted({first, last} - set(run.spent.index))
    ]
    for name in sorted(run.first.keys() | run.last.keys()):
        if name not in run.first or name not in run.last:
            step = last if name in run.first else first
            notes.append(f"{run.name}: step {step} did not evaluate {name}: no change known")
            continue
        unpaired = run.first[name].index.symmetric_difference(run.last[name].index)
        if len(unpaired):
            notes.append(
                f"{run.name}: {len(unpaired)} problems of {name} stand in only one of steps "
                f"{first} and {last}; the change is over the others"
            )
    curve = run.curve
    for benchmark, rows in curve[_incomplete(curve)].groupby("benchmark"):
        steps = ", ".join(str(step) for step in rows["step"])
        notes.append(
            f"{run.name}: {benchmark} is incomplete at step {steps} (from {rows['problems'].min()} "
            "problems); the curve leaves that out"
        )
    for benchmark, rows in curve[curve["samples_min"] < curve["samples_max"]].groupby("benchmark"):
        steps = ", ".join(str(step) for step in rows["step"])
        notes.append(
            f"{run.name}: problems of {benchmark} have {rows['samples_min'].min()} to "
            f"{rows['samples_max'].max()} samples at step {steps}; each problem weighs the same"
        )
    return notes


def _incomplete(curve: pd.DataFrame) -> pd.Series:
    """Evaluations with fewer problems than the run's fullest of the same benchmark."""
    fullest: pd.Series = curve.groupby("benchmark")["problems"].transform("max")
    return curve["problems"] < fullest


def _disagreements(runs: Sequence[Run], benchmarks: Sequence[str]) -> list[str]:
    """Where numbers of different runs must not be compared."""
    notes = []
    if len({run.verifier for run in runs}) > 1:
        judged = ", ".join(f"{run.name} by {run.verifier}" for run in runs)
        notes.append(f"the runs are judged by different verifiers ({judged}): do not compare them")
    for run in runs:
        others = (run.first.keys() | run.last.keys()) - set(benchmarks)
        if others:
            notes.append(
                f"{run.name}: the mean is over {', '.join(benchmarks)} and leaves out "
                f"{', '.join(sorted(others))}, which not every evaluation compared has"
            )
    for name in benchmarks:
        notes += [
            f"{runs[0].name} and {run.name} evaluated different problems of {name}: do not compare "
            "them"
            for run in runs[1:]
            if not runs[0].last[name].index.equals(run.last[name].index)
        ]
    return notes


def _missing_pass_notes(run: Run, step: int, evaluation: Evaluation, k: int) -> list[str]:
    notes = []
    for name, problems in evaluation.items():
        short = int((problems["samples"] < k).sum())
        if short:
            notes.append(
                f"{run.name}: at step {step} {short} of {len(problems)} problems of {name} have "
                f"fewer than {k} samples, so there is no pass@{k}; lower --k"
            )
        elif math.isnan(_pass_at_k(problems, k)):
            notes.append(f"{run.name}: {name} at step {step} has partial credit: no pass@{k}")
    return notes


# ------------------------------------------------------------------------------------- output


def format_summary(summary: Summary) -> str:
    """The table as plain text, percentages for accuracies, with the notes below."""
    table = summary.table

    def percent(value: float, sign: str = "") -> str:
        return "-" if math.isnan(value) else f"{100 * value:{sign}.1f}"

    def count(value: float) -> str:
        return "-" if math.isnan(value) else f"{value:,.0f}"

    rows = []
    for row in table.to_dict("records"):
        sign = "+" if row["evaluation"] == "change" else ""
        same = row["samples_min"] == row["samples_max"]
        least, most = count(row["samples_min"]), count(row["samples_max"])
        rows.append(
            {
                "run": row["run"],
                "method": row["method"],
                "seed": row["seed"],
                "": row["evaluation"],
                "step": row["step"],
                "benchmark": row["benchmark"],
                "problems": count(row["problems"]),
                "k": least if same else f"{least}-{most}",
                "avg@k %": percent(row["accuracy"], sign),
                "s.e.": percent(row["standard_error"]),
                "95 %": f"[{percent(row['low'], sign)}, {percent(row['high'], sign)}]",
                f"pass@{row['pass_k']} %": percent(row["pass_at_k"], sign),
                "device-s": count(row["device_seconds"]),
                "tokens": count(row["tokens"]),
            }
        )
    text = pd.DataFrame(rows).to_string(index=False)
    notes = "".join(f"\nnote: {note}" for note in summary.notes)
    return f"{text}\ns.e. and interval over problems, changes paired by problem{notes}"


def draw_curves(runs: Sequence[Run], benchmarks: Sequence[str], file: Path) -> None:
    """Learning curves as a PNG one column wide: the mean over benchmarks, and each benchmark."""
    with style():
        figure, panels = benchmark_panels(benchmarks)
        for name, panel in panels.items():
            shown = benchmarks if name == "mean" else [name]
            _draw_panel(panel, runs, shown)
            title = f"mean of {len(benchmarks)} benchmarks" if name == "mean" else name
            wide = len(panels) == 1 or name == "mean"
            place = COLUMN - 0.5 if wide else COLUMN / 2 - 0.3
            panel.set_title(fitted(f"{title}, {_sizes(runs, shown)}", place))
        figure.supxlabel("training step", fontsize=7)
        figure.supylabel("accuracy, avg@k (%)", fontsize=7)
        legend_above(
            figure,
            title=f"band: {CONFIDENCE:.0%} interval over n problems, k samples each",
        )
        figure.savefig(file)
        plt.close(figure)


def _draw_panel(panel: Any, runs: Sequence[Run], benchmarks: Sequence[str]) -> None:
    labels = [run.label for run in runs]
    colors = list(map(color, labels))
    for index, run in enumerate(runs):
        curve = _mean_curve(run, benchmarks)
        alike = labels.count(run.label)
        text = f"{run.label} ({alike} runs)" if alike > 1 else f"{run.label} (seed {run.seed})"
        dash = DASHES[colors[:index].count(colors[index]) % len(DASHES)]
        look = {"color": colors[index], "linestyle": dash}
        steps, middle = curve["step"], 100 * curve["accuracy"]
        panel.plot(
            steps,
            middle,
            **look,
            marker="o" if len(curve) <= 12 else None,
            label="_" + text if run.label in labels[:index] else text,
        )
        low, high = (np.clip(middle + sign * 100 * curve["half"], 0, 100) for sign in (-1, 1))
        panel.fill_between(steps, low, high, color=look["color"], alpha=0.15, linewidth=0)
    panel.xaxis.set_major_locator(mpl.ticker.MaxNLocator(5, integer=True))


def _mean_curve(run: Run, benchmarks: Sequence[str]) -> pd.DataFrame:
    """step, accuracy and half the interval, at the steps that evaluated all of the benchmarks."""
    curve = run.curve[~_incomplete(run.curve) & run.curve["benchmark"].isin(benchmarks)]
    points = []
    for step, rows in curve.groupby("step"):
        if len(rows) == len(benchmarks):
            half = _half_width(rows["standard_error"].tolist(), rows["problems"].tolist())
            points.append({"step": step, "accuracy": rows["accuracy"].mean(), "half": half})
    return pd.DataFrame(points, columns=["step", "accuracy", "half"])


def _sizes(runs: Sequence[Run], benchmarks: Sequence[str]) -> str:
    """The sample sizes that a panel's title states."""
    problems, samples = set(), set()
    for run in runs:
        rows = run.curve[run.curve["benchmark"].isin(benchmarks)]
        problems.add(int(rows.groupby("benchmark")["problems"].max().sum()))
        samples |= set(rows["samples_min"]) | set(rows["samples_max"])
    n, k = (
        f"{min(sizes):.0f}" if len(sizes) == 1 else f"{min(sizes):.0f}-{max(sizes):.0f}"
        for sizes in (problems, samples)
    )
    return f"n = {n}, k = {k}"


def add_command(commands: Any) -> None:
    """Add `summary` to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "summary",
        help="accuracy before and after training, with errors and cost, and learning curves",
        description="Prints the table and writes DIR/summary.csv and DIR/learning_curve.png.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run log")
    parser.add_argument(
        "-o", "--output", default="runs/summary", metavar="DIR", help="default: runs/summary"
    )
    parser.add_argument(
        "--k", type=int, help="k of pass@k; default: the fewest samples of any problem"
    )
    parser.set_defaults(act=_act)


def _act(arguments: argparse.Namespace) -> None:
    runs = load_runs(open_sources(arguments.runs))
    summary = summarize(runs, arguments.k)
    folder = Path(arguments.output)
    folder.mkdir(parents=True, exist_ok=True)
    summary.table.to_csv(folder / "summary.csv", index=False)
    draw_curves(runs, summary.benchmarks, folder / "learning_curve.png")
    print(format_summary(summary))
    print(f"wrote {folder / 'summary.csv'} and {folder / 'learning_curve.png'}")
