"""The losses of section 6 against plain loops, and their independence of how a batch is cut."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cvpo.loss import (
    REDUCTIONS,
    BatchCounts,
    kl_loss,
    policy_loss,
    policy_statistics,
    positive_lm_loss,
    token_weights,
    value_loss,
)

property_test = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 2**32 - 1)
JUNK = (math.nan, math.inf, -math.inf, 1e30)
CLIP_LOW, CLIP_HIGH = 0.2, 0.28


def batch(seed: int, B: int, T: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Ragged trajectories with gaps, some empty; ratios inside and beyond the clip range."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, T + 1, B)
    mask = (np.arange(T) < lengths[:, None]) & (rng.random((B, T)) < 0.9)
    old = -rng.gamma(1, 0.5, (B, T))
    floats = {
        "log_probs": old + rng.normal(0, 0.3, (B, T)),
        "old_log_probs": old,
        "reference": old + rng.normal(0, 0.3, (B, T)),
        "advantages": rng.normal(size=(B, T)),
        "values": rng.normal(size=(B, T)),
        "old_values": rng.normal(size=(B, T)),
        "returns": rng.normal(size=(B, T)),
        "correct": rng.choice([0.0, 1.0, 0.25], B),
    }
    data = {name: torch.tensor(x, dtype=dtype) for name, x in floats.items()}
    return {**data, "mask": torch.tensor(mask)}


def counts_of(mask: Tensor, max_length: int = 50) -> BatchCounts:
    return BatchCounts(
        tokens=float(mask.sum()), sequences=float(mask.any(1).sum()), max_length=max_length
    )


def lm_tokens(data: dict[str, Tensor]) -> float:
    return float((data["correct"] * data["mask"].sum(1)).sum())


def loop_weight(length: int, counts: BatchCounts, reduction: str) -> float:
    if reduction == "token":
        return 1 / counts.tokens
    if reduction == "sequence":
        return 1 / (counts.sequences * length)
    return 1 / (counts.sequences * counts.max_length)


def loop_sum(
    mask: Tensor, counts: BatchCounts, reduction: str, token: Callable[[int, int], float]
) -> float:
    total = 0.0
    for i in range(mask.shape[0]):
        slots = [t for t in range(mask.shape[1]) if mask[i, t]]
        for t in slots:
            total += loop_weight(len(slots), counts, reduction) * token(i, t)
    return total


def loop_policy_loss(data: dict[str, Tensor], counts: BatchCounts, reduction: str) -> float:
    def token(i: int, t: int) -> float:
        A = data["advantages"][i, t].item()
        ratio = math.exp(data["log_probs"][i, t].item() - data["old_log_probs"][i, t].item())
        clipped = min(max(ratio, 1 - CLIP_LOW), 1 + CLIP_HIGH)
        return -min(ratio * A, clipped * A)

    return loop_sum(data["mask"], counts, reduction, token)


def loop_value_loss(data: dict[str, Tensor], counts: BatchCounts, clip: float | None) -> float:
    def token(i: int, t: int) -> float:
        v, g, old = (data[name][i, t].item() for name in ("values", "returns", "old_values"))
        error = (v - g) ** 2
        if clip is not None:
            error = max(error, (old + min(max(v - old, -clip), clip) - g) ** 2)
        return 0.5 * error

    return loop_sum(data["mask"], counts, "token", token)


# ----------------------------------------------------------------------------- values, by loops


@property_test
@given(seeds, st.integers(0, 5), st.integers(0, 12), st.sampled_from(REDUCTIONS))
def test_policy_and_kl_loss_agree_with_their_loops(
    seed: int, B: int, T: int, reduction: str
) -> None:
    data = batch(seed, B, T)
    counts = counts_of(data["mask"])
    policy = policy_loss(
        data["log_probs"],
        data["old_log_probs"],
        data["advantages"],
        data["mask"],
        counts=counts,
        clip_low=CLIP_LOW,
        clip_high=CLIP_HIGH,
        reduction=reduction,
    )
    assert policy.item() == pytest.approx(loop_policy_loss(data, counts, reduction), abs=1e-6)

    def k3(i: int, t: int) -> float:
        d = data["reference"][i, t].item() - data["log_probs"][i, t].item()
        return math.exp(d) - d - 1

    kl = kl_loss(
        data["log_probs"], data["reference"], data["mask"], counts=counts, reduction=reduction
    )
    assert kl.item() == pytest.approx(loop_sum(data["mask"], counts, reduction, k3), abs=1e-6)
    assert kl.item() >= 0


@property_test
@given(seeds, st.integers(0, 5), st.integers(0, 12), st.sampled_from([None, 0.2]))
def test_value_loss_agrees_with_its_loop(seed: int, B: int, T: int, clip: float | None) -> None:
    data = batch(seed, B, T)
    counts = counts_of(data["mask"])
    loss = value_loss(
        data["values"],
        data["returns"],
        data["mask"],
        counts=counts,
        old_values=data["old_values"],
        clip=clip,
    )
    assert loss.item() == pytest.approx(loop_value_loss(data, counts, clip), abs=1e-6)


@property_test
@given(seeds, st.integers(0, 5), st.integers(0, 12))
def test_lm_loss_weighs_each_token_with_its_correctness(seed: int, B: int, T: int) -> None:
    data = batch(seed, B, T)
    total = weight = 0.0
    for i in range(B):
        for t in range(T):
            if data["mask"][i, t]:
                R = data["correct"][i].item()
                total, weight = total - R * data["log_probs"][i, t].item(), weight + R
    loss = positive_lm_loss(
        data["log_probs"], data["mask"], data["correct"], num_tokens=lm_tokens(data)
    )
    assert loss.item() == pytest.approx(total / weight if weight else 0.0, abs=1e-9)


def test_losses_by_hand() -> None:
    # Two responses of one and three tokens, ratio 1, advantages 4 and 2.
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]])
    log_probs = torch.full((2, 3), -0.5)
    advantages = torch.tensor([[4.0], [2.0]]).expand(2, 3)
    counts = BatchCounts(tokens=4, sequences=2, max_length=10)
    expected = {"token": -10 / 4, "sequence": -(4 + 2) / 2, "fixed": -10 / 20}
    for reduction, loss in expected.items():
        found = policy_loss(
            log_probs, log_probs, advantages, mask, counts=counts, reduction=reduction
        )
        assert found.item() == pytest.approx(loss)
    values = value_loss(advantages, torch.zeros(2, 3), mask, counts=counts)
    assert values.item() == pytest.approx(0.5 * (16 + 3 * 4) / 4)
    lm = positive_lm_loss(log_probs, mask, torch.tensor([1, 0]), num_tokens=1)
    assert lm.item() == pytest.approx(0.5)


# ------------------------------------------------------------------------ cuts into micro-batches


def all_losses(
    leaves: dict[str, Tensor], data: dict[str, Tensor], counts: BatchCounts, lm_count: float
) -> Tensor:
    """Every loss at once, in unequal parts, of one micro-batch."""
    x, mask = leaves["log_probs"], data["mask"]
    total = 0.3 * positive_lm_loss(x, mask, data["correct"], num_tokens=lm_count)
    for part, reduction in enumerate(REDUCTIONS, start=1):
        total = total + part * policy_loss(
            x,
            data["old_log_probs"],
            data["advantages"],
            mask,
            counts=counts,
            clip_low=CLIP_LOW,
            clip_high=CLIP_HIGH,
            reduction=reduction,
        )
        total = total + part * kl_loss(
            x, data["reference"], mask, counts=counts, reduction=reduction
        )
    for clip in (None, 0.1):
        total = total + value_loss(
            leaves["values"],
            data["returns"],
            mask,
            counts=counts,
            old_values=data["old_values"],
            clip=clip,
        )
    return total


@property_test
@given(st.data(), seeds, st.integers(1, 7), st.integers(1, 12))
def test_losses_and_gradients_do_not_depend_on_how_the_batch_is_cut(
    draw: st.DataObject, seed: int, B: int, T: int
) -> None:
    data = batch(seed, B, T)
    counts, lm_count = counts_of(data["mask"], max_length=T), lm_tokens(data)

    def run(cuts: list[list[int]]) -> tuple[float, Tensor, Tensor]:
        leaves = {name: data[name].clone().requires_grad_() for name in ("log_probs", "values")}
        total = 0.0
        for rows in cuts:
            piece = {name: x[rows] for name, x in data.items()}
            # A micro-batch is padded to its own longest response only.
            width = int(piece["mask"].any(0).nonzero().max()) + 1 if piece["mask"].any() else 0
            trim = {n: x[:, :width] if x.ndim == 2 else x for n, x in piece.items()}
            loss = all_losses(
                {name: x[rows][:, :width] for name, x in leaves.items()}, trim, counts, lm_count
            )
            loss.backward()
            total += loss.item()
        return total, leaves["log_probs"].grad, leaves["values"].grad

    order = draw.draw(st.permutations(range(B)))
    ends = sorted(draw.draw(st.sets(st.integers(1, B), max_size=B)) | {B})
    cuts = [order[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    whole, cut = run([list(range(B))]), run(cuts)
    assert cut[0] == pytest.approx(whole[0], rel=1e-6, abs=1e-6)
    for x, y in zip(whole[1:], cut[1:], strict=True):
        torch.testing.assert_close(y, x, rtol=1e-6, atol=1e-7)


@property_test
@given(seeds, st.integers(1, 5), st.integers(1, 12))
def test_junk_in_masked_slots_changes_neither_losses_nor_gradients(
    seed: int, B: int, T: int
) -> None:
    clean = batch(seed, B, T)
    mask = clean["mask"]
    counts, lm_count = counts_of(mask), lm_tokens(clean)
    rng = np.random.default_rng(seed)
    outcomes = []
    for junk in (False, True):
        data = dict(clean)
        for name, x in clean.items():
            if x.ndim == 2 and name != "mask":
                fill = torch.tensor(rng.choice(JUNK, (B, T))) if junk else torch.zeros(B, T)
                data[name] = torch.where(mask, x, fill.double())
        leaves = {name: data[name].clone().requires_grad_() for name in ("log_probs", "values")}
        loss = all_losses(leaves, data, counts, lm_count)
        loss.backward()
        outcomes.append((loss.detach(), *(x.grad for x in leaves.values())))
    for x, y in zip(*outcomes, strict=True):
        torch.testing.assert_close(y, x, rtol=0, atol=0)
        assert x.isfinite().all()
        assert x.ndim == 0 or x[~mask].eq(0).all()


# --------------------------------------------------------------------------------- clipping


@pytest.mark.parametrize(
    ("ratio", "advantage", "flows"),
    [
        (1.3, 1.0, False),  # beyond 1.28 and still pushed up: cut
        (1.27, 1.0, True),
        (1.3, -1.0, True),  # beyond 1.28 but pulled back: kept
        (0.79, -1.0, False),
        (0.81, -1.0, True),
        (0.79, 1.0, True),
    ],
)
def test_clipping_stops_the_gradient_only_where_the_ratio_already_moved_the_way_it_is_pushed(
    ratio: float, advantage: float, flows: bool
) -> None:
    log_probs = torch.tensor([[math.log(ratio), 0.0]], requires_grad=True)
    old, mask = torch.zeros(1, 2), torch.tensor([[1, 0]])
    advantages = torch.tensor([[advantage, 9.0]])
    counts = BatchCounts(tokens=1, sequences=1, max_length=2)
    loss = policy_loss(log_probs, old, advantages, mask, counts=counts)
    loss.backward()
    expected = -ratio * advantage if flows else 0.0
    assert log_probs.grad[0].tolist() == pytest.approx([expected, 0.0])
    clipped = min(max(ratio, 0.8), 1.28)
    assert loss.item() == pytest.approx(-min(ratio * advantage, clipped * advantage))
    statistics = policy_statistics(
        log_probs, old, advantages, mask, clip_low=CLIP_LOW, clip_high=CLIP_HIGH
    )
    assert statistics["clip_low"] + statistics["clip_high"] == (0 if flows else 1)
    assert statistics["clip_high"] == (0 if flows else float(ratio > 1))


@property_test
@given(seeds, st.integers(1, 5), st.integers(1, 12))
def test_at_ratio_one_the_gradient_is_the_plain_policy_gradient(seed: int, B: int, T: int) -> None:
    data = batch(seed, B, T)
    x = data["old_log_probs"].clone().requires_grad_()
    counts = counts_of(data["mask"])
    policy_loss(
        x, data["old_log_probs"], data["advantages"], data["mask"], counts=counts
    ).backward()
    expected = -data["advantages"].masked_fill(~data["mask"], 0) / max(counts.tokens, 1)
    torch.testing.assert_close(x.grad, expected, rtol=1e-6, atol=1e-9)


def test_value_clipping_stops_the_gradient_of_a_value_that_left_its_range_towards_the_return() -> (
    None
):
    values = torch.tensor([[0.5, 0.5, 0.05]], requires_grad=True)
    old, returns = torch.zeros(1, 3), torch.tensor([[1.0, -1.0, 1.0]])
    counts = BatchCounts(tokens=3, sequences=1, max_length=3)
    value_loss(
        values, returns, torch.ones(1, 3), counts=counts, old_values=old, clip=0.1
    ).backward()
    assert values.grad[0].tolist() == pytest.approx([0.0, 1.5 / 3, -0.95 / 3])


def test_kl_is_zero_for_equal_policies_and_its_gradient_too() -> None:
    x = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    counts = BatchCounts(tokens=2, sequences=1, max_length=2)
    loss = kl_loss(x, x.detach(), torch.ones(1, 2), counts=counts)
    loss.backward()
    assert loss.item() == 0
    assert x.grad.eq(0).all()


# ------------------------------------------------------------------------------ edges and dtypes


def test_lm_loss_of_a_batch_without_correct_responses_is_zero_and_has_zero_gradient() -> None:
    # An incorrect response may hold an impossible token: 0 * -inf must not become NaN.
    x = torch.tensor([[-math.inf, -1.0], [-2.0, -3.0]], requires_grad=True)
    loss = positive_lm_loss(x, torch.ones(2, 2), torch.tensor([0, 0]), num_tokens=0)
    loss.backward()
    assert loss.item() == 0
    assert x.grad.eq(0).all()


def test_losses_of_a_batch_without_response_tokens_are_zero() -> None:
    for B, T in ((0, 4), (3, 0), (2, 4)):
        data = batch(0, B, T)
        data["mask"] = torch.zeros(B, T, dtype=torch.bool)
        counts = counts_of(data["mask"])
        leaves = {name: data[name].clone().requires_grad_() for name in ("log_probs", "values")}
        loss = all_losses(leaves, data, counts, 0.0)
        loss.backward()
        assert loss.item() == 0
        assert all(x.grad.eq(0).all() for x in leaves.values())


@pytest.mark.parametrize("name", ["policy", "value", "value_clip", "lm", "kl"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_each_loss_of_narrow_floats_is_computed_in_single_precision(
    name: str, dtype: torch.dtype
) -> None:
    narrow = batch(2, 4, 60, dtype)
    single = {key: x.float() if x.is_floating_point() else x for key, x in narrow.items()}
    counts, lm_count = counts_of(narrow["mask"]), lm_tokens(single)
    losses: dict[str, Callable[[dict[str, Tensor]], Tensor]] = {
        "policy": lambda d: policy_loss(
            d["log_probs"], d["old_log_probs"], d["advantages"], d["mask"], counts=counts
        ),
        "value": lambda d: value_loss(d["values"], d["returns"], d["mask"], counts=counts),
        "value_clip": lambda d: value_loss(
            d["values"],
            d["returns"],
            d["mask"],
            counts=counts,
            old_values=d["old_values"],
            clip=0.2,
        ),
        "lm": lambda d: positive_lm_loss(
            d["log_probs"], d["mask"], d["correct"], num_tokens=lm_count
        ),
        "kl": lambda d: kl_loss(d["log_probs"], d["reference"], d["mask"], counts=counts),
    }
    found, expected = losses[name](narrow), losses[name](single)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)


def test_token_weights_sum_to_what_each_reduction_promises() -> None:
    mask = batch(3, 6, 20)["mask"]
    counts = counts_of(mask, max_length=20)
    sums = {
        reduction: token_weights(mask, counts, reduction=reduction).sum().item()
        for reduction in REDUCTIONS
    }
    assert sums["token"] == pytest.approx(1)
    assert sums["sequence"] == pytest.approx(1)
    assert sums["fixed"] == pytest.approx(counts.tokens / (counts.sequences * 20))


@property_test
@given(seeds, st.integers(1, 6), st.integers(1, 12))
def test_policy_statistics_agree_with_their_loop_and_add_up_over_cuts(
    seed: int, B: int, T: int
) -> None:
    data = batch(seed, B, T)

    def statistics(rows: slice) -> dict[str, float]:
        return policy_statistics(
            data["log_probs"][rows],
            data["old_log_probs"][rows],
            data["advantages"][rows],
            data["mask"][rows],
            clip_low=CLIP_LOW,
            clip_high=CLIP_HIGH,
        )

    expected = dict.fromkeys(
        ("tokens", "clip_low", "clip_high", "kl", "ratio", "ratio_square"), 0.0
    )
    for i, t in zip(*np.nonzero(data["mask"].numpy()), strict=True):
        d = (data["log_probs"] - data["old_log_probs"])[i, t].item()
        A, ratio = data["advantages"][i, t].item(), math.exp(d)
        expected["tokens"] += 1
        expected["clip_low"] += ratio < 1 - CLIP_LOW and A < 0
        expected["clip_high"] += ratio > 1 + CLIP_HIGH and A > 0
        expected["kl"] += ratio - 1 - d
        expected["ratio"] += ratio
        expected["ratio_square"] += ratio**2
    whole = statistics(slice(None))
    parts = [statistics(slice(i, i + 1)) for i in range(B)]
    assert whole.keys() == expected.keys()
    for name, number in expected.items():
        assert whole[name] == pytest.approx(number, abs=1e-9)
        assert sum(part[name] for part in parts) == pytest.approx(number, abs=1e-9)


_X = torch.zeros(2, 3)
_COUNTS = BatchCounts(tokens=6, sequences=2, max_length=3)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: policy_loss(_X, _X, _X[:, :1], _X, counts=_COUNTS), r"\[B, T\]"),
        (lambda: value_loss(_X, _X[:1], _X, counts=_COUNTS), r"\[B, T\]"),
        (lambda: kl_loss(_X, _X[0], _X, counts=_COUNTS), r"\[B, T\]"),
        (lambda: positive_lm_loss(_X, _X[:1], torch.ones(2), num_tokens=1), r"\[B, T\]"),
        (lambda: positive_lm_loss(_X, _X, torch.ones(1), num_tokens=1), "correct"),
        (
            lambda: value_loss(_X, _X, _X, counts=_COUNTS, old_values=_X[:1], clip=0.1),
            r"\[B, T\]|old_values",
        ),
        (lambda: value_loss(_X, _X, _X, counts=_COUNTS, clip=0.1), "old_values"),
        (lambda: policy_loss(_X, _X, _X, _X, counts=_COUNTS, reduction="mean"), "reduction"),
        (
            lambda: policy_statistics(_X, _X[:1], _X, _X, clip_low=0.2, clip_high=0.2),
            r"policy_statistics.*\[B, T\]",
        ),
    ],
)
def test_shapes_that_would_broadcast_and_unknown_reductions_are_refused(
    call: Callable[[], object], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        call()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_batch_of_nothing_has_loss_zero(reduction: str) -> None:
    nothing = BatchCounts(tokens=0, sequences=0, max_length=0)
    loss = policy_loss(_X, _X, _X, torch.zeros(2, 3), counts=nothing, reduction=reduction)
    assert loss.item() == 0.0


@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("rise", [19.0, 21.0, 90.0, 1e4])
def test_a_ratio_that_overflows_leaves_loss_and_gradient_finite(
    advantage: float, rise: float
) -> None:
    new = torch.full((1, 2), rise, requires_grad=True)
    loss = policy_loss(
        new,
        torch.zeros(1, 2),
        torch.full((1, 2), advantage),
        torch.ones(1, 2),
        counts=BatchCounts(tokens=2, sequences=1, max_length=2),
    )
    loss.backward()
    assert loss.isfinite()
    assert new.grad is not None
    assert new.grad.isfinite().all()
    if advantage > 0:  # clipped: no gradient
        assert loss.item() == pytest.approx(-1.28)
        assert not new.grad.any()
