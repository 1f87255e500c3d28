"""Peers' scalars: lines gathered to one row per step, and their names in our terms."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd

from analysis.sources.source import ranges

_NAMED = 5  # scalars that a note names

SAME_MEANING: dict[str, str] = {
    # verl. A score is what the reward function gave; `critic/rewards` has the KL penalty taken off.
    "critic/score/mean": "reward/mean",
    "response_length/mean": "length/mean",
    "response_length/clip_ratio": "truncated/rate",  # responses of the greatest length
    "actor/entropy": "policy/entropy",
    "actor/entropy_loss": "policy/entropy",
    "actor/pg_loss": "policy/loss",
    "actor/grad_norm": "policy/grad_norm",
    "actor/lr": "policy/lr",
    "critic/vf_loss": "critic/loss",  # it has the factor 1/2 too
    "timing_s/gen": "seconds/rollout",
    "timing/gen": "seconds/rollout",
    "timing_s/reward": "seconds/score",
    "timing_s/update_actor": "seconds/actor",
    "timing/update_actor": "seconds/actor",
    "timing_s/update_critic": "seconds/critic",
    "timing/update_critic": "seconds/critic",
    "timing_s/testing": "seconds/eval",
    "timing_s/save_checkpoint": "seconds/save",
    # TRL, as the Hugging Face trainer hands it to TensorBoard
    "train/reward": "reward/mean",
    "train/completions/mean_length": "length/mean",
    "train/completion_length": "length/mean",
    "train/completions/clipped_ratio": "truncated/rate",
    "train/entropy": "policy/entropy",
    "train/kl": "policy/kl",
    "train/clip_ratio/low_mean": "policy/clip_low",
    "train/clip_ratio/high_mean": "policy/clip_high",
    "train/grad_norm": "policy/grad_norm",
    "train/learning_rate": "policy/lr",
}
"""Peer's scalar -> ours (`cvpo.runlog.METRICS`) of the same definition.

Where a log has two of one meaning, the first listed counts and the other keeps its name. Left out
on purpose: verl's `critic/vf_explained_var` (against lambda-returns, not Monte-Carlo returns),
`actor/pg_clipfrac` (both bounds together), `actor/ppo_kl` (k1, not k3), `perf/total_num_tokens`
(of one step, prompts included), `val-core/...` (which verifier judged is not said).
"""

OTHER_DEFINITION: dict[str, str] = {
    "metrics.critic/explained_variance": "another definition: critic/vf_explained_var, where it is "
    "logged, is against lambda-returns",
    "metrics.policy/clip_low": "not told from the upper bound: see actor/pg_clipfrac",
    "metrics.policy/clip_high": "not told from the lower bound: see actor/pg_clipfrac",
    "metrics.tokens": "no running total",
    "metrics.device_seconds": "no running total",
}
"""Reasons for `Source.missing`."""


def gather_steps(
    lines: Iterable[tuple[int, Mapping[str, float]]],
) -> tuple[pd.DataFrame, list[str]]:
    """One row per step from lines of a step and scalars, in the order they were logged.

    Lines of one step that log different scalars (training, then validation) are one row. A line
    that logs a scalar of its step again says that the log went back, as a resumed run does: its
    values win, and what stands of later steps so far belongs to an abandoned attempt and is left
    out. Both are told.

    Returns:
        step and a float column per scalar, ascending; and the notes.
    """
    rows: dict[int, dict[str, float]] = {}
    newest = -1
    repeated: set[int] = set()
    abandoned: set[int] = set()
    strange: dict[str, list[int]] = {}
    for step, scalars in lines:
        for name, value in scalars.items():
            if not math.isfinite(value):
                strange.setdefault(name, []).append(step)
        row = rows.get(step, {})
        if not row.keys().isdisjoint(scalars):
            repeated.add(step)
            if step < newest:
                later = {other for other in rows if other > step}
                rows = {other: kept for other, kept in rows.items() if other <= step}
                abandoned |= later
                newest = step
        rows[step] = {**row, **scalars}
        newest = max(newest, step)
    repeated |= abandoned & rows.keys()
    gone = abandoned - rows.keys()
    notes = []
    if repeated:
        notes.append(
            f"steps logged more than once (was the run resumed?): {ranges(repeated)}; the later "
            "lines count"
        )
    if gone:
        notes.append(f"steps left out, from before the log went back: {ranges(gone)}")
    if strange:
        first = [f"{name} (step {ranges(where)})" for name, where in strange.items()][:_NAMED]
        more = f" and {len(strange) - _NAMED} more" if len(strange) > _NAMED else ""
        notes.append(f"logged as NaN or infinite: {', '.join(first)}{more}")
    steps = sorted(rows)
    frame = pd.DataFrame([rows[step] for step in steps], dtype=np.float64)
    frame.insert(0, "step", np.asarray(steps, dtype=np.int64))
    return frame, notes


def in_our_terms(frame: pd.DataFrame) -> pd.DataFrame:
    """Our names for the scalars that mean the same; the others keep theirs."""
    names: dict[str, str] = {}
    for peer, ours in SAME_MEANING.items():
        if peer in frame and ours not in frame and ours not in names.values():
            names[peer] = ours
    return frame.rename(columns=names)
