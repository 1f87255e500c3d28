"""The policy as a function: tokens in, log-probabilities and entropies of the responses out.

Logits of a whole micro-batch never stand in memory together: 6144 tokens of a vocabulary of 152 000
would take 3.7 GB, and their gradient as much again. The head takes the states a chunk at a time and
computes each chunk again when its gradient is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

Scored = tuple[Float[Tensor, " n"], Float[Tensor, " n"]]
"""log pi(token) and entropy, in nats."""


class Policy(nn.Module):
    """A causal language model that answers with log-probabilities.

    Attributes:
        actor: The language model.
        head: The output layer; None where the logits are not a plain linear map of the last hidden
            state (capped or scaled ones). The actor is then asked for whole logits.
    """

    def __init__(self, actor: PreTrainedModel, *, rows: int) -> None:
        """Wraps a model.

        Args:
            actor: Any causal language model.
            rows: Logit rows that are held at once.
        """
        super().__init__()
        self.actor = actor
        self.rows = rows
        layer = _linear_output(actor)
        self.head = None if layer is None else _Head(layer)

    def forward(
        self,
        inputs: Mapping[str, Any],
        states: Int[Tensor, " n"],
        targets: Int[Tensor, " n"],
        *,
        temperature: float,
        entropy_gradient: bool = False,
    ) -> Scored:
        """log pi(token) and entropy (nats) of n tokens, each [n] in float32.

        Args:
            inputs: Of the model: b sequences of L tokens, or 1 of N packed ones.
            states: Where each token is predicted, in the flattened hidden states [b L].
            targets: The tokens.
            temperature: Of the rollouts: the policy is the softmax of logits / temperature.
            entropy_gradient: Whether the entropy is trained; where it is only watched, its graph
                would cost memory for nothing.
        """
        if self.head is None:
            logits = self.actor(**inputs, use_cache=False).logits.flatten(0, 1)[states]
            return _in_chunks(
                lambda part: part, logits, targets, self.rows, temperature, entropy_gradient
            )
        trunk = self.actor.base_model(**inputs, use_cache=False)
        hidden = trunk.last_hidden_state.flatten(0, 1)[states]
        scored: Scored = self.head(hidden, targets, self.rows, temperature, entropy_gradient)
        return scored


class _Head(nn.Module):
    """The output layer, from hidden states to log-probabilities.

    It owns the layer's parameters (as the model does), so that whoever shards parameters by module
    finds them where they are used.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = layer.weight
        self.bias = layer.bias

    def forward(
        self,
        hidden: Float[Tensor, "n H"],
        targets: Int[Tensor, " n"],
        rows: int,
        temperature: float,
        entropy_gradient: bool,
    ) -> Scored:
        return _in_chunks(
            lambda part: linear(part, self.weight, self.bias),
            hidden,
            targets,
            rows,
            temperature,
            entropy_gradient,
        )


def _in_chunks(
    logits_of: Callable[[Tensor], Tensor],
    inputs: Float[Tensor, "n ..."],
    targets: Int[Tensor, " n"],
    rows: int,
    temperature: float,
    entropy_gradient: bool,
) -> Scored:
    def scored(part: Tensor, chosen: Tensor) -> Scored:
        logits = logits_of(part).float() / temperature
        normalizer = logits.logsumexp(-1)
        log_probs = logits.gather(-1, chosen[:, None]).squeeze(-1) - normalizer
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
            entropy = normalizer - (logits.softmax(-1) * logits).sum(-1)
        return log_probs, entropy

    if len(inputs) <= rows:
        return scored(inputs, targets)
    found = []
    for part, chosen in zip(inputs.split(rows), targets.split(rows), strict=True):
        if torch.is_grad_enabled():
            found.append(checkpoint(scored, part, chosen, use_reentrant=False))
        else:
            found.append(scored(part, chosen))
    log_probs, entropy = zip(*found, strict=True)
    return torch.cat(log_probs), torch.cat(entropy)


@torch.no_grad()
def _linear_output(actor: PreTrainedModel) -> nn.Linear | None:
    """The output layer, if the logits are that of the last hidden state and nothing more."""
    layer = actor.get_output_embeddings()
    if not isinstance(layer, nn.Linear):
        return None
    tokens = torch.tensor([[1, 2]], device=actor.device)
    trunk = actor.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    whole = actor(input_ids=tokens, use_cache=False).logits
    return layer if torch.equal(linear(trunk, layer.weight, layer.bias), whole) else None
