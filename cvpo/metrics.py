"""What a run is judged by: critic quality, accuracy with honest errors, and small statistics.

Every function reads tensors of any dtype and device (or NumPy arrays), computes in float64 on the
CPU and returns Python floats or NumPy arrays. "No answer" is NaN, never a made-up number: constant
returns have no explained variance, one problem has no standard error. Whether something is
constant is decided by max == min, because the standard deviation of equal floats need not be 0.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from statistics import NormalDist

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

Array = np.ndarray | Tensor

_CHUNK_ELEMENTS = 4_000_000  # resampled values held at once: 32 MB in float64


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval.

    Attributes:
        estimate: the statistic of the data as given.
        low: lower end, NaN when nothing could be resampled.
        high: upper end, NaN when nothing could be resampled.
        standard_error: of the estimate, in its unit.
        confidence: nominal coverage, in (0, 1).
        levels: what was resampled, outermost first: ("seeds", "problems") or one of them.
        sizes: how many units each level had.
        dropped: cells (or pairs) left out because they were NaN.
        degrees: of freedom of the t distribution that says how far out the ends lie; 0 where
            nothing could be resampled.
    """

    estimate: float
    low: float
    high: float
    standard_error: float
    confidence: float
    levels: tuple[str, ...]
    sizes: tuple[int, ...]
    dropped: int = 0
    degrees: int = 0


# ---------------------------------------------------------------------------------- the critic


def explained_variance(
    values: Float[Array, "*shape"],
    returns: Float[Array, "*shape"],
    *,
    mask: Bool[Array, "*shape"] | None = None,
) -> float:
    """Share of the returns' variance that the values explain, 1 - Var(G - V) / Var(G).

    `returns` are Monte-Carlo returns G, not lambda-targets: against targets that already contain V
    a critic can explain itself. A constant V scores 0; being worse than that scores below 0.

    Args:
        values: V, any shape.
        returns: G, the same shape.
        mask: True where an entry counts; the others may hold anything, NaN included.

    Returns:
        At most 1, unbounded below. NaN when the returns are constant or nothing counts, and when
        an entry that counts is not finite.

    Raises:
        ValueError: the shapes differ.
    """
    V, G = _pair(values, returns, mask, names=("values", "returns"))
    if not (np.isfinite(V).all() and np.isfinite(G).all()) or _is_constant(G):
        return math.nan
    return float(1.0 - np.var(G - V) / np.var(G))


def explained_variance_by_position(
    values: Float[Array, "B T"],
    returns: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    position_bins: int = 10,
) -> Float[np.ndarray, " position_bins"]:
    """`explained_variance` in each part of the responses, the first part first.

    A critic knows little where a response begins and much where it ends; one number hides which of
    both a run's critic has learnt. A token's position is the one of `calibration`.

    Args:
        values: V of each token.
        returns: Monte-Carlo return of each token.
        mask: True on response tokens; other slots may hold anything.
        position_bins: how many parts a response is cut into (10: deciles).

    Returns:
        At most 1 each, NaN where `explained_variance` is.

    Raises:
        ValueError: shapes disagree, or a bin count is below 1.
    """
    V, G, M = _numpy(values), _numpy(returns), _numpy(mask).astype(bool)
    if V.ndim != 2 or V.shape != G.shape or V.shape != M.shape:
        raise ValueError(
            "explained_variance_by_position needs values, returns and mask [B, T], got "
            f"{V.shape}, {G.shape} and {M.shape}"
        )
    if position_bins < 1:
        raise ValueError(f"position_bins must be at least 1, got {position_bins}")
    position, V, G = _position_bins(M, position_bins), V[M], G[M]
    parts = [position == part for part in range(position_bins)]
    return np.array([explained_variance(V[part], G[part]) for part in parts])


def calibration(
    values: Float[Array, "B T"],
    returns: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    correct: Shaped[Array, "B"],
    *,
    position_bins: int = 10,
    value_bins: int = 20,
) -> dict[str, np.ndarray]:
    """Sums of values and returns by place in the response, size of the value, and outcome.

    The run log's part `calibration`; sums can be added over batches. A token's position is its
    rank among its trajectory's own response tokens over their number, so masked gaps do not count.
    Value bins cut [-1, 1] evenly, lower edge included; the outer two also take what lies beyond.

    Args:
        values: V of each token.
        returns: Monte-Carlo return of each token.
        mask: True on response tokens; other slots may hold anything.
        correct: R per trajectory; an outcome counts as correct from .5 on.
        position_bins: how many parts a response is cut into (10: deciles).
        value_bins: how many parts [-1, 1] is cut into.

    Returns:
        Columns `position_bin`, `value_bin`, `correct` (bool), `n`, `value_sum`, `return_sum`,
        `return_sq_sum`, one row per cell that holds a token, ordered by the first three.

    Raises:
        ValueError: shapes disagree, a bin count is below 1, or a response token's value or return
            is not finite.
    """
    V, G, M, R = _numpy(values), _numpy(returns), _numpy(mask).astype(bool), _numpy(correct)
    if V.ndim != 2 or V.shape != G.shape or V.shape != M.shape or R.shape != V.shape[:1]:
        raise ValueError(
            "calibration needs values, returns and mask [B, T] and correct [B], got "
            f"{V.shape}, {G.shape}, {M.shape} and {R.shape}"
        )
    if position_bins < 1 or value_bins < 1:
        raise ValueError(
            f"position_bins and value_bins must be at least 1, got {position_bins}, {value_bins}"
        )
    rows = np.repeat(np.arange(len(V)), M.sum(axis=1))
    V, G = V[M].astype(np.float64), G[M].astype(np.float64)
    broken = rows[~(np.isfinite(V) & np.isfinite(G))]
    if len(broken):
        raise ValueError(
            f"trajectory {broken[0]} has a response token whose value or return is not finite; "
            "mask it or skip the step"
        )
    position = _position_bins(M, position_bins)
    inner_edges = np.linspace(-1.0, 1.0, value_bins + 1)[1:-1]
    value = np.searchsorted(inner_edges, V, side="right")
    cell = (position * value_bins + value) * 2 + (R[rows] >= 0.5)
    cells = position_bins * value_bins * 2
    n = np.bincount(cell, minlength=cells)
    filled = np.flatnonzero(n)

    def total(x: np.ndarray) -> np.ndarray:
        return np.bincount(cell, weights=x, minlength=cells)[filled]

    return {
        "position_bin": filled // (2 * value_bins),
        "value_bin": filled // 2 % value_bins,
        "correct": filled % 2 == 1,
        "n": n[filled],
        "value_sum": total(V),
        "return_sum": total(G),
        "return_sq_sum": total(G * G),
    }


def expected_calibration_error(table: dict[str, np.ndarray]) -> float:
    """Mean distance of a value from the return that follows it, sum_b n_b/N |mean V - mean G|.

    b runs over value bins with positions and outcomes merged: split by outcome even a perfect
    critic looks wrong, since it does not know the outcome yet.

    Args:
        table: columns as `calibration` returns them; the same cell may stand in several rows.

    Returns:
        In units of the return, at least 0; NaN for an empty table.
    """
    if len(table["n"]) == 0:
        return math.nan
    value_bin = np.asarray(table["value_bin"], dtype=np.int64)
    gap = np.bincount(value_bin, weights=table["value_sum"]) - np.bincount(
        value_bin, weights=table["return_sum"]
    )
    return float(np.abs(gap).sum() / np.sum(table["n"]))


# ------------------------------------------------------------------------------------ accuracy


def pass_at_k(
    num_samples: int | Int[Array, "*shape"],
    num_correct: int | Int[Array, "*shape"],
    k: int | Int[Array, "*shape"],
) -> float | Float[np.ndarray, "*shape"]:
    """Chance that at least one of k samples is correct, 1 - C(n-c, k) / C(n, k), unbiased.

    The ratio is the product over i < k of (n-c-i) / (n-i), which neither overflows nor cancels
    (Chen et al. 2021, arXiv 2107.03374).

    Args:
        num_samples: n, samples drawn.
        num_correct: c, how many of them are correct.
        k: how many one may submit. The three broadcast.

    Returns:
        In [0, 1]; a float when all three are scalars, an array otherwise.

    Raises:
        ValueError: a count is not whole, c is outside [0, n], k < 1 or n < k.
    """
    counts = [_numpy(x) for x in (num_samples, num_correct, k)]
    n, c, draws = np.broadcast_arrays(*counts)
    for name, x in (("num_samples", n), ("num_correct", c), ("k", draws)):
        if np.any(x != np.floor(x)):
            raise ValueError(f"{name} must be whole numbers, got {x[x != np.floor(x)].flat[0]}")
    for bad, rule in (
        ((c < 0) | (c > n), "num_correct must lie in [0, num_samples]"),
        ((draws < 1) | (draws > n), "k must lie in [1, num_samples]"),
    ):
        if np.any(bad):
            at = np.flatnonzero(bad)[0]
            raise ValueError(
                f"{rule}, got num_samples {n.flat[at]}, num_correct {c.flat[at]}, "
                f"k {draws.flat[at]}"
            )
    all_wrong = np.ones(n.shape)
    for i in range(int(draws.max(initial=0))):
        factor = (n - c - i) / np.maximum(n - i, 1)  # exactly 0 at i = n-c, and 0 it stays
        all_wrong = np.where(i < draws, all_wrong * factor, all_wrong)
    result = 1.0 - all_wrong
    return float(result) if result.ndim == 0 else result


def avg_at_k(correct: Shaped[Array, "problems k"]) -> tuple[float, float]:
    """Mean accuracy over k samples a problem, with its standard error clustered by problem.

    The samples of a problem share its difficulty, so they are not independent: the standard error
    is the sample standard deviation (n - 1) of the problems' means over sqrt(problems).

    Args:
        correct: R in [0, 1]; NaN marks a sample that is missing. Every problem weighs the same
            however many samples it has.

    Returns:
        The mean, and its standard error (NaN with one problem).

    Raises:
        ValueError: not [problems, k], no problem, a problem without a sample, or an entry outside
            [0, 1] (a reward of -1 is not a correctness).
    """
    R = _numpy(correct).astype(np.float64)
    if R.ndim != 2 or len(R) == 0:
        raise ValueError(f"correct must be [problems, k] with a problem in it, got {R.shape}")
    if np.any((R < 0) | (R > 1)):
        raise ValueError(f"correct must lie in [0, 1], got {R[(R < 0) | (R > 1)][0]}")
    means = _mean(R, axis=1)
    if np.isnan(means).any():
        raise ValueError(
            f"problem {np.flatnonzero(np.isnan(means))[0]} has no sample; leave its row out"
        )
    return float(means.mean()), _standard_error(means)


def clustered_standard_error(x: Shaped[Array, "n"], cluster: Int[Array, "n"]) -> float:
    """Standard error of mean(x) when entries of one cluster depend on each other.

    sqrt(G/(G-1) sum_g (sum_{i in g} (x_i - mean))^2) / n with G clusters: every entry weighs the
    same. With clusters of equal size it is the standard error of the clusters' means, with
    clusters of one entry the ordinary sd / sqrt(n) (Liang and Zeger 1986).

    Args:
        x: values, finite.
        cluster: each entry's cluster, any labels.

    Returns:
        At least 0; NaN with fewer than two clusters.

    Raises:
        ValueError: the lengths differ.
    """
    values, labels = _numpy(x).astype(np.float64).ravel(), _numpy(cluster).ravel()
    if values.shape != labels.shape:
        raise ValueError(f"x has {values.size} entries, cluster {labels.size}")
    _, index = np.unique(labels, return_inverse=True)
    clusters = int(index.max(initial=-1)) + 1
    if clusters < 2:
        return math.nan
    sums = np.bincount(index, weights=values - values.mean())
    return float(np.sqrt(clusters / (clusters - 1) * np.sum(sums**2)) / values.size)


def group_outcomes(correct: Shaped[Array, "B"], group: Int[Array, "B"]) -> tuple[float, float]:
    """Share of the groups that are all correct and share that are all wrong.

    Neither kind tells a group-relative estimator anything. With partial credit, all correct means
    every R is 1 and all wrong means every R is 0.

    Args:
        correct: R per trajectory.
        group: each trajectory's prompt, any labels.

    Returns:
        The two shares, in [0, 1] with a sum of at most 1; NaN for an empty batch.

    Raises:
        ValueError: the lengths differ.
    """
    R, labels = _numpy(correct).astype(np.float64).ravel(), _numpy(group).ravel()
    if R.shape != labels.shape:
        raise ValueError(f"correct has {R.size} entries, group {labels.size}")
    if R.size == 0:
        return math.nan, math.nan
    _, index, size = np.unique(labels, return_inverse=True, return_counts=True)
    all_correct = np.bincount(index, weights=R == 1) == size
    all_wrong = np.bincount(index, weights=R == 0) == size
    return float(all_correct.mean()), float(all_wrong.mean())


# ----------------------------------------------------------------------------------- intervals


def hierarchical_bootstrap(
    data: Float[Array, "seeds problems *samples"],
    *,
    strata: Shaped[Array, "problems"] | None = None,
    statistic: Callable[[np.ndarray], np.ndarray] | None = None,
    num_resamples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Bootstrap interval over training seeds and problems, expanded percentiles.

    Each resample draws the seeds with replacement, then the problems, and takes every drawn
    problem at every drawn seed. One draw of problems serves all seeds because the two are crossed:
    all seeds answer the same problems, and one that is hard is hard for each of them. A draw per
    seed would treat that shared difficulty as independent noise, average it away over the seeds
    and make the interval too narrow.

    A third axis of samples is averaged first and not resampled: the noise of a cell's mean is
    already in the spread between cells, which crossed resampling overstates rather than hides
    (Owen 2007, "The pigeonhole bootstrap").

    Plain percentiles of five seeds are too narrow (they would hold 95 % for 83 % where seeds are
    all that differs), so percentiles further out are read, as far as a t interval would go
    (Hesterberg 2015, "What teachers should know about the bootstrap"). Two or three seeds still
    cannot be had to reach beyond their own range.

    Args:
        data: accuracy (or any score) by seed and problem, with or without samples. NaN is missing;
            a seed or problem without any entry is left out.
        strata: each problem's benchmark, any labels. Then the statistic is the mean over
            benchmarks, each of which weighs the same whatever its size, and problems are drawn
            within their benchmark. Default: all are of one.
        statistic: [resamples, seeds, problems] -> [resamples]; must cope with NaN if there are
            missing cells. Default: the mean over problems of the mean over seeds. How far out the
            percentiles are read follows the mean's spread whatever the statistic.
        num_resamples: resamples drawn.
        confidence: nominal coverage.
        seed: of the random generator; the same seed gives the same interval.

    Returns:
        The interval. `levels` says what was resampled: with one seed only the problems, and then
        the interval says nothing about other seeds; with one problem only the seeds.

    Raises:
        ValueError: not two or three axes, nothing but NaN, a bad confidence or count, strata that
            do not fit the problems or hold no number, or both strata and a statistic.
    """
    if strata is not None and statistic is not None:
        raise ValueError("strata have their own statistic, the mean over benchmarks; give one")
    cells, sizes, dropped = _crossed(data, strata)
    score = statistic if statistic is not None else partial(_mean_over_problems, sizes=sizes)
    seeds, first = len(cells), np.cumsum(sizes) - sizes

    def resample(rng: np.random.Generator, count: int) -> np.ndarray:
        s = rng.integers(seeds, size=(count, seeds, 1))
        draws = [rng.integers(n, size=(count, 1, n)) for n in sizes]
        p = np.concatenate([start + draw for start, draw in zip(first, draws, strict=True)], axis=2)
        return score(cells[s, p])

    return _percentile_interval(
        estimate=float(score(cells[None])[0]),
        resample=resample,
        size=cells.size,
        num_resamples=num_resamples,
        confidence=confidence,
        seed=seed,
        levels=_crossed_levels(cells, sizes),
        dropped=dropped,
    )


def crossed_t_interval(
    data: Float[Array, "seeds problems"],
    *,
    strata: Shaped[Array, "problems"] | None = None,
    confidence: float = 0.95,
) -> Interval:
    """Mean over problems of the mean over seeds, +- t standard errors: the bootstrap's quick twin.

    The variance is v_seeds + v_problems, each that of the mean of the level's units, with
    Satterthwaite's degrees of freedom. As in `hierarchical_bootstrap` the cells' own noise is in
    both, so that the interval is rather too wide than too narrow. For the many points of a curve.

    Args:
        data: score by seed and problem. NaN is missing; a seed or problem without any entry is
            left out.
        strata: each problem's benchmark, as in `hierarchical_bootstrap`.
        confidence: nominal coverage.

    Returns:
        The interval; with one seed it is over problems only (`levels`).

    Raises:
        ValueError: not [seeds, problems], nothing but NaN, a bad confidence, or strata that do not
            fit the problems or hold no number.
    """
    _check_confidence(confidence)
    if np.ndim(data) != 2:
        raise ValueError(f"data must be [seeds, problems], got {np.shape(data)}")
    cells, sizes, dropped = _crossed(data, strata)
    levels = _crossed_levels(cells, sizes)
    estimate, half, error, degrees = float(_mean_over_problems(cells, sizes)), math.nan, math.nan, 0
    if levels:
        error = math.sqrt(sum(_standard_error(m) ** 2 for ms in levels.values() for m in ms))
        _, degrees = _small_sample_correction([m for means in levels.values() for m in means])
        half = _t_quantile(confidence, degrees) * error
    return Interval(
        estimate=estimate,
        low=estimate - half,
        high=estimate + half,
        standard_error=error,
        confidence=confidence,
        levels=tuple(levels),
        sizes=tuple(sum(map(len, means)) for means in levels.values()),
        dropped=dropped,
        degrees=degrees,
    )


def paired_difference(
    a: Float[Array, "seeds problems"],
    b: Float[Array, "seeds problems"],
    *,
    strata: Shaped[Array, "problems"] | None = None,
    num_resamples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Difference a - b of two methods, paired by seed and problem, with its bootstrap interval.

    Pairing takes the problems' difficulty, which is most of the spread, out of the comparison. The
    differences are resampled as in `hierarchical_bootstrap`.

    Args:
        a: score of the first method by seed and problem.
        b: score of the second method; row s and column p mean the same seed and problem as in a.
        strata: each problem's benchmark, as in `hierarchical_bootstrap`.
        num_resamples: resamples drawn.
        confidence: nominal coverage.
        seed: of the random generator.

    Returns:
        Interval of the difference; `dropped` counts pairs of which a side is NaN. With one seed
        only problems are resampled (`levels`), and nothing is said about other seeds.

    Raises:
        ValueError: the shapes differ or are not [seeds, problems], or no pair is complete.
    """
    first, second = _numpy(a).astype(np.float64), _numpy(b).astype(np.float64)
    if first.shape != second.shape or first.ndim != 2:
        raise ValueError(f"a and b must be [seeds, problems] alike: {first.shape}, {second.shape}")
    return hierarchical_bootstrap(
        first - second,
        strata=strata,
        num_resamples=num_resamples,
        confidence=confidence,
        seed=seed,
    )


def paired_t_interval(
    a: Float[Array, "problems"], b: Float[Array, "problems"], *, confidence: float = 0.95
) -> Interval:
    """Difference a - b of two runs on the same problems: mean +- t(problems - 1) standard errors.

    Args:
        a: score of the first run by problem.
        b: score of the second run, the same problems in the same order.
        confidence: nominal coverage.

    Returns:
        Interval over problems; `dropped` counts pairs of which a side is NaN. With one pair the
        standard error and both ends are NaN.

    Raises:
        ValueError: the shapes differ or are not [problems], no pair is complete, or a bad
            confidence.
    """
    first, second = _numpy(a).astype(np.float64), _numpy(b).astype(np.float64)
    if first.shape != second.shape or first.ndim != 1:
        raise ValueError(f"a and b must be [problems] alike: {first.shape}, {second.shape}")
    _check_confidence(confidence)
    difference = first - second
    present = difference[~np.isnan(difference)]
    if present.size == 0:
        raise ValueError("no problem has a number on both sides")
    estimate, error = float(present.mean()), _standard_error(present)
    half = _t_quantile(confidence, present.size - 1) * error if present.size > 1 else math.nan
    return Interval(
        estimate=estimate,
        low=estimate - half,
        high=estimate + half,
        standard_error=error,
        confidence=confidence,
        levels=("problems",),
        sizes=(present.size,),
        dropped=first.size - present.size,
        degrees=present.size - 1,
    )


def bootstrap_interval(
    x: Shaped[Array, "n"],
    *,
    statistic: Callable[[np.ndarray], np.ndarray] | None = None,
    num_resamples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Bootstrap interval of a statistic of independent entries, expanded percentiles.

    The percentiles are read further out than the nominal ones, as far as a t interval would go, as
    in `hierarchical_bootstrap`.

    Args:
        x: entries; NaN is missing.
        statistic: [resamples, n] -> [resamples]. Default: the mean.
        num_resamples: resamples drawn.
        confidence: nominal coverage.
        seed: of the random generator.

    Returns:
        The interval; with one entry its ends are NaN.

    Raises:
        ValueError: nothing but NaN, or a bad confidence or count.
    """
    entries = _numpy(x).astype(np.float64).ravel()
    present = entries[~np.isnan(entries)]
    if present.size == 0:
        raise ValueError("x holds no number")
    score = statistic if statistic is not None else lambda rows: rows.mean(axis=1)

    def resample(rng: np.random.Generator, count: int) -> np.ndarray:
        return score(present[rng.integers(present.size, size=(count, present.size))])

    return _percentile_interval(
        estimate=float(score(present[None])[0]),
        resample=resample,
        size=present.size,
        num_resamples=num_resamples,
        confidence=confidence,
        seed=seed,
        levels={"entries": [present]} if present.size > 1 else {},
        dropped=entries.size - present.size,
    )


def _percentile_interval(
    *,
    estimate: float,
    resample: Callable[[np.random.Generator, int], np.ndarray],
    size: int,
    num_resamples: int,
    confidence: float,
    seed: int,
    levels: dict[str, list[np.ndarray]],
    dropped: int,
) -> Interval:
    """Draw in chunks of bounded memory and read the interval off the resampled statistics.

    `levels` holds the means of the units of each level that is resampled, outermost first, in one
    array for each set of units that is resampled by itself.
    """
    _check_confidence(confidence)
    if num_resamples < 1:
        raise ValueError(f"num_resamples must be at least 1, got {num_resamples}")
    low = high = error = math.nan
    degrees = 0
    if levels:
        rng = np.random.default_rng(seed)
        chunk = max(1, _CHUNK_ELEMENTS // size)
        draws = np.concatenate(
            [
                resample(rng, min(chunk, num_resamples - start))
                for start in range(0, num_resamples, chunk)
            ]
        )
        # A draw that met only missing cells has no statistic.
        draws = draws[~np.isnan(draws)]
        stretch, degrees = _small_sample_correction([m for means in levels.values() for m in means])
        tail = NormalDist().cdf(-stretch * _t_quantile(confidence, degrees))
        low, high = (float(q) for q in np.quantile(draws, [tail, 1.0 - tail]))
        error = stretch * float(draws.std())
    return Interval(
        estimate=estimate,
        low=low,
        high=high,
        standard_error=error,
        confidence=confidence,
        levels=tuple(levels),
        sizes=tuple(sum(map(len, means)) for means in levels.values()),
        dropped=dropped,
        degrees=degrees,
    )


def _small_sample_correction(levels: list[np.ndarray]) -> tuple[float, int]:
    """What resampling a few units hides: the factor lost in the standard error, and t's degrees.

    Resampling n units spreads their mean by (n-1)/n of its variance, and a percentile takes the
    estimated spread for the true one where a t interval does not. With v the estimated variance of
    the mean due to each level, the factor is sqrt(sum v / sum v (n-1)/n) and the degrees of
    freedom are Satterthwaite's (sum v)^2 / sum v^2/(n-1), rounded down.
    """
    n = np.array([len(means) for means in levels], dtype=np.float64)
    v = np.array([_standard_error(means) ** 2 for means in levels])
    if v.sum() == 0:
        return 1.0, int(n.min()) - 1
    v = v / v.sum()
    degrees = 1.0 / np.sum(v**2 / (n - 1))
    return float(1.0 / np.sqrt(np.sum(v * (n - 1) / n))), max(1, int(degrees))


def _crossed(data: Array, strata: Array | None) -> tuple[np.ndarray, np.ndarray, int]:
    """Checked cells [seeds, problems], their problems sorted by stratum, and the strata's sizes.

    Returns:
        The cells, without seeds and problems that have no entry; how many problems each stratum
        has; how many cells of the data are NaN.
    """
    cells = _numpy(data).astype(np.float64)
    if cells.ndim not in (2, 3):
        raise ValueError(
            f"data must be [seeds, problems] or [seeds, problems, samples], got {cells.shape}"
        )
    if cells.ndim == 3:
        cells = _mean(cells, axis=2)
    present = ~np.isnan(cells)
    if not present.any():
        raise ValueError("data holds no number: every entry is NaN or an axis is empty")
    stratum = np.zeros(cells.shape[1]) if strata is None else _numpy(strata)
    if stratum.shape != cells.shape[1:]:
        raise ValueError(f"strata must be [problems], got {stratum.shape} for {cells.shape[1]}")
    kept = present.any(axis=0)
    names, index, sizes = np.unique(stratum[kept], return_inverse=True, return_counts=True)
    empty = np.setdiff1d(stratum, names)
    if len(empty):
        raise ValueError(f"stratum {empty[0]} holds no number; leave its problems out")
    order = np.argsort(index, kind="stable")
    cells = cells[present.any(axis=1)][:, kept][:, order]
    return cells, sizes, int((~present).sum())


def _crossed_levels(cells: np.ndarray, sizes: np.ndarray) -> dict[str, list[np.ndarray]]:
    """Means of the units of each level as they enter the mean over strata; single ones are none."""
    strata = np.split(cells, np.cumsum(sizes)[:-1], axis=1)
    seeds = _mean(np.stack([_mean(stratum, axis=1) for stratum in strata]), axis=0)
    problems = [_mean(stratum, axis=0) / len(strata) for stratum in strata]
    levels = {"seeds": [seeds], "problems": problems}
    several = {name: [m for m in means if len(m) > 1] for name, means in levels.items()}
    return {name: means for name, means in several.items() if means}


# -------------------------------------------------------------------------------------- tests


def p_value(interval: Interval) -> float:
    """Two-sided p-value of "the estimated quantity is 0", from the interval's own t distribution.

    Args:
        interval: of a difference, say.

    Returns:
        In [0, 1]: the chance that |t| is at least |estimate| / standard_error. NaN without a
        standard error, and where it is 0 though the estimate is not: no spread to judge it by.
    """
    if interval.standard_error == 0:
        return 1.0 if interval.estimate == 0 else math.nan
    if math.isnan(interval.standard_error) or interval.degrees < 1:
        return math.nan
    t = abs(interval.estimate) / interval.standard_error
    inside = _t_inside(math.atan(t / math.sqrt(interval.degrees)), interval.degrees)
    return max(1.0 - inside, 0.0)  # a huge t: the sum may round to above 1


def holm(p: Shaped[Array, "n"]) -> Float[np.ndarray, "n"]:
    """Holm's adjusted p-values: all at most .05 are claimed with a chance of error of at most .05.

    The i-th smallest of n is max over j <= i of min(1, (n - j) p_j), j counted from 0. It holds
    whatever the dependence between the tests (Holm 1979).

    Args:
        p: p-values of one family; NaN is a test that was not made, and counts for nothing.

    Returns:
        Adjusted p-values in the same order, each at least its p; NaN stays.

    Raises:
        ValueError: an entry outside [0, 1].
    """
    raw = _numpy(p).astype(np.float64).ravel()
    if np.any((raw < 0) | (raw > 1)):
        raise ValueError(f"p-values must lie in [0, 1], got {raw[(raw < 0) | (raw > 1)][0]}")
    made = np.flatnonzero(~np.isnan(raw))
    order = made[np.argsort(raw[made], kind="stable")]
    adjusted = np.full(raw.shape, np.nan)
    scaled = np.minimum((len(order) - np.arange(len(order))) * raw[order], 1.0)
    adjusted[order] = np.maximum.accumulate(scaled)
    return adjusted


# -------------------------------------------------------------------------- plain statistics


def correlation(
    x: Shaped[Array, "*shape"],
    y: Shaped[Array, "*shape"],
    *,
    valid: Bool[Array, "*shape"] | None = None,
) -> float:
    """Pearson correlation.

    Args:
        x: one side, any shape.
        y: the other side, the same shape.
        valid: True where a pair counts; the others may hold anything.

    Returns:
        In [-1, 1]; NaN with fewer than two pairs, a constant side, or an entry that is not finite.

    Raises:
        ValueError: the shapes differ.
    """
    a, b = _pair(x, y, valid, names=("x", "y"))
    if not (np.isfinite(a).all() and np.isfinite(b).all()) or _is_constant(a) or _is_constant(b):
        return math.nan
    a, b = _centred_unit(a), _centred_unit(b)
    return float(np.clip(np.sum(a * b) / np.sqrt(np.sum(a * a) * np.sum(b * b)), -1.0, 1.0))


def rank_correlation(
    x: Shaped[Array, "*shape"],
    y: Shaped[Array, "*shape"],
    *,
    valid: Bool[Array, "*shape"] | None = None,
) -> float:
    """Spearman correlation: Pearson's of the ranks, tied entries sharing their mean rank.

    Args:
        x: one side, any shape.
        y: the other side, the same shape.
        valid: True where a pair counts; the others may hold anything.

    Returns:
        In [-1, 1]; NaN with fewer than two pairs, a constant side, or a NaN entry.

    Raises:
        ValueError: the shapes differ.
    """
    a, b = _pair(x, y, valid, names=("x", "y"))
    if np.isnan(a).any() or np.isnan(b).any():
        return math.nan
    return correlation(_ranks(a), _ranks(b))


def effective_sample_size(
    weights: Float[Array, "*shape"], *, mask: Bool[Array, "*shape"] | None = None
) -> float:
    """Kish's effective sample size as a share of the sample, (sum w)^2 / (n sum w^2).

    Args:
        weights: importance ratios, at least 0.
        mask: True where a weight counts; the others may hold anything.

    Returns:
        In [1/n, 1], 1 for equal weights; NaN when nothing counts, all weights are 0 or one is not
        finite.

    Raises:
        ValueError: a weight is negative, or the shapes differ.
    """
    w = _select(weights, mask, name="weights")
    if np.any(w < 0):
        raise ValueError(f"weights must be at least 0, got {w[w < 0][0]}")
    if w.size == 0 or not np.isfinite(w).all() or w.max() == 0:
        return math.nan
    w = w / w.max()  # squares of large ratios would overflow
    return float(w.sum() ** 2 / (w.size * np.sum(w**2)))


def coefficient_of_variation(
    x: Shaped[Array, "*shape"], *, mask: Bool[Array, "*shape"] | None = None
) -> float:
    """Population standard deviation over mean, how much a weight varies for its size.

    Args:
        x: any shape.
        mask: True where an entry counts; the others may hold anything.

    Returns:
        0 when constant, with the sign of the mean otherwise; NaN when nothing counts, the mean is
        0 or an entry is not finite.

    Raises:
        ValueError: the shapes differ.
    """
    entries = _select(x, mask, name="x")
    if entries.size == 0 or not np.isfinite(entries).all() or entries.mean() == 0:
        return math.nan
    return 0.0 if _is_constant(entries) else float(entries.std() / entries.mean())


# --------------------------------------------------------------------------------- shared parts


def _numpy(x: object) -> np.ndarray:
    """The entries as a NumPy array; NumPy has no bfloat16, so narrow floats are widened."""
    if not isinstance(x, Tensor):
        return np.asarray(x)
    x = x.detach().cpu()
    return np.asarray(x.float() if x.is_floating_point() and x.itemsize < 4 else x)


def _select(x: Array, mask: Array | None, *, name: str) -> np.ndarray:
    """The entries that count, flat and in float64."""
    entries = _numpy(x)
    if mask is None:
        return entries.astype(np.float64).ravel()
    keep = _numpy(mask).astype(bool)
    if keep.shape != entries.shape:
        raise ValueError(f"{name} is {entries.shape} but its mask is {keep.shape}")
    return np.asarray(entries[keep], dtype=np.float64)


def _pair(
    x: Array, y: Array, mask: Array | None, *, names: tuple[str, str]
) -> tuple[np.ndarray, np.ndarray]:
    if np.shape(x) != np.shape(y):
        raise ValueError(f"{names[0]} is {np.shape(x)} but {names[1]} is {np.shape(y)}")
    return _select(x, mask, name=names[0]), _select(y, mask, name=names[1])


def _position_bins(mask: np.ndarray, bins: int) -> np.ndarray:
    """The part of its response that each response token stands in, by its rank among them."""
    lengths = mask.sum(axis=1)
    ranks = (np.cumsum(mask, axis=1) - 1)[mask]
    return np.asarray(ranks * bins // np.repeat(lengths, lengths))


def _is_constant(x: np.ndarray) -> bool:
    return x.size == 0 or bool(x.max() == x.min())


def _centred_unit(x: np.ndarray) -> np.ndarray:
    """Centred entries on a scale where squares neither over- nor underflow.

    Centred twice: the mean of entries that differ in the last bit is off by as much as they differ.
    """
    x = x / np.abs(x).max()
    x = x - x.mean()
    x = x - x.mean()
    return np.asarray(x / np.abs(x).max())


def _ranks(x: np.ndarray) -> np.ndarray:
    """Ranks from 0, ties sharing their mean."""
    _, index, size = np.unique(x, return_inverse=True, return_counts=True)
    first = np.cumsum(size) - size
    return np.asarray((first + (size - 1) / 2.0)[index])


def _mean(x: np.ndarray, *, axis: int) -> np.ndarray:
    """Mean of the entries that are not NaN; NaN where there is none."""
    present = ~np.isnan(x)
    count = present.sum(axis=axis)
    total = np.where(present, x, 0.0).sum(axis=axis)
    return np.asarray(np.where(count > 0, total / np.maximum(count, 1), np.nan))


def _mean_over_problems(x: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """[*resamples, seeds, problems] -> [*resamples]; every problem of a stratum weighs the same.

    `sizes` says how many problems each stratum has; theirs stand next to each other.
    """
    problems = _mean(x, axis=-2)
    strata = np.split(problems, np.cumsum(sizes)[:-1], axis=-1)
    return np.asarray(np.mean([_mean(stratum, axis=-1) for stratum in strata], axis=0))


def _standard_error(x: np.ndarray) -> float:
    if x.size < 2:
        return math.nan
    return 0.0 if _is_constant(x) else float(x.std(ddof=1) / math.sqrt(x.size))


def _check_confidence(confidence: float) -> None:
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence must lie in (0, 1), got {confidence}")


@lru_cache(maxsize=4096)
def _t_quantile(confidence: float, degrees: int) -> float:
    """The t for which a t variable with whole degrees of freedom stays in [-t, t] so often.

    By bisection; NumPy and torch have no such quantile.
    """
    low, high = 0.0, math.pi / 2.0
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if _t_inside(middle, degrees) < confidence else (low, middle)
    return math.sqrt(degrees) * math.tan((low + high) / 2.0)


def _t_inside(angle: float, degrees: int) -> float:
    """Chance that a t variable stays in [-t, t], with t = sqrt(degrees) tan(angle).

    A finite sum of powers of cos(angle) (Abramowitz and Stegun 26.7.3-4).
    """
    odd = degrees % 2
    steps = np.arange(1, (degrees - odd) // 2)
    coefficients = np.concatenate([[1.0], np.cumprod((2 * steps - 1 + odd) / (2 * steps + odd))])
    powers = odd + 2 * np.arange(len(coefficients))
    total = math.sin(angle) * float(np.sum(coefficients * math.cos(angle) ** powers))
    if not odd:
        return total
    return 2.0 / math.pi * (angle + (total if degrees > 1 else 0.0))
