"""Attention over packed sequences: each token sees its own sequence, up to itself.

FlashAttention does this on GPUs from the same arguments (`engine.attention`). Where it is not
there, `packed_sdpa` puts the sequences side by side for PyTorch's own attention alone; everything
else in the model works without padding. Padding on the right needs no mask under causal attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from train.models import ModelError

PACKED_SDPA = "packed_sdpa"


def borders(lengths: Int[Tensor, " b"]) -> dict[str, Any]:
    """What packed attention has to know, by the names that FlashAttention gave it."""
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    longest = int(lengths.max())
    return {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def packed_sdpa(
    module: nn.Module,
    query: Float[Tensor, "1 heads N d"],
    key: Float[Tensor, "1 kv_heads N d"],
    value: Float[Tensor, "1 kv_heads N d"],
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Int[Tensor, " b+1"] | None = None,
    max_length_q: int | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **other: Any,
) -> tuple[Float[Tensor, "1 N heads d"], None]:
    """An attention function of transformers (`AttentionInterface`) for packed sequences.

    Without borders it is PyTorch's attention as transformers calls it.

    Raises:
        ValueError: The model's attention is of a kind that PyTorch's function does not compute
            (capped scores, sinks).
    """
    if cu_seq_lens_q is None or max_length_q is None:
        if attention_mask is None:
            attention_mask = _window(query.shape[2], sliding_window, query.device)
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **other
        )
    if softcap is not None or s_aux is not None:
        raise ValueError(
            f"{type(module).__name__} caps its scores or has sinks, which PyTorch's attention has "
            "not: set engine.packed=false"
        )
    starts, ends = cu_seq_lens_q[:-1, None].long(), cu_seq_lens_q[1:, None].long()
    place = starts + torch.arange(max_length_q, device=query.device)
    real = place < ends
    place = torch.where(real, place, starts)  # padding repeats a token; nobody looks at it
    q, k, v = (x[0].transpose(0, 1)[place].transpose(1, 2) for x in (query, key, value))
    mask = _window(max_length_q, sliding_window, query.device)
    out = scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.transpose(1, 2)[real][None], None


def _window(length: int, window: int | None, device: torch.device) -> Bool[Tensor, "L L"] | None:
    """The mask of attention that looks back over a window only; None where it sees everything."""
    if window is None or window >= length:
        return None
    at = torch.arange(length, device=device)
    back = at[:, None] - at
    return (back >= 0) & (back < window)


def _mask(*, attention_mask: Tensor | None = None, **other: Any) -> Tensor | None:
    """Padding needs a mask; packed sequences would need one of N x N, and have borders instead."""
    if attention_mask is None:
        return None
    found: Tensor | None = sdpa_mask(attention_mask=attention_mask, **other)
    return found


AttentionInterface.register(PACKED_SDPA, packed_sdpa)
AttentionMaskInterface.register(PACKED_SDPA, _mask)


def pack(models: Sequence[PreTrainedModel], wanted: bool | None) -> bool:
    """Sets models up for packed sequences, if they are to be and all of them can.

    Every model is tried on two short sequences: packed, they must read as each does alone.

    Args:
        models: Language models or trunks.
        wanted: Null: where all of them can.

    Returns:
        Whether they are.

    Raises:
        ModelError: They are to be packed and one cannot.
    """
    if wanted is False:
        return False
    before = [model.config._attn_implementation for model in models]
    reason = next(filter(None, map(_why_not, models)), None)
    if reason is None:
        return True
    for model, implementation in zip(models, before, strict=True):
        model.set_attn_implementation(implementation)
    if wanted:
        raise ModelError(f"engine.packed: {reason}; set it to false")
    return False


@torch.no_grad()
def _why_not(model: PreTrainedModel) -> str | None:
    """Sets a model's attention to the packed one; says why that does not work, if it does not."""
    name = type(model).__name__
    if not model._supports_attention_backend:
        return f"the attention of {name} cannot be replaced, which packing needs"
    sequences = [torch.tensor([[0, 1, 0]]), torch.tensor([[1, 0]])]
    sequences = [tokens.to(model.device) for tokens in sequences]
    alone = [_hidden(model, input_ids=tokens) for tokens in sequences]
    model.set_attn_implementation(PACKED_SDPA)
    lengths = torch.tensor([tokens.shape[1] for tokens in sequences], device=model.device)
    try:
        packed = _hidden(
            model,
            input_ids=torch.cat(sequences, 1),
            position_ids=torch.cat([torch.arange(n, device=model.device) for n in lengths])[None],
            **borders(lengths),
        )
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{name} cannot be given packed sequences ({error})"
    expected = torch.cat(alone, 1)
    gap = ((packed - expected).abs().max() / expected.abs().max()).item()
    limit = 1e-3 if packed.dtype == torch.float32 else 3e-2
    return None if gap < limit else f"{name} reads packed sequences otherwise than each alone"


def _hidden(model: PreTrainedModel, **inputs: Any) -> Float[Tensor, "1 N H"]:
    hidden: Tensor = model.base_model(**inputs, use_cache=False).last_hidden_state
    return hidden
