"""Which constants would draw figure 4? The paper withholds alpha_P, alpha_N, lambda_P, lambda_N.

Figure 4 shows a coefficient c = .1, .3, .5 under which easy benchmarks rise and hard ones peak at
.3. A candidate reads it as ``alpha_P = c a_P, alpha_N = c a_N`` with two sharpnesses; each is
trained (full CVPO) at the three coefficients in every world, and its six differences (.3 less .1
and .5 less .3, on three benchmarks) are held against the paper's ::

    loss = (simulated - paper)' (S_paper + S_run + S_run / seeds)^-1 (simulated - paper)

S_paper is the sampling error of avg@32 on the benchmark's problems. S_run is the covariance of the
differences from one simulated run to another, each with worlds and problems of its own: the paper
drew one run, we average over the seeds. The set of candidates that are not significantly worse than
the best has ``loss <= least loss + 4 F(.95; 4, degrees)``, four constants being free; degrees are
Satterthwaite's, since S_run is known from a few seeds only. With S_paper alone that is chi-square.

Decisions:

- A benchmark is as many held-out prompts as it has problems, neighbours in the order of their rate
  at the start, and those whose mean under VAPO ends nearest to the paper's VAPO row (table 1): the
  paper does not print the base model's rates. Differences between coefficients are then compared on
  prompts as hard as the paper's, though never trained on.
- S_paper of a difference is binomial, ``p (1 - p) / (samples problems)`` for each end: both ends
  answer the same problems, so their difficulty cancels (``paired``). That is an upper bound for
  given problems. If they are read as draws of unlike problems (``clustered``, samples of a problem
  all alike), it is ``p (1 - p) / problems``; the study reports both.
- Candidates are a Latin hypercube over the ratios and the logarithms of the sharpnesses, and the
  project's own reading (a_P = a_N = 1, lambda = 50) as the first.
- The best candidate was chosen for its shape, so its verdict comes from fresh worlds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Annotated, Any, Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Bool, Float, Int
from pydantic import Field, model_validator
from scipy import stats

from cvpo import StochasticityConfig
from cvpo.metrics import paired_t_interval
from sim.bandit import BanditConfig
from sim.differences import difference_row, difference_verdict
from sim.study import Desk, Row, Settings, Study, Verdict
from sim.trace import Array, Trace, compare
from sim.training import Budget, Setting

CLAIM, UNIT = 10, "accuracy"
COEFFICIENTS = (0.1, 0.3, 0.5)
SAMPLES = 32
"""Of a problem: the paper's avg@32."""
PRECISE = 1000 * SAMPLES
"""So many leave next to no sampling error; what one run has by chance remains."""


class Benchmark(NamedTuple):
    """What the paper says of a benchmark (table 1 and figure 4)."""

    name: str
    problems: int
    vapo: float
    figure: tuple[float, float, float]
    """At each of `COEFFICIENTS`."""
    signs: tuple[int, int]
    """Of its two differences: +1 rises, -1 falls."""


BENCHMARKS = (
    Benchmark("AMC23", 40, 0.441, (0.658, 0.720, 0.767), (1, 1)),
    Benchmark("AIME24", 30, 0.144, (0.169, 0.220, 0.167), (1, -1)),
    Benchmark("AIME25", 30, 0.046, (0.082, 0.133, 0.117), (1, -1)),
)
SIGNS = np.array([sign for benchmark in BENCHMARKS for sign in benchmark.signs])
STEPS = (".3 less .1", ".5 less .3")
DIFFERENCES = tuple(f"{b.name}, c = {step}" for b, step in product(BENCHMARKS, STEPS))
"""The order of the six differences."""
CONSTANTS = ("alpha_P / c", "alpha_N / c", "lambda_P", "lambda_N")
Error = Literal["paired", "clustered"]
ERRORS: tuple[Error, ...] = get_args(Error)
OURS = (1.0, 1.0, 50.0, 50.0)
"""The project's reading of the coefficient."""
FIGURE = np.array([benchmark.figure for benchmark in BENCHMARKS]).T
"""Figure 4, [coefficients, benchmarks]."""
_STEP = np.array([[-1.0, 1.0, 0.0], [0.0, -1.0, 1.0]])


class CalibrateSettings(Settings):
    """Keys of the calibrate study."""

    candidates: int = Field(default=80, ge=2)
    """Mappings from the coefficient to the constants, the project's own among them."""
    most_p: float = Field(default=4.0, gt=0)
    """alpha_P / c goes from 0 to this."""
    most_n: float = Field(default=1.9, gt=0, lt=2)
    """alpha_N / c goes from 0 to this; 2 would make alpha_N 1 at c = .5."""
    sharpness: tuple[
        Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0, allow_inf_nan=False)]
    ] = (5.0, 2000.0)
    """lambda_P and lambda_N go from and to these, on a logarithmic scale."""
    prompts: int = Field(default=128, ge=1)
    """That are trained on."""
    held_out: int = Field(default=1024, ge=max(b.problems for b in BENCHMARKS))
    """From which benchmarks are chosen."""
    batch: int = Field(default=16, ge=1)
    """Prompts of a step."""
    rollouts: int = Field(default=8, ge=2)
    """Responses to each."""
    steps: int = Field(default=200, ge=1)
    """Optimiser steps of a training."""

    @model_validator(mode="after")
    def _fits(self) -> CalibrateSettings:
        if self.batch > self.prompts:
            raise ValueError(f"batch must be at most prompts ({self.prompts}), got {self.batch}")
        if self.sharpness[0] >= self.sharpness[1]:
            raise ValueError(f"sharpness must rise, got {self.sharpness}")
        if len(self.seeds) < 3:
            raise ValueError("seeds: at least three, since one of them plays the paper")
        return self

    @property
    def world(self) -> BanditConfig:
        """With benchmarks held out."""
        return BanditConfig(prompts=self.prompts, held_out=self.held_out)

    @property
    def budget(self) -> Budget:
        """Read at the beginning and at the end."""
        return Budget(batch=self.batch, rollouts=self.rollouts, steps=self.steps, every=self.steps)


# ------------------------------------------------------------------------------------- candidates


def draw_candidates(settings: CalibrateSettings) -> Float[Array, "candidates 4"]:
    """`OURS`, then a Latin hypercube; columns as `CONSTANTS`."""
    unit = stats.qmc.LatinHypercube(d=4, seed=settings.seeds[0]).random(settings.candidates - 1)
    low, high = np.log(settings.sharpness)
    sharpness = np.exp(low + (high - low) * unit[:, 2:])
    drawn = np.column_stack([settings.most_p * unit[:, 0], settings.most_n * unit[:, 1], sharpness])
    return np.vstack([OURS, drawn])


def candidate_settings(constants: Float[Array, " 4"], name: str) -> list[Setting]:
    """A candidate at each of `COEFFICIENTS`."""
    a_p, a_n, lambda_p, lambda_n = constants.tolist()
    return [
        Setting(
            f"{name}-{c}",
            stochasticity=StochasticityConfig(
                alpha_p=c * a_p, alpha_n=c * a_n, lambda_p=lambda_p, lambda_n=lambda_n
            ),
        )
        for c in COEFFICIENTS
    ]


def choose_problems(
    start: Float[Array, " N"], end: Float[Array, " N"], benchmark: Benchmark
) -> Int[Array, " problems"]:
    """Neighbours by their rate at the start whose mean at the end is nearest to the paper's VAPO.

    Args:
        start: Rates of the held-out prompts before training.
        end: The same after training with VAPO.
        benchmark: How many, and what VAPO reaches on it.
    """
    order = np.argsort(start, kind="stable")
    total = np.concatenate([[0.0], end[order].cumsum()])
    mean = (total[benchmark.problems :] - total[: -benchmark.problems]) / benchmark.problems
    first = int(np.abs(mean - benchmark.vapo).argmin())
    return order[first : first + benchmark.problems]


def benchmark_scores(
    rates: Float[Array, "seeds N"], problems: Sequence[Sequence[Int[Array, " problems"]]]
) -> Float[Array, "seeds benchmarks"]:
    """Mean true rate of each benchmark.

    Args:
        rates: Of all prompts, in every seed.
        problems: Of each seed, of each benchmark; indices of prompts.
    """
    return np.array(
        [[row[chosen].mean() for chosen in of] for row, of in zip(rates, problems, strict=True)],
        dtype=np.float64,
    )


def differences(scores: Float[Array, "*shape 3 benchmarks"]) -> Float[Array, "*shape 6"]:
    """From the scores at three coefficients to the six `DIFFERENCES`."""
    step = np.einsum("dc,...cb->...bd", _STEP, scores)
    return np.asarray(step.reshape(*step.shape[:-2], -1))


# ---------------------------------------------------------------------------------- the comparison


def sampling_covariance(
    scores: Float[Array, "3 benchmarks"],
    *,
    error: Error,
    samples: int = SAMPLES,
) -> Float[Array, "6 6"]:
    """S_paper: what drawing responses (``clustered``: and problems) does to the six differences.

    Args:
        scores: At each coefficient.
        error: See the module's decisions.
        samples: Responses to a problem.
    """
    covariance = np.zeros((len(DIFFERENCES), len(DIFFERENCES)))
    for index, (benchmark, p) in enumerate(zip(BENCHMARKS, scores.T, strict=True)):
        count = benchmark.problems * (samples if error == "paired" else 1)
        block = slice(2 * index, 2 * index + 2)
        covariance[block, block] = _STEP @ np.diag(p * (1 - p) / count) @ _STEP.T
    return covariance


def run_covariance(simulated: Float[Array, "candidates seeds 6"]) -> Float[Array, "6 6"]:
    """S_run: how the differences of one run scatter over seeds, pooled over candidates."""
    candidates, seeds, _ = simulated.shape
    residual = simulated - simulated.mean(1, keepdims=True)
    return np.asarray(np.einsum("csi,csj->ij", residual, residual) / (candidates * (seeds - 1)))


class Fit(NamedTuple):
    """Every candidate against one figure."""

    loss: Float[Array, " candidates"]
    kept: Bool[Array, " candidates"]
    """Not significantly worse than the best."""
    unmoved: float
    """Loss if the coefficient changed nothing."""
    degrees: float
    """Of freedom of the covariance."""

    @property
    def best(self) -> int:
        """Index of the best candidate."""
        return int(self.loss.argmin())

    @property
    def chance(self) -> float:
        """Of a least loss at least as large, if the best candidate were the truth."""
        count = len(DIFFERENCES)
        return float(stats.f.sf(self.loss.min() / count, count, self.degrees))


def fit(
    simulated: Float[Array, "candidates seeds 6"],
    figure: Float[Array, " 6"],
    sampling: Float[Array, "6 6"],
    *,
    confidence: float = 0.95,
) -> Fit:
    """Holds simulated differences against a figure's.

    Args:
        simulated: Of each candidate in every seed.
        figure: The figure's, from one run.
        sampling: Its sampling error (`sampling_covariance`).
        confidence: Of the set that is kept.
    """
    seeds, free = simulated.shape[1], len(CONSTANTS)
    run = run_covariance(simulated) * (1 + 1 / seeds)
    total = sampling + run
    by_chance = max(np.trace(run) / np.trace(total), 1e-3)  # below, F is as good as chi-square
    degrees = (seeds - 1) / by_chance**2
    distance = simulated.mean(1) - figure
    precision = np.linalg.inv(total)
    loss = np.einsum("ci,ij,cj->c", distance, precision, distance)
    kept = loss <= loss.min() + free * stats.f.ppf(confidence, free, degrees)
    return Fit(loss, kept, float(figure @ precision @ figure), float(degrees))


def has_shape(mean: Float[Array, "candidates 6"]) -> Bool[Array, " candidates"]:
    """Whether the means have the six signs of figure 4: easy ones rise, hard ones peak at .3."""
    return np.asarray((SIGNS * mean > 0).all(-1))


def shape_verdict(simulated: Float[Array, "seeds 6"]) -> Verdict:
    """On claim 10 for one candidate: all six signs hold, or one is surely the other way.

    One of six differences falls on the wrong side by chance six times as often as a single one, so
    for a failure each interval is wider (Bonferroni). All six must hold, so there it need not be.
    """

    def verdicts(confidence: float) -> list[Verdict]:
        zero = np.zeros(len(simulated))
        return [
            difference_verdict(
                paired_t_interval(x, zero, confidence=confidence), sign=1 if sign > 0 else -1
            )
            for x, sign in zip(simulated.T, SIGNS, strict=True)
        ]

    if "fails" in verdicts(1 - 0.05 / len(SIGNS)):
        return "fails"
    return "holds" if set(verdicts(0.95)) == {"holds"} else "undecided"


# --------------------------------------------------------------------------------- identifiability


class Recovery(NamedTuple):
    """How often a figure drawn from a known candidate leads back to it."""

    covered: Float[Array, " seeds"]
    """Share of candidates that are kept when they made the figure, by the seed that drew it."""
    share: Float[Array, " seeds"]
    """Mean share of all candidates that are kept."""


def recover(
    scores: Float[Array, "candidates seeds 3 benchmarks"],
    *,
    samples: int,
    generator: np.random.Generator,
) -> Recovery:
    """Lets every candidate draw the figure in one seed's world, and fits it with the other seeds'.

    Args:
        scores: True scores of each candidate at each coefficient.
        samples: Responses to a problem from which the figure is drawn.
        generator: Draws them.
    """
    count = np.array([samples * benchmark.problems for benchmark in BENCHMARKS])
    covered, share = [], []
    for seed in range(scores.shape[1]):
        others = differences(np.delete(scores, seed, axis=1))
        kept = []
        for truth in scores[:, seed]:
            figure = differences(generator.binomial(count, truth) / count)
            error = sampling_covariance(truth, error="paired", samples=samples)
            kept.append(fit(others, figure, error).kept)
        covered.append(np.diagonal(kept).mean())
        share.append(np.mean(kept))
    return Recovery(np.array(covered), np.array(share))


# --------------------------------------------------------------------------------------- the study


class Searched(NamedTuple):
    """All candidates in the worlds of some seeds."""

    scores: Float[Array, "candidates seeds 3 benchmarks"]
    start: Float[Array, "seeds benchmarks"]
    """Mean rate of each benchmark before training."""
    vapo: Float[Array, "seeds benchmarks"]
    """The same after training with VAPO."""


def read_traces(world: BanditConfig, traces: dict[str, Trace], candidates: int) -> Searched:
    """Scores of all candidates on the benchmarks that VAPO's run chooses.

    Args:
        world: Of the traces.
        traces: ``vapo``, and candidates named by their index and coefficient.
        candidates: Their number.
    """
    vapo = traces["vapo"]
    problems = [
        [world.prompts + choose_problems(start, end, benchmark) for benchmark in BENCHMARKS]
        for start, end in zip(*vapo.rates[[0, -1], :, world.prompts :], strict=True)
    ]
    scores = np.array(
        [
            [benchmark_scores(traces[f"{index}-{c}"].rates[-1], problems) for c in COEFFICIENTS]
            for index in range(candidates)
        ]
    )
    return Searched(
        scores=scores.transpose(0, 2, 1, 3),
        start=benchmark_scores(vapo.rates[0], problems),
        vapo=benchmark_scores(vapo.rates[-1], problems),
    )


def search(
    desk: Desk, settings: CalibrateSettings, constants: Float[Array, "candidates 4"]
) -> Searched:
    """Trains every candidate at every coefficient in every seed's world."""
    chosen = [Setting("vapo", method="vapo")]
    for index, candidate in enumerate(constants):
        chosen += candidate_settings(candidate, str(index))
    traces = compare(desk, settings.world, settings.budget, chosen, desc="candidates")
    return read_traces(settings.world, traces, len(constants))


def confirm(
    desk: Desk, settings: CalibrateSettings, candidate: Float[Array, " 4"]
) -> Float[Array, "seeds 6"]:
    """The differences of one candidate in as many fresh worlds."""
    fresh = [seed + max(settings.seeds) + 1 for seed in settings.seeds]
    chosen = [Setting("vapo", method="vapo"), *candidate_settings(candidate, "0")]
    traces = compare(
        desk, settings.world, settings.budget, chosen, desc="best in fresh worlds", seeds=fresh
    )
    return differences(read_traces(settings.world, traces, 1).scores[0])


def run(settings: CalibrateSettings, desk: Desk) -> list[Row]:
    """Searches, fits, confirms, and asks whether a known candidate would be found."""
    constants = draw_candidates(settings)
    found = search(desk, settings, constants)
    simulated = differences(found.scores)
    fits: dict[str, Fit] = {
        error: fit(simulated, differences(FIGURE), sampling_covariance(FIGURE, error=error))
        for error in ERRORS
    }
    best = fits["paired"].best
    desk.table("candidates", candidate_table(constants, simulated, fits))
    rows = benchmark_rows(found)
    for error, fitted in fits.items():
        rows += fit_rows(constants, fitted, error)
    rows += shape_rows(simulated)
    rows += figure_rows(simulated[0], "the project's reading, a_P = a_N = 1, lambda = 50")
    rows += figure_rows(confirm(desk, settings, constants[best]), "best candidate, fresh worlds")
    rows += recovery_rows(found.scores, settings.seeds[0])
    return rows


def benchmark_rows(found: Searched) -> list[Row]:
    """How hard the prompts are that stand for each benchmark."""
    rows = []
    for (index, benchmark), (when, scores) in product(
        enumerate(BENCHMARKS), (("before training", found.start), ("after VAPO", found.vapo))
    ):
        paper = f"{benchmark.vapo:g}" if scores is found.vapo else ""
        rows.append(
            difference_row(
                f"mean rate {when}", benchmark.name, scores[:, index], 0.0, paper=paper, unit=UNIT
            )
        )
    return rows


def fit_rows(constants: Float[Array, "candidates 4"], found: Fit, error: str) -> list[Row]:
    """The best candidate, and how far from it one may go. Intervals are ranges of the kept set."""
    where, n = f"figure 4, {error} sampling error", len(constants)
    rows = [
        Row(quantity, where, value, n=n, unit=unit)
        for quantity, value, unit in (
            ("loss of the best candidate (six differences)", float(found.loss.min()), ""),
            ("chance of such a loss if the best were true", found.chance, ""),
            ("loss if the coefficient changed nothing", found.unmoved, ""),
            ("candidates not significantly worse than the best", found.kept.mean(), "share"),
        )
    ]
    best, kept = constants[found.best], constants[found.kept]
    rows += [
        Row(f"{name}: best, range of those not worse", where, x, low, high, n, paper="not given")
        for name, x, low, high in zip(CONSTANTS, best, kept.min(0), kept.max(0), strict=True)
    ]
    return rows


def shape_rows(simulated: Float[Array, "candidates seeds 6"]) -> list[Row]:
    """How many candidates draw the shape of figure 4, and how large their effects are."""
    where, n, mean = "all candidates", len(simulated), simulated.mean(1)
    verdicts = Counter(shape_verdict(candidate) for candidate in simulated)
    shares = {
        "whose means have the shape of figure 4": has_shape(mean).mean(),
        "for which the shape of figure 4 holds": verdicts["holds"] / n,
        "for which the shape of figure 4 fails": verdicts["fails"] / n,
    }
    rows = [Row(f"candidates {name}", where, x, n=n, unit="share") for name, x in shares.items()]
    for name, x, step in zip(DIFFERENCES, mean.T, differences(FIGURE), strict=True):
        median, low, high = np.quantile(x, (0.5, 0.025, 0.975))
        quantity = f"{name}: median and 95 % of candidates"
        rows.append(Row(quantity, where, median, low, high, n, UNIT, paper=f"{step:+.3f}"))
    return rows


def figure_rows(simulated: Float[Array, "seeds 6"], where: str) -> list[Row]:
    """Claim 10 for one candidate: each sign, and all of them."""
    rows = [
        difference_row(
            name, where, x, 0.0, paper=f"{step:+.3f}", claim=CLAIM, sign=1 if sign > 0 else -1,
            unit=UNIT,
        )
        for name, x, step, sign in zip(
            DIFFERENCES, simulated.T, differences(FIGURE), SIGNS, strict=True
        )
    ]  # fmt: skip
    shape = Row(
        quantity="differences whose mean has the sign of figure 4",
        setting=where,
        value=float((SIGNS * simulated.mean(0) > 0).sum()),
        n=len(simulated),
        paper=f"all {len(SIGNS)}",
        claim=CLAIM,
        verdict=shape_verdict(simulated),
    )
    return [*rows, shape]


def recovery_rows(scores: Float[Array, "candidates seeds 3 benchmarks"], seed: int) -> list[Row]:
    """Whether the procedure finds a known candidate, and how much else it cannot rule out."""
    rows = []
    for samples in (SAMPLES, PRECISE):
        found = recover(scores, samples=samples, generator=np.random.default_rng(seed))
        where = f"figures drawn by known candidates, avg@{samples}"
        rows += [
            difference_row(quantity, where, share, 0.0, unit="share")
            for quantity, share in (
                ("known candidates in their own set", found.covered),
                ("candidates in a set", found.share),
            )
        ]
    return rows


def candidate_table(
    constants: Float[Array, "candidates 4"],
    simulated: Float[Array, "candidates seeds 6"],
    fits: dict[str, Fit],
) -> list[dict[str, Any]]:
    """Every candidate: constants, mean differences, losses."""
    return [
        dict(zip(CONSTANTS, constants[index], strict=True))
        | dict(zip(DIFFERENCES, candidate.mean(0), strict=True))
        | {f"loss, {error}": found.loss[index] for error, found in fits.items()}
        | {f"kept, {error}": found.kept[index] for error, found in fits.items()}
        | {"shape": shape_verdict(candidate)}
        for index, candidate in enumerate(simulated)
    ]


STUDY = Study(
    name="calibrate",
    about="which constants of W_S would draw figure 4, and how well it determines them",
    settings=CalibrateSettings,
    run=run,
)
