"""Actor and critic.

The actor is any causal language model of transformers; the critic is the same architecture with a
trunk of its own and a scalar head in place of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

_HEAD = "value_head.safetensors"
# RuntimeError: weights of other shapes than the configuration says.
_LOADING = (OSError, ValueError, RuntimeError, SafetensorError, StrictDataclassError)


class ModelError(ValueError):
    """A model or tokenizer that cannot be loaded or used; the message names it and says why."""


class Critic(nn.Module):
    """V(s) at every position: the trunk's last hidden state through one linear layer.

    The head starts at 0, so an unfitted critic says 0 everywhere: the middle of the rewards +-1.
    """

    def __init__(self, trunk: PreTrainedModel) -> None:
        """Puts a new head on a trunk (a model without its output layer)."""
        super().__init__()
        self.trunk = trunk
        hidden = trunk.config.get_text_config().hidden_size
        self.head = nn.Linear(hidden, 1).to(next(trunk.parameters()).dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, **inputs: Tensor) -> Float[Tensor, "B L"]:
        """Values [B, L]; entry l is V of the state that ends with token l. float32."""
        hidden = self.trunk(**inputs).last_hidden_state
        values: Tensor = self.head(hidden).squeeze(-1).float()
        return values

    def save_pretrained(self, folder: Path, *, state_dict: dict[str, Tensor] | None = None) -> None:
        """Writes trunk (as transformers does) and head: the critic's own, or the weights given."""
        if state_dict is None:
            state_dict = dict(self.state_dict())
        parts: dict[str, dict[str, Tensor]] = {"trunk": {}, "head": {}}
        for name, tensor in state_dict.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = tensor.contiguous()
        self.trunk.save_pretrained(folder, state_dict=parts["trunk"])
        save_file(parts["head"], folder / _HEAD)


def load_actor(path: str, *, dtype: str, device: str) -> PreTrainedModel:
    """Any causal language model, without dropout.

    Raises:
        ModelError: There is none at that path, or not all of its weights.
    """
    model = _load(AutoModelForCausalLM, path, dtype)
    actor: PreTrainedModel = _without_dropout(model).to(device)
    return actor


def load_critic(path: str, *, dtype: str, device: str) -> Critic:
    """A critic: the one saved at that path, or a new head on that model's trunk.

    Raises:
        ModelError: There is no model at that path.
    """
    critic = Critic(_without_dropout(_load(AutoModel, path, dtype)))
    head = Path(path) / _HEAD
    if head.is_file():
        critic.head.load_state_dict(load_file(head))
    return critic.to(device)


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer beside a model.

    Raises:
        ModelError: There is none, or it has no end-of-sequence token.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
    except _LOADING as error:
        raise ModelError(f"{path}: no tokenizer can be loaded: {_one_line(error)}") from error
    if tokenizer.eos_token_id is None:
        raise ModelError(f"{path}: the tokenizer has no end-of-sequence token")
    return tokenizer


def end_of_sequence(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that ends a response: the tokenizer's, and those of the generation config."""
    listed = getattr(model.generation_config, "eos_token_id", None)
    if listed is None:
        listed = []
    elif isinstance(listed, int):
        listed = [listed]
    return tuple(dict.fromkeys([tokenizer.eos_token_id, *listed]))


def padding_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that fills batches: the tokenizer's, or else one that ends a response."""
    pad = tokenizer.pad_token_id
    # Where none is named, transformers may invent one that the model has no embedding of.
    if isinstance(pad, int) and pad < vocabulary_of(model):
        return pad
    return end_of_sequence(model, tokenizer)[0]


def vocabulary_of(model: PreTrainedModel) -> int:
    """Tokens that the model has an embedding of."""
    weight: Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
    return len(weight)


def text_of(tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """A response as text, without special tokens."""
    text = tokenizer.decode(list(tokens), skip_special_tokens=True)
    assert isinstance(text, str)
    return text


def position_ids(attention_mask: Int[Tensor, "B L"]) -> Int[Tensor, "B L"]:
    """Positions counted from each row's first real token, whatever padding stands before it."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def _load(auto: Any, path: str, dtype: str) -> Any:
    disable_progress_bar()  # a bar for each of three small files would drown the run's own
    try:
        model, report = auto.from_pretrained(
            path, dtype=getattr(torch, dtype), output_loading_info=True
        )
    except _LOADING as error:
        raise ModelError(
            f"model.path {path}: no model can be loaded: {_one_line(error)}"
        ) from error
    if missing := sorted(report["missing_keys"]):  # transformers would draw them at random
        raise ModelError(
            f"model.path {path}: {len(missing)} weights of a {type(model).__name__} are not there, "
            f"{missing[0]} for one; give a causal language model, whole"
        )
    return model


def _without_dropout(model: Any) -> Any:
    # PPO's ratio compares two passes of one policy: with dropout it would compare two policies.
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for key in list(vars(model.config)):
        if key.endswith(("dropout", "_pdrop", "dropout_prob")) and getattr(model.config, key):
            setattr(model.config, key, 0.0)
    return model.eval()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
