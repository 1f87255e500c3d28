"""Log-probabilities in chunks, over packed and padded batches, are those of whole logits."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from train.attention import PACKED_SDPA, borders, pack
from train.models import ModelError
from train.passes import parts
from train.policy import Policy
from train.rollout.batch import Batch
from train.world import World

MakeBatch = Callable[..., Batch]
V = 40
SHAPE: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}


def qwen2(**changes: Any) -> PreTrainedModel:
    torch.manual_seed(1)
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE, **changes)).eval()


def mistral() -> PreTrainedModel:
    torch.manual_seed(1)
    return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=4)).eval()


def gemma2() -> PreTrainedModel:
    """Caps its scores and its logits."""
    torch.manual_seed(1)
    return Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=8, attn_logit_softcapping=1.0)).eval()


def twin(model: PreTrainedModel, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
    """Each sequence alone, with whole logits, as transformers has it."""
    log_probs, entropies = torch.zeros(2, *batch.response_mask.shape)
    for row, length in enumerate(batch.lengths.tolist()):
        ids = batch.input_ids[row][batch.attention_mask[row].bool()]
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0].float() / temperature
        distribution = logits[len(ids) - length - 1 : -1].log_softmax(-1)
        chosen = distribution.gather(-1, ids[len(ids) - length :, None])[:, 0]
        log_probs[row, :length] = chosen
        entropies[row, :length] = -(distribution.exp() * distribution).sum(-1)
    return log_probs, entropies


@torch.no_grad()
def scored(
    policy: Policy, batch: Batch, *, packed: bool, budget: int = 30, temperature: float = 0.7
) -> tuple[Tensor, Tensor]:
    found = torch.zeros(2, *batch.response_mask.shape)
    for part in parts(
        batch,
        torch.arange(len(batch)),
        model=policy.actor,
        packed=packed,
        budget=budget,
        device=torch.device("cpu"),
    ):
        out = policy(part.inputs, part.states, part.targets, temperature=temperature)
        for place, x in zip(found, out, strict=True):
            slots = part.slots(x)
            place[part.rows, : slots.shape[1]] += slots
    return found[0], found[1]


@pytest.mark.parametrize("rows", [1, 5, 1000])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("make", [qwen2, mistral, gemma2])
def test_log_probs_and_entropy_are_those_of_whole_logits(
    ragged_batch: MakeBatch, make: Callable[[], PreTrainedModel], packed: bool, rows: int
) -> None:
    model, batch = make(), ragged_batch((7, 1, 12, 0, 9, 3), (2, 9, 4, 4, 1, 6))
    expected = twin(model, batch, 0.7)
    able = pack([model], None if packed else False)
    assert able == (packed and make is not gemma2)
    found = scored(Policy(model, rows=rows), batch, packed=able)
    for mine, its in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, its, atol=2e-5, rtol=1e-5)


def test_capped_logits_are_not_taken_for_linear_ones() -> None:
    assert Policy(gemma2(), rows=8).head is None
    assert Policy(qwen2(), rows=8).head is not None
    assert Policy(qwen2(tie_word_embeddings=True), rows=8).head is not None


@pytest.mark.parametrize("rows", [1, 5, 1000])
def test_the_gradient_does_not_depend_on_the_chunks(ragged_batch: MakeBatch, rows: int) -> None:
    batch = ragged_batch()
    gradients = []
    for chunk in (rows, 10_000):
        model = qwen2(tie_word_embeddings=True)
        pack([model], True)
        policy = Policy(model, rows=chunk)
        (part,) = parts(
            batch,
            torch.arange(len(batch)),
            model=model,
            packed=True,
            budget=1000,
            device=torch.device("cpu"),
        )
        log_probs, entropy = policy(
            part.inputs, part.states, part.targets, temperature=1.3, entropy_gradient=True
        )
        weights = torch.linspace(-1, 1, len(log_probs))
        (weights @ log_probs + 0.3 * entropy.sum()).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters()]))
    assert (gradients[0] - gradients[1]).norm() < 1e-5 * gradients[1].norm()


def test_a_watched_entropy_has_no_gradient(ragged_batch: MakeBatch) -> None:
    model, batch = qwen2(), ragged_batch()
    (part,) = parts(
        batch,
        torch.arange(len(batch)),
        model=model,
        packed=False,
        budget=1000,
        device=torch.device("cpu"),
    )
    for rows in (3, 1000):
        policy = Policy(model, rows=rows)
        log_probs, entropy = policy(part.inputs, part.states, part.targets, temperature=1.0)
        assert log_probs.requires_grad
        assert not entropy.requires_grad
        assert (entropy >= 0).all()
        assert (entropy <= math.log(V) + 1e-5).all()


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("ranks", [2, 3, 9])
def test_the_parts_of_all_ranks_are_the_batch(
    ragged_batch: MakeBatch, packed: bool, ranks: int
) -> None:
    batch, model = ragged_batch(), qwen2()
    cut = [
        list(
            parts(
                batch,
                torch.arange(len(batch)),
                model=model,
                packed=packed,
                budget=25,
                device=torch.device("cpu"),
                world=World(rank, ranks),
            )
        )
        for rank in range(ranks)
    ]
    assert len({len(mine) for mine in cut}) == 1
    tokens = sum(int(part.response_mask.sum()) for mine in cut for part in mine)
    assert tokens == batch.lengths.sum()
    seen = [row for mine in cut for part in mine if part.response_mask.any() for row in part.rows]
    assert sorted(int(row) for row in seen) == list(range(len(batch)))


def test_packed_attention_without_borders_is_transformers_own() -> None:
    for make in (qwen2, mistral):
        model, tokens = make(), torch.arange(2, 14).view(2, 6)
        padded = {
            "input_ids": tokens,
            "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6]),
        }
        with torch.no_grad():
            expected = [model(input_ids=tokens).logits, model(**padded).logits]
            model.set_attn_implementation(PACKED_SDPA)
            found = [model(input_ids=tokens).logits, model(**padded).logits]
        torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=1e-5)
        real = padded["attention_mask"].bool()
        torch.testing.assert_close(found[1][real], expected[1][real], atol=1e-5, rtol=1e-5)


def test_a_model_that_cannot_be_packed_is_refused_where_packing_is_asked_for() -> None:
    model = gemma2()
    before = model.config._attn_implementation
    assert not pack([model], None)
    assert model.config._attn_implementation == before
    with pytest.raises(ModelError, match=r"engine\.packed: .*set it to false"):
        pack([model], True)


def test_borders_are_flash_attentions() -> None:
    found = borders(torch.tensor([3, 1, 5]))
    assert found["cu_seq_lens_q"].tolist() == [0, 3, 4, 9]
    assert found["cu_seq_lens_q"].dtype == torch.int32
    assert found["max_length_k"] == 5
