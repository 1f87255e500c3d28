"""How much arithmetic a language model needs and its device offers: model FLOPs utilisation.

Counted as in PaLM (arXiv 2204.02311, appendix B), so that the share can be compared with published
ones: the matrix products, 2 FLOPs for each multiply-add, and attention over the whole length,
without a discount for the half that a causal mask hides. Norms, activations, the softmax and the
rotary embedding are left out. A backward pass costs two forward passes; what gradient checkpointing
computes a second time is no model FLOP.
"""

from __future__ import annotations

import math
import re

from transformers import PretrainedConfig

GATED_DECODERS = ("llama", "qwen2", "qwen3")
"""Model types whose layers are grouped-query attention and an MLP of three matrices."""

_PEAKS = (
    (re.compile(r"\bA[18]00\b"), 312e12),
    (re.compile(r"\bH(100|200|800)\b(?!.*\b(PCIe|NVL)\b)"), 989e12),
    (re.compile(r"\bL40S\b"), 362e12),
    (re.compile(r"\bRTX 4090$"), 165e12),
)


def flops_per_token(
    config: PretrainedConfig, length: int, *, outputs: int | None = None
) -> float | None:
    """FLOPs of a forward pass, for each token of a sequence.

    Args:
        config: The model's, one of `GATED_DECODERS`.
        length: Tokens of the sequence, prompt and response.
        outputs: Width of the head: the vocabulary when None, 1 for a critic.

    Returns:
        FLOPs a token; None for a model of another type.
    """
    text = config.get_text_config()
    if text.model_type not in GATED_DECODERS:
        return None
    width, heads = text.hidden_size, text.num_attention_heads
    head = getattr(text, "head_dim", None) or width // heads
    projections = 4 * width * head * (heads + text.num_key_value_heads)
    attention = 4 * heads * head * length
    mlp = 6 * width * text.intermediate_size
    logits = 2 * width * (text.vocab_size if outputs is None else outputs)
    return float(text.num_hidden_layers * (projections + attention + mlp) + logits)


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 FLOPs a second of a device, from its makers' data sheets.

    Args:
        device_name: As `torch.cuda.get_device_name` says it.

    Returns:
        The peak; None for a device that is not known, which a slice of one (MIG) is too.
    """
    if "MIG" in device_name:
        return None
    return next((peak for name, peak in _PEAKS if name.search(device_name)), None)


def utilization(flops: float | None, seconds: float, *, peak: float | None) -> float:
    """Share of the peak that was put to use.

    Args:
        flops: Model FLOPs done in the time.
        seconds: The time.
        peak: FLOPs a second of all devices together.

    Returns:
        A share; NaN where FLOPs or peak are not known, or no time went by.
    """
    if flops is None or peak is None or seconds <= 0:
        return math.nan
    return flops / seconds / peak
