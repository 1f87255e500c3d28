"""A model's sizes, from its config.json alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM

from train.models import ModelError


@dataclass(frozen=True)
class Shape:
    """A dense decoder with a gated MLP."""

    parameters: int
    """Of the language model; each tensor once, however often it is used."""
    trunk: int
    """Of the model without its output layer: what a critic stands on."""
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    positions: int | None
    """Longest sequence that it was made for; None where the config does not say."""
    qk_norm: bool
    """Whether queries and keys are normalised, as in Qwen3."""

    @property
    def critic(self) -> int:
        """Parameters of a critic: the trunk, one weight for each hidden unit, and a bias."""
        return self.trunk + self.hidden + 1

    @property
    def query(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.kv_heads * self.head_dim

    @property
    def layer_matrices(self) -> int:
        """Weights that a token is multiplied with in one layer."""
        attention = 2 * self.hidden * (self.query + self.key)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def output_layer(self) -> int:
        """Weights that a token is multiplied with to get its logits."""
        return self.vocabulary * self.hidden


def shape_of(path: str) -> Shape:
    """Builds the model on the meta device, without weights, and measures it.

    Args:
        path: A folder with a config.json, or a hub id.

    Raises:
        ModelError: There is no usable configuration, or it is not that of a dense decoder with a
            gated MLP: the plan's formulas would be wrong for it.
    """
    try:
        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"model.path {path}: no configuration can be used: {reason}") from error
    text = config.get_text_config()
    heads = text.num_attention_heads
    parameters = dict(model.named_parameters())
    shape = Shape(
        parameters=sum(parameter.numel() for parameter in parameters.values()),
        trunk=sum(parameter.numel() for parameter in model.base_model.parameters()),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=getattr(text, "intermediate_size", None) or 0,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocabulary=text.vocab_size,
        positions=getattr(text, "max_position_embeddings", None),
        qk_norm=any(name.endswith("q_norm.weight") for name in parameters),
    )
    # Experts, MLPs without a gate and learned positions all show in the matrices.
    tables = 1 if shape.parameters == shape.trunk else 2
    described = shape.layers * shape.layer_matrices + tables * shape.output_layer
    found = sum(parameter.numel() for parameter in parameters.values() if parameter.ndim > 1)
    if found != described:
        raise ModelError(
            f"model.path {path}: the plan describes dense decoders with a gated MLP (Llama, "
            f"Mistral, Qwen2, Qwen3); the matrices of {type(model).__name__} hold {found:,} "
            f"weights, of such a decoder {described:,}"
        )
    return shape
