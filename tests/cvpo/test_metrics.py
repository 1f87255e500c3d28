import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cvpo.metrics import (
    Interval,
    avg_at_k,
    bootstrap_interval,
    calibration,
    clustered_standard_error,
    coefficient_of_variation,
    correlation,
    crossed_t_interval,
    effective_sample_size,
    expected_calibration_error,
    explained_variance,
    explained_variance_by_position,
    group_outcomes,
    hierarchical_bootstrap,
    holm,
    p_value,
    paired_difference,
    paired_t_interval,
    pass_at_k,
    rank_correlation,
)

property_test = settings(max_examples=60, deadline=None)
numbers = st.floats(-100, 100, width=32)
seeds = st.integers(0, 2**32 - 1)
JUNK = (math.nan, math.inf, -math.inf, 1e30)


def with_junk(x: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The entries of x spread over a longer array, with junk between them, and their mask."""
    mask = np.zeros(2 * len(x) + 3, dtype=bool)
    mask[rng.choice(len(mask), len(x), replace=False)] = True
    spread = rng.choice(JUNK, len(mask))
    spread[mask] = x
    return spread, mask


# ------------------------------------------------------------------------- explained variance


def loop_explained_variance(values: Sequence[float], returns: Sequence[float]) -> float:
    def variance(x: list[float]) -> float:
        mean = math.fsum(x) / len(x)
        return math.fsum((entry - mean) ** 2 for entry in x) / len(x)

    errors = [g - v for v, g in zip(values, returns, strict=True)]
    return 1 - variance(errors) / variance(list(returns))


def test_explained_variance_golden() -> None:
    values, returns = torch.tensor([0.1, 0.9, 0.2, 0.8]), torch.tensor([0.0, 1.0, 0.0, 1.0])
    assert explained_variance(values, returns) == pytest.approx(0.9)
    # The other way round it is .8, so the arguments cannot be swapped unnoticed.
    assert explained_variance(returns, values) == pytest.approx(0.8)


@property_test
@given(st.lists(st.tuples(numbers, numbers), min_size=2, max_size=30), seeds)
def test_explained_variance_agrees_with_its_loop_whatever_stands_in_masked_slots(
    pairs: list[tuple[float, float]], seed: int
) -> None:
    values, returns = np.array(pairs).T
    if np.ptp(returns) < 1e-3:
        return
    rng = np.random.default_rng(seed)
    spread_values, mask = with_junk(values, rng)
    spread_returns = rng.choice(JUNK, len(mask))
    spread_returns[mask] = returns
    expected = loop_explained_variance(values.tolist(), returns.tolist())
    assert explained_variance(values, returns) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert explained_variance(spread_values, spread_returns, mask=mask) == explained_variance(
        values, returns
    )
    tensors = [torch.tensor(x) for x in (spread_values, spread_returns, mask)]
    assert explained_variance(tensors[0], tensors[1], mask=tensors[2]) == explained_variance(
        values, returns
    )


@property_test
@given(st.lists(st.tuples(numbers, numbers), min_size=2, max_size=30), st.floats(-5, 5))
def test_explained_variance_ignores_a_constant_bias_and_never_exceeds_one(
    pairs: list[tuple[float, float]], shift: float
) -> None:
    values, returns = np.array(pairs).T
    if np.ptp(returns) < 1e-3:
        return
    share = explained_variance(values, returns)
    assert share <= 1
    assert explained_variance(values + shift, returns) == pytest.approx(share, rel=1e-6, abs=1e-6)
    assert explained_variance(returns, returns) == 1
    assert explained_variance(np.full_like(returns, shift), returns) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_constant_returns_have_no_explained_variance_even_where_their_std_is_not_zero(
    dtype: torch.dtype,
) -> None:
    returns = torch.full((2, 4), 0.7, dtype=dtype)
    assert math.isnan(explained_variance(torch.rand(2, 4).to(dtype), returns))


def test_explained_variance_of_bfloat16_is_computed_in_double() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(1000, generator=generator).bfloat16().requires_grad_()
    returns = (torch.rand(1000, generator=generator) < 0.5).bfloat16() + 100
    expected = loop_explained_variance(values.tolist(), returns.tolist())
    assert explained_variance(values, returns) == pytest.approx(expected, rel=1e-12)


def test_explained_variance_of_nothing_or_of_a_diverged_critic_is_nan() -> None:
    assert math.isnan(explained_variance(torch.zeros(0), torch.zeros(0)))
    assert math.isnan(explained_variance([1.0, math.nan], [0.0, 1.0]))
    assert math.isnan(explained_variance([1.0, 0.0], [math.inf, 1.0]))


def test_shapes_that_disagree_are_refused_with_both_shapes() -> None:
    with pytest.raises(ValueError, match=r"values is .*3.* but returns is .*2"):
        explained_variance(torch.zeros(3), torch.zeros(2))
    with pytest.raises(ValueError, match="mask"):
        explained_variance(torch.zeros(3), torch.zeros(3), mask=torch.ones(2))
    with pytest.raises(ValueError, match="mask"):
        effective_sample_size(torch.ones(3), mask=torch.ones(1, 3))


@property_test
@given(seeds, st.integers(0, 6), st.integers(1, 9), st.integers(1, 5))
def test_explained_variance_by_position_agrees_with_its_loop(
    seed: int, B: int, T: int, bins: int
) -> None:
    rng = np.random.default_rng(seed)
    mask = rng.random((B, T)) < 0.7
    values, returns = rng.normal(size=(B, T)), rng.integers(-1, 2, (B, T)).astype(float)
    parts: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for row in range(B):
        slots = np.flatnonzero(mask[row])
        for rank, slot in enumerate(slots):
            part = rank * bins // len(slots)
            parts[part].append((values[row, slot], returns[row, slot]))
    values[~mask], returns[~mask] = math.nan, math.inf
    found = explained_variance_by_position(
        torch.tensor(values), torch.tensor(returns), torch.tensor(mask), position_bins=bins
    )
    assert found.shape == (bins,)
    for part, share in enumerate(found):
        pairs = parts[part]
        if len({g for _, g in pairs}) < 2:
            assert math.isnan(share)
        else:
            expected = loop_explained_variance([v for v, _ in pairs], [g for _, g in pairs])
            assert share == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_explained_variance_by_position_tells_the_end_from_the_beginning() -> None:
    returns = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]]).expand(4, 10)
    values = returns * torch.linspace(0, 1, 10)  # V = pG explains 1 - (1 - p)^2
    found = explained_variance_by_position(values, returns, torch.ones(4, 10))
    assert found == pytest.approx([1 - (1 - p) ** 2 for p in np.linspace(0, 1, 10)], abs=1e-6)
    assert np.isnan(explained_variance_by_position(values, returns, torch.zeros(4, 10))).all()


def test_explained_variance_by_position_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="mask"):
        explained_variance_by_position(torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 2))
    with pytest.raises(ValueError, match="position_bins"):
        explained_variance_by_position(
            torch.ones(1, 3), torch.ones(1, 3), torch.ones(1, 3), position_bins=0
        )


# ------------------------------------------------------------------------------- calibration


def loop_calibration(
    values: np.ndarray,
    returns: np.ndarray,
    mask: np.ndarray,
    correct: np.ndarray,
    position_bins: int,
    value_bins: int,
) -> dict[tuple[int, int, bool], list[float]]:
    edges = np.linspace(-1, 1, value_bins + 1)
    cells: dict[tuple[int, int, bool], list[float]] = defaultdict(lambda: [0, 0.0, 0.0, 0.0])
    for row in range(len(values)):
        slots = [t for t in range(values.shape[1]) if mask[row, t]]
        for rank, t in enumerate(slots):
            position_bin = rank * position_bins // len(slots)
            value_bin = 0
            while value_bin < value_bins - 1 and values[row, t] >= edges[value_bin + 1]:
                value_bin += 1
            cell = cells[position_bin, value_bin, bool(correct[row] >= 0.5)]
            cell[0] += 1
            cell[1] += values[row, t]
            cell[2] += returns[row, t]
            cell[3] += returns[row, t] ** 2
    return cells


@property_test
@given(
    seeds,
    st.integers(0, 6),
    st.integers(0, 13),
    st.integers(1, 11),
    st.integers(1, 7),
)
def test_calibration_agrees_with_its_loop(
    seed: int, B: int, T: int, position_bins: int, value_bins: int
) -> None:
    rng = np.random.default_rng(seed)
    mask = rng.random((B, T)) < 0.6
    values = rng.normal(0, 0.8, (B, T)).round(1)  # a tenth lands on edges and beyond the ends
    returns = rng.normal(size=(B, T))
    values[~mask], returns[~mask] = math.nan, math.inf
    correct = rng.random(B).round(1)
    table = calibration(
        torch.tensor(values),
        torch.tensor(returns),
        torch.tensor(mask),
        torch.tensor(correct),
        position_bins=position_bins,
        value_bins=value_bins,
    )
    expected = loop_calibration(values, returns, mask, correct, position_bins, value_bins)
    keys = list(
        zip(
            table["position_bin"].tolist(),
            table["value_bin"].tolist(),
            table["correct"].tolist(),
            strict=True,
        )
    )
    assert keys == sorted(expected)
    for row, key in enumerate(keys):
        found = [table[name][row] for name in ("n", "value_sum", "return_sum", "return_sq_sum")]
        assert found == pytest.approx(expected[key], rel=1e-12, abs=1e-12)
    assert table["n"].sum() == mask.sum()


def test_calibration_positions_are_deciles_of_each_response_on_its_own() -> None:
    mask = torch.zeros(2, 20, dtype=torch.bool)
    mask[0, :10] = True
    mask[1, ::4] = True  # five tokens with gaps between them
    table = calibration(torch.zeros(2, 20), torch.zeros(2, 20), mask, torch.tensor([1, 0]))
    long, short = table["correct"], ~table["correct"]
    assert table["position_bin"][long].tolist() == list(range(10))
    assert table["position_bin"][short].tolist() == [0, 2, 4, 6, 8]


def test_calibration_end_bins_take_what_lies_beyond_them() -> None:
    values = torch.tensor([[-7.0, -1.0, 0.0, 1.0, 7.0]])
    table = calibration(
        values, values, torch.ones(1, 5), torch.ones(1), position_bins=1, value_bins=4
    )
    assert table["value_bin"].tolist() == [0, 2, 3]
    assert table["n"].tolist() == [2, 1, 2]


def test_calibration_names_the_trajectory_whose_critic_diverged() -> None:
    values = torch.zeros(3, 2)
    values[2, 1] = math.nan
    with pytest.raises(ValueError, match="trajectory 2"):
        calibration(values, torch.zeros(3, 2), torch.ones(3, 2), torch.ones(3))
    with pytest.raises(ValueError, match="correct"):
        calibration(values, torch.zeros(3, 2), torch.ones(3, 2), torch.ones(2))


def test_calibration_error_of_a_biased_critic_is_its_bias_and_of_an_honest_one_small() -> None:
    rng = np.random.default_rng(0)
    p = rng.choice([0.25, 0.65], size=(20_000, 1))
    correct = (rng.random((20_000, 1)) < p).astype(float)
    values, returns = np.repeat(2 * p - 1, 3, axis=1), np.repeat(2 * correct - 1, 3, axis=1)
    mask = np.ones_like(values)
    good = expected_calibration_error(calibration(values, returns, mask, correct[:, 0]))
    biased = expected_calibration_error(calibration(values + 0.3, returns, mask, correct[:, 0]))
    assert good < 0.02
    assert biased == pytest.approx(0.3, abs=0.02)


def test_calibration_error_merges_rows_of_one_value_bin() -> None:
    table = {
        "value_bin": np.array([3, 3, 5]),
        "n": np.array([2, 2, 4]),
        "value_sum": np.array([1.0, 1.0, 2.0]),
        "return_sum": np.array([2.0, -2.0, 4.0]),
    }
    # Bin 3: |2 - 0| / 4 on half of the tokens; bin 5: |2 - 4| / 4 on the other half.
    assert expected_calibration_error(table) == pytest.approx(0.5)
    assert math.isnan(expected_calibration_error({name: x[:0] for name, x in table.items()}))


# ---------------------------------------------------------------------------------- pass@k


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [(16, 1, 4, 0.25), (16, 1, 8, 0.5), (16, 4, 4, 0.728022), (16, 4, 8, 0.961538)],
)
def test_pass_at_k_golden(n: int, c: int, k: int, expected: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=5e-7)


def test_pass_at_k_is_the_share_of_all_subsets_that_hold_a_correct_sample() -> None:
    for n in range(1, 8):
        for c in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
                share = sum(any(subset) for subset in subsets) / len(subsets)
                assert pass_at_k(n, c, k) == pytest.approx(share, abs=1e-14)


@property_test
@given(st.data())
def test_pass_at_k_agrees_with_exact_binomials_and_never_falls_with_k_or_c(
    data: st.DataObject,
) -> None:
    n = data.draw(st.integers(2, 300))
    c = data.draw(st.integers(0, n - 1))
    k = data.draw(st.integers(1, n - 1))
    exact = 1 - math.comb(n - c, k) / math.comb(n, k)
    assert pass_at_k(n, c, k) == pytest.approx(exact, abs=1e-12)
    assert pass_at_k(n, c, k) <= pass_at_k(n, c, k + 1) + 1e-12
    assert pass_at_k(n, c, k) <= pass_at_k(n, c + 1, k) + 1e-12
    assert pass_at_k(n, c, 1) == pytest.approx(c / n, abs=1e-12)


def test_pass_at_k_broadcasts_and_is_exact_at_its_ends() -> None:
    n, c, k = torch.tensor([16, 16, 8]), torch.tensor([0, 16, 5]), 4
    result = pass_at_k(n, c, k)
    assert isinstance(result, np.ndarray)
    assert result.tolist() == [0.0, 1.0, 1.0]
    table = pass_at_k(16, np.arange(17)[:, None], np.array([1, 4, 16]))
    assert np.shape(table) == (17, 3)
    assert np.all(np.diff(table, axis=0) >= 0)
    assert isinstance(pass_at_k(16, 1, 4), float)
    assert pass_at_k(100_000, 1, 10) == pytest.approx(1e-4, rel=1e-9)
    assert np.shape(pass_at_k(np.zeros(0), np.zeros(0), 4)) == (0,)


@pytest.mark.parametrize(
    ("n", "c", "k", "named"),
    [(3, 1, 4, "k"), (4, 5, 1, "num_correct"), (4, -1, 1, "num_correct"), (4, 1, 0, "k"),
     (4, 1.5, 1, "num_correct")],
)  # fmt: skip
def test_pass_at_k_refuses_impossible_counts(n: int, c: int, k: int, named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named} must"):
        pass_at_k(n, c, k)


# ---------------------------------------------------------------------- avg@k and its error


def loop_avg_at_k(correct: np.ndarray) -> tuple[float, float]:
    means = []
    for row in correct:
        scores = [x for x in row if not math.isnan(x)]
        means.append(sum(scores) / len(scores))
    mean = sum(means) / len(means)
    if len(means) == 1:
        return mean, math.nan
    variance = sum((m - mean) ** 2 for m in means) / (len(means) - 1)
    return mean, math.sqrt(variance / len(means))


@property_test
@given(seeds, st.integers(1, 12), st.integers(1, 9))
def test_avg_at_k_agrees_with_its_loop_on_ragged_samples(seed: int, problems: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    correct = (rng.random((problems, k)) < 0.5).astype(float)
    correct[:, 1:][rng.random((problems, k - 1)) < 0.4] = math.nan
    found, expected = avg_at_k(torch.tensor(correct)), loop_avg_at_k(correct)
    assert found == pytest.approx(expected, abs=1e-12, nan_ok=True)


@property_test
@given(seeds, st.integers(2, 12), st.integers(1, 9))
def test_clustered_error_is_that_of_the_problem_means_when_sizes_are_equal(
    seed: int, problems: int, k: int
) -> None:
    rng = np.random.default_rng(seed)
    correct = (rng.random((problems, k)) < rng.random((problems, 1))).astype(float)
    cluster = np.repeat(rng.permutation(problems), k)
    order = rng.permutation(problems * k)
    error = clustered_standard_error(correct.ravel()[order], cluster[order])
    assert error == pytest.approx(avg_at_k(correct)[1], abs=1e-12)


def test_clustered_error_of_single_entries_is_the_ordinary_one_and_copies_do_not_shrink_it() -> (
    None
):
    x = np.random.default_rng(0).normal(size=40)
    ordinary = x.std(ddof=1) / math.sqrt(40)
    assert clustered_standard_error(x, np.arange(40)) == pytest.approx(ordinary)
    copies = clustered_standard_error(torch.tensor(x).repeat(8), torch.arange(40).repeat(8))
    assert copies == pytest.approx(ordinary)


def test_clustered_error_weighs_entries_not_clusters() -> None:
    # Clusters {0, 0, 3} and {1}: mean 1, deviations sum to 0 in both.
    assert clustered_standard_error([0.0, 0.0, 3.0, 1.0], [5, 5, 5, -2]) == pytest.approx(0)
    # Clusters {1, 1} and {4}: mean 2, cluster sums -2 and +2, sqrt(2/1 * 8) / 3.
    assert clustered_standard_error([1.0, 1.0, 4.0], [0, 0, 1]) == pytest.approx(4 / 3)
    assert math.isnan(clustered_standard_error([1.0, 2.0], [3, 3]))
    with pytest.raises(ValueError, match="2 entries"):
        clustered_standard_error([1.0, 2.0], [3])


def test_avg_at_k_refuses_rewards_empty_problems_and_flat_input() -> None:
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        avg_at_k(torch.tensor([[1.0, -1.0]]))
    with pytest.raises(ValueError, match="problem 1 has no sample"):
        avg_at_k(torch.tensor([[1.0, 0.0], [math.nan, math.nan]]))
    for shape in ((4,), (0, 4)):
        with pytest.raises(ValueError, match="problems, k"):
            avg_at_k(torch.zeros(shape))


def test_avg_at_k_reads_booleans_and_narrow_floats() -> None:
    correct = torch.tensor([[1, 0, 1], [0, 0, 1]])
    for dtype in (torch.bool, torch.int64, torch.bfloat16, torch.float16):
        assert avg_at_k(correct.to(dtype)) == pytest.approx((0.5, 1 / 6))


def test_group_outcomes_counts_groups_not_trajectories() -> None:
    correct = torch.tensor([1, 1, 1, 0, 0, 1, 0, 1])
    group = torch.tensor([7, 7, 7, -3, -3, 0, 0, 9])
    assert group_outcomes(correct, group) == (0.5, 0.25)
    assert group_outcomes([0.5, 0.5], [1, 1]) == (0.0, 0.0)
    assert all(math.isnan(x) for x in group_outcomes(torch.zeros(0), torch.zeros(0)))


@property_test
@given(seeds, st.integers(1, 30))
def test_group_outcomes_agrees_with_its_loop(seed: int, B: int) -> None:
    rng = np.random.default_rng(seed)
    correct, group = rng.integers(0, 2, B), rng.integers(0, 8, B)
    members = defaultdict(list)
    for R, k in zip(correct, group, strict=True):
        members[k].append(R)
    expected = (
        sum(all(m) for m in members.values()) / len(members),
        sum(not any(m) for m in members.values()) / len(members),
    )
    assert group_outcomes(torch.tensor(correct), torch.tensor(group)) == pytest.approx(expected)


# -------------------------------------------------------------------------------- intervals


def crossed(
    rng: np.random.Generator, shape: tuple[int, int], seed_sd: float, problem_sd: float, sd: float
) -> np.ndarray:
    """Scores with mean 0, an effect of the seed, an effect of the problem and noise."""
    return (
        rng.normal(0, seed_sd, (shape[0], 1))
        + rng.normal(0, problem_sd, (1, shape[1]))
        + rng.normal(0, sd, shape)
    )


def test_bootstrap_is_a_function_of_its_seed() -> None:
    data = crossed(np.random.default_rng(0), (5, 20), 0.1, 0.3, 0.1)
    first = hierarchical_bootstrap(data, num_resamples=500, seed=3)
    assert hierarchical_bootstrap(torch.tensor(data), num_resamples=500, seed=3) == first
    assert hierarchical_bootstrap(data, num_resamples=500, seed=4).low != first.low


def test_bootstrap_draws_the_same_problems_for_every_seed() -> None:
    # Only problems differ: a draw per seed would shrink the error by sqrt(seeds).
    difficulty = np.random.default_rng(0).normal(size=50)
    interval = hierarchical_bootstrap(np.tile(difficulty, (8, 1)), num_resamples=4000)
    assert interval.standard_error == pytest.approx(
        difficulty.std(ddof=1) / math.sqrt(50), rel=0.05
    )
    assert interval.levels == ("seeds", "problems")
    assert interval.sizes == (8, 50)


def test_bootstrap_of_seeds_that_differ_and_problems_that_do_not_is_an_interval_over_seeds() -> (
    None
):
    scores = np.random.default_rng(0).normal(size=10)
    interval = hierarchical_bootstrap(np.repeat(scores[:, None], 40, axis=1), num_resamples=4000)
    assert interval.standard_error == pytest.approx(scores.std(ddof=1) / math.sqrt(10), rel=0.05)


def test_bootstrap_of_one_seed_is_over_problems_and_says_so() -> None:
    data = np.random.default_rng(0).random((1, 60))
    interval = hierarchical_bootstrap(data)
    assert interval.levels == ("problems",)
    assert interval.sizes == (60,)
    assert interval.standard_error == pytest.approx(avg_at_k(data.T)[1], rel=0.05)
    assert hierarchical_bootstrap(data.T, num_resamples=50).levels == ("seeds",)
    alone = hierarchical_bootstrap(data[:, :1], num_resamples=50)
    assert alone.levels == ()
    assert alone.estimate == data[0, 0]
    assert math.isnan(alone.low)
    assert math.isnan(alone.high)


def test_bootstrap_averages_samples_inside_their_cell_and_each_problem_weighs_the_same() -> None:
    data = np.array([[[1.0, math.nan], [0.0, 1.0], [math.nan, math.nan]]])
    interval = hierarchical_bootstrap(data, num_resamples=50)
    assert interval.estimate == pytest.approx(0.75)
    assert interval.dropped == 1
    assert interval.sizes == (2,)
    ragged = np.array([[1.0, 0.0], [math.nan, 0.0]])
    assert hierarchical_bootstrap(ragged, num_resamples=50).estimate == pytest.approx(0.5)


def test_bootstrap_in_small_chunks_uses_every_resample(monkeypatch: pytest.MonkeyPatch) -> None:
    data = crossed(np.random.default_rng(0), (4, 10), 0.1, 0.3, 0.1)
    sizes = []

    def mean(resamples: np.ndarray) -> np.ndarray:
        sizes.append(len(resamples))
        return resamples.mean(axis=(1, 2))

    monkeypatch.setattr("cvpo.metrics._CHUNK_ELEMENTS", 40 * 30)
    interval = hierarchical_bootstrap(data, statistic=mean, num_resamples=100)
    assert sizes == [1, 30, 30, 30, 10]
    assert interval.low < interval.estimate < interval.high


def test_bootstrap_takes_a_statistic_of_its_own() -> None:
    data = np.random.default_rng(0).random((5, 40))

    def median(resamples: np.ndarray) -> np.ndarray:
        return np.median(resamples, axis=(1, 2))

    interval = hierarchical_bootstrap(data, statistic=median, num_resamples=500)
    assert interval.estimate == np.median(data)
    assert interval.low <= interval.estimate <= interval.high


@property_test
@given(seeds, st.floats(-3, 3), st.floats(0.1, 4))
def test_bootstrap_moves_and_stretches_with_the_data(seed: int, shift: float, scale: float) -> None:
    data = crossed(np.random.default_rng(seed), (3, 6), 0.2, 0.5, 0.1)
    plain = hierarchical_bootstrap(data, num_resamples=200)
    moved = hierarchical_bootstrap(shift + scale * data, num_resamples=200)
    for name in ("estimate", "low", "high"):
        expected = shift + scale * getattr(plain, name)
        assert getattr(moved, name) == pytest.approx(expected, abs=1e-6)
    assert moved.standard_error == pytest.approx(scale * plain.standard_error, rel=1e-6)
    assert data.min() <= plain.low <= plain.estimate <= plain.high <= data.max()


@property_test
@given(seeds)
def test_a_wider_confidence_gives_an_interval_around_the_narrower(seed: int) -> None:
    data = crossed(np.random.default_rng(seed), (5, 8), 0.2, 0.5, 0.1)
    narrow = hierarchical_bootstrap(data, num_resamples=300, confidence=0.8)
    wide = hierarchical_bootstrap(data, num_resamples=300, confidence=0.99)
    assert wide.low <= narrow.low <= narrow.high <= wide.high


def test_bootstrap_refuses_what_it_cannot_resample() -> None:
    with pytest.raises(ValueError, match="seeds, problems"):
        hierarchical_bootstrap(np.zeros(4))
    for empty in (np.full((2, 3), math.nan), np.zeros((0, 3))):
        with pytest.raises(ValueError, match="no number"):
            hierarchical_bootstrap(empty)
    with pytest.raises(ValueError, match="confidence"):
        hierarchical_bootstrap(np.zeros((2, 3)), confidence=95)
    with pytest.raises(ValueError, match="num_resamples"):
        hierarchical_bootstrap(np.zeros((2, 3)), num_resamples=0)


def test_pairing_takes_the_difficulty_of_problems_out() -> None:
    rng = np.random.default_rng(0)
    a = crossed(rng, (5, 40), 0.0, 1.0, 0.05)
    b = a - 0.1 + rng.normal(0, 0.05, a.shape)
    paired = paired_difference(a, b, num_resamples=2000)
    assert paired.estimate == pytest.approx(float((a - b).mean()))
    assert 0 < paired.low < 0.1 < paired.high
    assert paired.standard_error < 0.1 * hierarchical_bootstrap(a, num_resamples=500).standard_error
    swapped = paired_difference(b, a, num_resamples=2000)
    assert swapped.estimate == -paired.estimate
    assert (swapped.low, swapped.high) == pytest.approx((-paired.high, -paired.low))


def test_pairs_with_a_missing_side_are_dropped_and_counted() -> None:
    a, b = np.ones((2, 4)), np.zeros((2, 4))
    a[0, 1], b[1, 1], b[0, 3] = math.nan, math.nan, math.nan
    interval = paired_difference(a, b, num_resamples=50)
    assert interval.dropped == 3
    assert interval.sizes == (2, 3)
    assert (interval.estimate, interval.low, interval.high) == (1.0, 1.0, 1.0)
    simple = paired_t_interval(a[0], b[0])
    assert (simple.dropped, simple.sizes, simple.estimate) == (2, (2,), 1.0)
    for a_shape, b_shape in (((2, 4), (2, 3)), ((4,), (4,))):
        with pytest.raises(ValueError, match="alike"):
            paired_difference(np.ones(a_shape), np.ones(b_shape))


@pytest.mark.parametrize(
    ("problems", "t"),
    [(2, 12.706205), (3, 4.302653), (5, 2.776445), (11, 2.228139), (30, 2.045230), (101, 1.983972)],
)
def test_paired_t_interval_uses_the_t_table(problems: int, t: float) -> None:
    a = np.random.default_rng(problems).normal(size=problems)
    interval = paired_t_interval(a, np.zeros(problems))
    error = a.std(ddof=1) / math.sqrt(problems)
    assert interval.standard_error == pytest.approx(error)
    assert interval.high - interval.estimate == pytest.approx(t * error, rel=1e-6)
    assert interval.estimate - interval.low == pytest.approx(t * error, rel=1e-6)


def test_one_pair_has_a_difference_and_no_interval() -> None:
    interval = paired_t_interval([0.75], [0.5])
    assert interval.estimate == 0.25
    assert all(math.isnan(x) for x in (interval.low, interval.high, interval.standard_error))
    with pytest.raises(ValueError, match="both sides"):
        paired_t_interval([math.nan], [0.5])


def test_simple_bootstrap_has_the_ordinary_standard_error_and_leaves_missing_entries_out() -> None:
    x = np.random.default_rng(0).normal(size=30)
    interval = bootstrap_interval(torch.tensor([*x.tolist(), math.nan]))
    assert interval.estimate == pytest.approx(x.mean())
    assert interval.standard_error == pytest.approx(x.std(ddof=1) / math.sqrt(30), rel=0.03)
    assert (interval.dropped, interval.levels, interval.sizes) == (1, ("entries",), (30,))
    spread = bootstrap_interval(x, statistic=lambda rows: rows.std(axis=1), num_resamples=500)
    assert spread.low < spread.estimate < spread.high
    assert math.isnan(bootstrap_interval([2.0]).low)
    with pytest.raises(ValueError, match="no number"):
        bootstrap_interval([math.nan])


def test_percentiles_are_read_as_far_out_as_a_t_interval_of_so_few_entries_would_go() -> None:
    # All 256 resamples of four entries; for confidence .8, t(3) = 1.637744, times sqrt(4 / 3).
    x = [0.0, 1.0, 10.0, 100.0]
    means = np.sort([np.mean(draw) for draw in itertools.product(x, repeat=4)])
    tail = NormalDist().cdf(-1.637744 * math.sqrt(4 / 3))
    interval = bootstrap_interval(x, confidence=0.8, num_resamples=50_000)
    assert interval.low == means[int(tail * 256)]
    assert interval.high == means[int((1 - tail) * 256)]
    assert interval.low < np.quantile(means, NormalDist().cdf(-1.637744))


# ----------------------------------------------------------- benchmarks and several differences


def stratified_mean_loop(data: np.ndarray, strata: Sequence[int]) -> float:
    """Every benchmark weighs the same, and so does every problem of one."""
    benchmarks = []
    for name in set(strata):
        columns = [data[:, p] for p, own in enumerate(strata) if own == name]
        benchmarks.append(sum(float(np.mean(column)) for column in columns) / len(columns))
    return sum(benchmarks) / len(benchmarks)


@property_test
@given(seeds, st.integers(1, 4), st.lists(st.integers(0, 2), min_size=2, max_size=9))
def test_benchmarks_weigh_the_same_whatever_their_size_and_order(
    seed: int, runs: int, strata: list[int]
) -> None:
    data = np.random.default_rng(seed).random((runs, len(strata)))
    expected = pytest.approx(stratified_mean_loop(data, strata))
    assert hierarchical_bootstrap(data, strata=strata, num_resamples=5).estimate == expected
    quick = crossed_t_interval(data, strata=strata)
    assert quick.estimate == expected
    turned = crossed_t_interval(data[:, ::-1], strata=strata[::-1])
    assert turned.standard_error == pytest.approx(quick.standard_error, nan_ok=True)
    names = [f"b{name}" for name in strata]  # labels of any kind
    assert repr(crossed_t_interval(data, strata=names)) == repr(quick)  # NaN is not NaN


def test_problems_are_drawn_within_their_benchmark() -> None:
    # Benchmarks of one difficulty each: nothing varies, however unlike they are.
    data = np.repeat([0.1, 0.9], [30, 500])[None]
    interval = hierarchical_bootstrap(data, strata=data[0], num_resamples=200)
    assert (interval.estimate, interval.low, interval.high) == pytest.approx((0.5, 0.5, 0.5))
    assert (interval.levels, interval.sizes) == (("problems",), (530,))
    pooled = hierarchical_bootstrap(data, num_resamples=200)
    assert pooled.standard_error > 0.005


def test_one_stratum_of_all_problems_is_no_stratum() -> None:
    data = np.random.default_rng(0).random((3, 8))
    plain = hierarchical_bootstrap(data, num_resamples=100)
    assert hierarchical_bootstrap(data, strata=["b"] * 8, num_resamples=100) == plain
    first, second = data, data**2
    paired = paired_difference(first, second, strata=["b"] * 8, num_resamples=100)
    assert paired == paired_difference(first, second, num_resamples=100)


def test_crossed_t_interval_is_its_formula() -> None:
    data = np.random.default_rng(3).random((5, 12))
    strata = np.repeat([0, 1], [4, 8])
    by_seed = [(row[:4].mean() + row[4:].mean()) / 2 for row in data]
    parts = [  # variance of the mean, degrees of freedom; a benchmark weighs 1/2
        (np.var(by_seed, ddof=1) / 5, 4),
        (np.var(data[:, :4].mean(axis=0), ddof=1) / 4 / 4, 3),
        (np.var(data[:, 4:].mean(axis=0), ddof=1) / 8 / 4, 7),
    ]
    total = sum(v for v, _ in parts)
    degrees = int(total**2 / sum(v**2 / df for v, df in parts))
    interval = crossed_t_interval(data, strata=strata)
    assert interval.standard_error == pytest.approx(math.sqrt(total))
    assert (interval.degrees, interval.levels, interval.sizes) == (
        degrees,
        ("seeds", "problems"),
        (5, 12),
    )
    half = (interval.high - interval.low) / 2
    assert p_value(replace(interval, estimate=half)) == pytest.approx(0.05)


def test_crossed_t_interval_agrees_with_the_bootstrap_it_stands_for() -> None:
    rng = np.random.default_rng(0)
    data = rng.normal(0, 0.05, (6, 1)) + rng.random(60) + rng.normal(0, 0.02, (6, 60))
    quick, drawn = crossed_t_interval(data), hierarchical_bootstrap(data, num_resamples=4000)
    assert quick.estimate == pytest.approx(drawn.estimate)
    assert quick.standard_error == pytest.approx(drawn.standard_error, rel=0.05)
    assert quick.degrees == drawn.degrees
    assert quick.low == pytest.approx(drawn.low, abs=0.2 * drawn.standard_error)


def test_crossed_t_interval_of_one_seed_is_over_problems_and_of_one_cell_is_none() -> None:
    data = np.array([[0.2, 0.4, 0.9]])
    interval, plain = crossed_t_interval(data), paired_t_interval(data[0], np.zeros(3))
    assert interval.levels == ("problems",)
    assert (interval.low, interval.high) == pytest.approx((plain.low, plain.high))
    alone = crossed_t_interval(data[:, :1])
    assert (alone.estimate, alone.levels, alone.degrees) == (0.2, (), 0)
    assert math.isnan(alone.low)
    holed = np.array([[0.2, math.nan, 0.9], [math.nan, math.nan, 0.9]])
    assert crossed_t_interval(holed).estimate == pytest.approx(0.55)
    assert crossed_t_interval(holed).dropped == 3


def test_strata_that_do_not_fit_are_refused() -> None:
    data = np.array([[0.5, 0.5, math.nan]])
    with pytest.raises(ValueError, match=r"strata must be \[problems\], got \(2,\) for 3"):
        hierarchical_bootstrap(data, strata=[0, 1])
    with pytest.raises(ValueError, match="stratum 7 holds no number"):
        crossed_t_interval(data, strata=[1, 1, 7])
    with pytest.raises(ValueError, match="give one"):
        hierarchical_bootstrap(data, strata=[0, 0, 0], statistic=lambda x: x.mean(axis=(1, 2)))
    with pytest.raises(ValueError, match=r"\[seeds, problems\], got \(2, 2, 2\)"):
        crossed_t_interval(np.zeros((2, 2, 2)))


@pytest.mark.parametrize(
    ("t", "degrees", "p"),
    # Quantiles of Student's table.
    [(12.706, 1, 0.05), (4.303, 2, 0.05), (2.571, 5, 0.05), (3.169, 10, 0.01), (2.042, 30, 0.05)],
)
def test_p_value_is_that_of_the_t_table(t: float, degrees: int, p: float) -> None:
    interval = Interval(-t * 0.1, 0, 0, 0.1, 0.95, ("seeds",), (degrees + 1,), degrees=degrees)
    assert p_value(interval) == pytest.approx(p, rel=0.002)


@pytest.mark.parametrize("degrees", [1, 2, 3, 7, 30, 99, 500])
def test_p_value_of_a_huge_t_is_no_negative_number(degrees: int) -> None:
    for t in np.geomspace(10, 1e8, 40):
        interval = Interval(t, 0, 0, 1.0, 0.95, ("seeds",), (degrees + 1,), degrees=degrees)
        assert 0 <= p_value(interval) < 0.1


def test_p_value_needs_a_spread() -> None:
    assert p_value(paired_t_interval(np.ones(3), np.ones(3))) == 1.0
    assert math.isnan(p_value(paired_t_interval(np.ones(3), np.zeros(3))))
    assert math.isnan(p_value(paired_t_interval(np.ones(1), np.zeros(1))))


@property_test
@given(seeds)
def test_p_value_is_below_five_percent_where_the_interval_leaves_zero_out(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.random(6) + rng.normal(0, 0.3), rng.random(6)
    interval = paired_t_interval(a, b)
    assert (p_value(interval) < 0.05) == (interval.low > 0 or interval.high < 0)


def holm_loop(p: Sequence[float]) -> list[float]:
    """Step down: the smallest is multiplied by n, the next by n - 1, and none may go below."""
    adjusted = [math.nan] * len(p)
    left = sorted((value, at) for at, value in enumerate(p) if not math.isnan(value))
    least = 0.0
    while left:
        value, at = left[0]
        least = max(least, min(1.0, value * len(left)))
        adjusted[at] = least
        left = left[1:]
    return adjusted


def test_holm_golden() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.04]) == pytest.approx([0.04])
    assert holm([]).size == 0


@property_test
@given(st.lists(st.one_of(st.floats(0, 1), st.just(math.nan)), max_size=8))
def test_holm_agrees_with_its_loop_and_never_lowers_a_p_value(p: list[float]) -> None:
    adjusted = holm(p)
    assert adjusted == pytest.approx(holm_loop(p), nan_ok=True)
    assert all(new >= old for old, new in zip(p, adjusted, strict=True) if not math.isnan(old))


def test_holm_refuses_what_is_no_p_value() -> None:
    with pytest.raises(ValueError, match=r"\[0, 1\], got 1.5"):
        holm([0.2, 1.5])


def test_crossed_t_interval_covers_the_truth_as_often_as_it_says() -> None:
    def make(rng: np.random.Generator) -> Interval:
        hard = np.concatenate([rng.normal(0.3, 0.2, 12), rng.normal(-0.3, 0.1, 30)])
        data = rng.normal(0, 0.1, (5, 1)) + hard + rng.normal(0, 0.1, (5, 42))
        return crossed_t_interval(data, strata=np.repeat([0, 1], [12, 30]))

    assert 0.92 < coverage(make, 800) < 0.995


def coverage(make: Callable[[np.random.Generator], Interval], repeats: int) -> float:
    hits = 0
    for seed in range(repeats):
        interval = make(np.random.default_rng(seed))
        hits += interval.low <= 0 <= interval.high
    return hits / repeats


@pytest.mark.parametrize(
    ("shape", "seed_sd", "problem_sd", "sd"),
    [
        ((5, 30), 0.05, 0.3, 0.1),  # problems differ most, as in a benchmark of 30
        ((5, 30), 0.05, 0.0, 0.01),  # only seeds differ: plain percentiles would cover .83
        ((5, 30), 0.05, 0.05, 0.1),
        ((1, 30), 0.0, 0.3, 0.1),
        ((10, 8), 0.05, 0.3, 0.1),
    ],
)
def test_hierarchical_bootstrap_covers_the_truth_as_often_as_it_says(
    shape: tuple[int, int], seed_sd: float, problem_sd: float, sd: float
) -> None:
    def make(rng: np.random.Generator) -> Interval:
        data = crossed(rng, shape, seed_sd, problem_sd, sd)
        return hierarchical_bootstrap(data, num_resamples=1000)

    assert coverage(make, 300) > 0.9


def test_intervals_over_one_level_cover_the_truth_and_are_not_wider_than_needed() -> None:
    def paired(rng: np.random.Generator) -> Interval:
        return paired_t_interval(rng.normal(size=6), rng.normal(size=6))

    def simple(rng: np.random.Generator) -> Interval:
        return bootstrap_interval(rng.normal(size=10), num_resamples=1000)

    assert 0.92 < coverage(paired, 800) < 0.98
    assert 0.90 < coverage(simple, 800) < 0.98


# ------------------------------------------------------------------------- plain statistics


def loop_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    mean_x, mean_y = math.fsum(x) / len(x), math.fsum(y) / len(y)
    cov = math.fsum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    var_x = math.fsum((a - mean_x) ** 2 for a in x)
    var_y = math.fsum((b - mean_y) ** 2 for b in y)
    return cov / math.sqrt(var_x * var_y)


def loop_ranks(x: Sequence[float]) -> list[float]:
    return [sum(b < a for b in x) + (sum(b == a for b in x) - 1) / 2 for a in x]


@property_test
@given(st.lists(st.tuples(numbers, numbers), min_size=2, max_size=25), seeds)
def test_correlations_agree_with_their_loops_whatever_stands_in_masked_slots(
    pairs: list[tuple[float, float]], seed: int
) -> None:
    x, y = np.array(pairs).T.round(1)  # rounded: ties, and spreads a loop can resolve
    spread_x, mask = with_junk(x, np.random.default_rng(seed))
    spread_y = np.full(len(mask), math.nan)
    spread_y[mask] = y
    pearson = correlation(torch.tensor(spread_x), torch.tensor(spread_y), valid=torch.tensor(mask))
    spearman = rank_correlation(spread_x, spread_y, valid=mask)
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        assert math.isnan(pearson)
        assert math.isnan(spearman)
        return
    assert pearson == pytest.approx(loop_correlation(x, y), abs=1e-9)
    assert spearman == pytest.approx(loop_correlation(loop_ranks(x), loop_ranks(y)), abs=1e-9)
    assert -1 <= pearson <= 1
    assert -1 <= spearman <= 1


@property_test
@given(st.lists(numbers, min_size=2, max_size=25, unique=True), st.floats(0.01, 9), numbers)
def test_correlation_of_a_line_is_one_and_ranks_only_need_the_order(
    x: list[float], slope: float, shift: float
) -> None:
    entries = np.array(x)
    assert rank_correlation(entries, np.sinh(entries / 30)) == pytest.approx(1)
    assert rank_correlation(entries, -entries) == pytest.approx(-1)
    if np.ptp(entries) > 0.1:
        assert correlation(entries, slope * entries + shift) == pytest.approx(1, abs=1e-6)
        assert correlation(entries, shift - slope * entries) == pytest.approx(-1, abs=1e-6)


def test_correlation_with_equal_floats_is_nan_not_noise() -> None:
    x = torch.full((8,), 0.7)
    y = torch.arange(8.0)
    for valid in (None, torch.ones(8, dtype=torch.bool)):
        assert math.isnan(correlation(x, y, valid=valid))
        assert math.isnan(correlation(y, x, valid=valid))
        assert math.isnan(rank_correlation(x, y, valid=valid))
    assert math.isnan(correlation(y[:1], y[:1]))
    assert math.isnan(correlation(y[:0], y[:0]))
    assert math.isnan(correlation(y, torch.tensor([math.inf, *range(7)])))


def test_correlation_survives_entries_that_differ_in_the_last_bit_and_extreme_scales() -> None:
    close = np.array([1.0, 1.0 + 2**-52, 1.0, 1.0 + 2**-52])
    assert correlation(close, close) == pytest.approx(1)
    assert correlation(close, np.array([0.0, 1.0, 0.0, 1.0])) == pytest.approx(1)
    for scale in (1e-300, 1e300):
        x = np.array([0.0, 1.0, 3.0]) * scale
        assert correlation(x, np.array([0.0, 1.0, 3.0])) == pytest.approx(1)


@property_test
@given(st.lists(st.floats(0, 50, width=32), min_size=1, max_size=25), seeds)
def test_effective_sample_size_agrees_with_its_loop_and_stays_in_range(
    weights: list[float], seed: int
) -> None:
    spread, mask = with_junk(np.array(weights), np.random.default_rng(seed))
    spread[~mask] = np.where(np.isneginf(spread[~mask]), -1.0, spread[~mask])
    share = effective_sample_size(torch.tensor(spread), mask=torch.tensor(mask))
    if max(weights) == 0:
        assert math.isnan(share)
        return
    big = max(weights)
    scaled = [w / big for w in weights]
    expected = math.fsum(scaled) ** 2 / (len(weights) * math.fsum(w * w for w in scaled))
    assert share == pytest.approx(expected)
    assert 1 / len(weights) - 1e-12 <= share <= 1 + 1e-12


def test_effective_sample_size_of_equal_single_and_huge_ratios() -> None:
    assert effective_sample_size(torch.full((7,), 0.3).bfloat16()) == pytest.approx(1)
    assert effective_sample_size([0.0, 0.0, 5.0, 0.0]) == pytest.approx(0.25)
    assert effective_sample_size([1e300, 1e300]) == pytest.approx(1)
    assert math.isnan(effective_sample_size([]))
    assert math.isnan(effective_sample_size([1.0, math.inf]))
    with pytest.raises(ValueError, match=r"-0\.5"):
        effective_sample_size([1.0, -0.5])


@property_test
@given(st.lists(st.floats(0.5, 2, width=32), min_size=1, max_size=25), st.floats(0.1, 10), seeds)
def test_coefficient_of_variation_has_no_unit_and_ignores_masked_slots(
    x: list[float], scale: float, seed: int
) -> None:
    mean = math.fsum(x) / len(x)
    sd = math.sqrt(math.fsum((a - mean) ** 2 for a in x) / len(x))
    spread, mask = with_junk(np.array(x), np.random.default_rng(seed))
    found = coefficient_of_variation(torch.tensor(spread), mask=torch.tensor(mask))
    assert found == pytest.approx(sd / mean, abs=1e-9)
    assert coefficient_of_variation(scale * np.array(x)) == pytest.approx(found, abs=1e-9)


def test_coefficient_of_variation_of_equal_none_and_zero_mean() -> None:
    assert coefficient_of_variation(torch.full((8,), 0.7)) == 0
    assert math.isnan(coefficient_of_variation(torch.zeros(0)))
    assert math.isnan(coefficient_of_variation([1.0, -1.0]))
    assert coefficient_of_variation([-1.0, -3.0]) == pytest.approx(-0.5)
