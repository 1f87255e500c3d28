"""Measures, after every weight sync, whether the rollout engine computes what the trainer does.

An engine that kept old weights goes on generating fluent text, and the run learns from a policy
that nobody trains. Nothing crashes; the log-probabilities of a few tokens show it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from train.engine import Engine
from train.rollout.backend import Backend
from train.rollout.batch import Batch, Responses, pad, ungraded
from train.world import TrainingError


class SyncError(TrainingError):
    """The rollout engine does not have the trainer's policy; the message says by how much."""


@dataclass(frozen=True)
class Gap:
    """|log pi of the rollout engine - log pi of the trainer| over a probe's tokens, in nats."""

    mean: float
    max: float
    tokens: int


def check_sync(
    engine: Engine,
    backend: Backend,
    batch: Batch,
    *,
    step: int,
    threshold: float,
    temperature: float,
    responses: int = 8,
    tokens: int = 64,
) -> Gap:
    """Stops a run whose rollout engine is not where the trainer is.

    Decision: the mean over tokens is judged, not the largest. Rounding in half precision moves a
    single unlikely token by tenths of a nat; the mean it moves by thousandths.

    Args:
        engine: The trainer, after its update.
        backend: The rollout engine, after its sync.
        batch: Any trajectories, whoever generated them.
        step: For the message.
        threshold: Of the mean gap, in nats. It has to lie above the two engines' rounding (about
            1e-6 in float32 on a CPU, 1e-2 in bfloat16); an update that moves the policy by less
            than that is not told from one that never arrived, until several have added up.
        temperature: `rollout.temperature`, which the engine's log-probabilities are taken at.
        responses: How many trajectories to probe.
        tokens: How many tokens of each, from its beginning.

    Returns:
        The gap, for the log.

    Raises:
        SyncError: The mean gap is above the threshold, or not a number.
    """
    prompts, cut = _probe(batch, responses, tokens)
    found = backend.log_probs_of(prompts, cut, temperature=temperature)
    rollout = pad(prompts, Responses(cut, found, [False] * len(cut), version=0), pad_id=0)
    trainer, _ = engine.log_probs(ungraded(prompts, cut, pad_id=0))
    gaps = (trainer - rollout["behaviour_log_probs"])[rollout["response_mask"]].abs()
    gap = Gap(gaps.mean().item(), gaps.max().item(), len(gaps))
    if not gap.mean <= threshold:
        raise SyncError(
            f"step {step}: after the weight sync the rollout engine's log-probabilities are "
            f"{gap.mean:.3g} nats a token from the trainer's (at most {gap.max:.3g}; "
            f"{gap.tokens} tokens), and rollout.max_logprob_gap is {threshold:.3g}. Look for "
            "weights that did not arrive (a sync left out, a tied output layer that kept its own "
            "copy, a prefix cache of the old weights), then for another dtype or attention kernel. "
            "Raise the limit only if the gap was there before the first update too"
        )
    return gap


def _probe(batch: Batch, responses: int, tokens: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and the beginnings of their responses, from all over a batch."""
    speaking = batch.lengths.nonzero().flatten()
    count = min(responses, len(speaking))
    rows = speaking[torch.linspace(0, len(speaking) - 1, count).long()].tolist()
    P = batch.prompt_width
    real = batch.attention_mask.bool()
    prompts = [batch.input_ids[row, :P][real[row, :P]].tolist() for row in rows]
    cut = [batch.response_ids[row][batch.response_mask[row]][:tokens].tolist() for row in rows]
    return prompts, cut
