"""What a step leaves in the run log, and the same scalars in TensorBoard."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from cvpo import RunLog, explained_variance, gae, terminal_rewards
from cvpo.metrics import calibration, group_outcomes
from train.config import Config, ConfigError
from train.evaluate import summarize
from train.rollout.batch import Batch
from train.seeds import generator_of
from train.timing import Phases
from train.weigh import Round, Weighed


@dataclass
class Totals:
    """Cumulative over the run's rollouts and updates, value pretraining included."""

    device_seconds: float = 0.0
    tokens: int = 0
    """Response tokens generated."""


def monte_carlo_returns(batch: Batch, gamma: float) -> Float[Tensor, "B T"]:
    """The discounted terminal reward at every response token."""
    rewards = terminal_rewards(batch.reward, batch.response_mask)
    zero = torch.zeros_like(rewards)
    return gae(rewards, zero, batch.response_mask, gamma=gamma, lam=1.0)[1]


class Recorder:
    """Writes one run's log."""

    def __init__(
        self,
        log: RunLog | None,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        phases: Phases,
    ) -> None:
        """Opens TensorBoard behind the log's last step.

        Args:
            log: Open for appending; None in the processes that write nothing.
            config: The run's.
            tokenizer: Names vocabulary entries.
            phases: The step's stopwatch.

        Raises:
            ConfigError: TensorBoard is asked for and not installed.
        """
        self.log, self.config, self.tokenizer, self.phases = log, config, tokenizer, phases
        self.totals = Totals()
        self._charged = 0.0
        self._board: Any = None
        if log is not None and config.log.tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ConfigError(f"log.tensorboard: {error}; install it, or say false") from error
            step = -1 if log.last_step is None else log.last_step
            self._board = SummaryWriter(str(Path(log.path) / "tensorboard"), purge_step=step + 1)

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes TensorBoard; the log needs no closing."""
        if self._board is not None:
            self._board.close()

    def charge(self, batch: Batch) -> None:
        """Counts a batch's tokens and the seconds since the last call as cost of the run."""
        self.totals.tokens += batch.generated_tokens
        seconds = self.phases.training_seconds()
        self.totals.device_seconds += seconds - self._charged
        self._charged = seconds

    def event(self, step: int, kind: str, message: str) -> None:
        """One row of events.jsonl."""
        if self.log is not None:
            self.log.event(step, kind, message)

    def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """One row of metrics.jsonl, the seconds by phase among it, and TensorBoard."""
        row = dict(scalars)
        row |= {f"seconds/{phase}": s for phase, s in self.phases.reset().items()}
        self._charged = 0.0
        if self.log is None:
            return
        self.log.metrics(
            step,
            time=time.time(),
            device_seconds=self.totals.device_seconds,
            tokens=self.totals.tokens,
            scalars=row,
        )
        if self._board is not None:
            for name, value in row.items():
                if math.isfinite(value):
                    self._board.add_scalar(name, value, step)
            self._board.flush()

    def step(
        self,
        step: int,
        batch: Batch,
        weighed: Weighed,
        values: Float[Tensor, "B T"] | None,
        log_probs: Float[Tensor, "B T"],
        entropy: Float[Tensor, "B T"],
    ) -> dict[str, float]:
        """Writes the step's trajectory rows and value tables; returns its scalars."""
        if self.log is None:
            return {}
        mask = batch.response_mask
        gap = (batch.behaviour_log_probs - log_probs).abs().masked_fill(~mask, 0)
        lengths = batch.lengths.clamp(min=1)
        if step % self.config.log.trajectories_every == 0:
            self._trajectories(step, batch, weighed, values, entropy, gap.sum(1) / lengths)
        returns = monte_carlo_returns(batch, self.config.algorithm.gamma)
        every = self.config.log.tokens_every
        if every and step % every == 0:
            self._tables(step, batch, values, returns)
        tokens = batch.lengths.sum().item()
        right, wrong = batch.correct >= 0.5, batch.correct < 0.5
        all_correct, all_wrong = group_outcomes(batch.correct, batch.prompt_id)
        length = batch.lengths.float()
        scalars = {
            "reward/mean": batch.reward.mean().item(),
            "accuracy/mean": batch.correct.mean().item(),
            "length/mean": length.mean().item(),
            "length/correct": length[right].mean().item(),
            "length/incorrect": length[wrong].mean().item(),
            "truncated/rate": batch.truncated.float().mean().item(),
            "format/rate": sum(a is not None for a in batch.answers) / len(batch),
            "groups/all_correct": all_correct,
            "groups/all_wrong": all_wrong,
            "groups/observed": float(len(batch.observed["prompt"])),
            "policy/entropy": entropy.masked_fill(~mask, 0).sum().item() / tokens,
            "rollout/logprob_gap": gap.sum().item() / tokens,
            "rollout/tokens": float(batch.generated_tokens),
            **weighed.diagnostics,
        }
        if values is not None:
            scalars["critic/explained_variance"] = explained_variance(values, returns, mask=mask)
        return scalars

    def round(self, step: int, ended: Round) -> dict[str, float]:
        """Writes every prompt's tracker at the end of a round; returns the detector's scalars."""
        if self.log is None:
            return {}
        report = ended.report
        n = len(ended.rows["phase"])
        self.log.prompts(ended.number, {"step": [step] * n, **ended.rows})
        if report.switched:
            self.log.event(
                step, "phase_switch", f"round {report.round}: bottleneck; {report.reason}"
            )
        return {
            "curriculum/low_delta": report.low_delta,
            "curriculum/high_delta": report.high_delta,
            "curriculum/low_count": float(report.low_count),
            "curriculum/high_count": float(report.high_count),
        }

    def evaluation(self, step: int, rows: Mapping[str, list[Any]]) -> dict[str, float]:
        """Writes an evaluation; returns its headline scalars."""
        if self.log is None or not rows["benchmark"]:
            return {}
        self.log.evals(step, rows)
        return {
            f"eval/{name}": score.mean
            for name, score in summarize(rows, verifier=self.config.verifier).items()
        }

    def _trajectories(
        self,
        step: int,
        batch: Batch,
        weighed: Weighed,
        values: Float[Tensor, "B T"] | None,
        entropy: Float[Tensor, "B T"],
        gap: Float[Tensor, " B"],
    ) -> None:
        assert self.log is not None
        mask, lengths = batch.response_mask, batch.lengths.clamp(min=1)

        def token_mean(x: Tensor) -> Tensor:
            return x.masked_fill(~mask, 0).sum(1) / lengths

        rows: dict[str, Any] = {
            "prompt_id": batch.prompt_id,
            "sample": batch.sample,
            "length": batch.lengths,
            "truncated": batch.truncated,
            "reward": batch.reward,
            "correct": batch.correct,
            "answer": batch.answers,
            "w_s": weighed.w_s,
            "w_d": weighed.w_d,
            "rho": weighed.rho,
            "round": [weighed.round] * len(batch),
            "advantage_mean": token_mean(weighed.raw),
            "entropy_mean": token_mean(entropy),
            "logprob_gap": gap,
        }
        if values is not None:
            rows |= {
                "sigma": weighed.sigma,
                "mu": weighed.mu,
                "value_first": values[:, 0],
                "value_mean": token_mean(values),
            }
        share = self.config.log.text_share
        if share > 0:
            draw = torch.rand(len(batch), generator=generator_of(self.config.seed, "text", step))
            ids = batch.response_ids
            kept = (draw < share).tolist()
            rows["response"] = [
                text if keep else None for text, keep in zip(batch.responses, kept, strict=True)
            ]
            rows["token_ids"] = [
                ids[row][mask[row]].tolist() if keep else None for row, keep in enumerate(kept)
            ]
        self.log.trajectories(step, rows)

    def _tables(
        self,
        step: int,
        batch: Batch,
        values: Float[Tensor, "B T"] | None,
        returns: Float[Tensor, "B T"],
    ) -> None:
        assert self.log is not None
        chosen = batch.response_ids[batch.response_mask].numpy()
        ids, index = np.unique(chosen, return_inverse=True)
        rows: dict[str, Any] = {
            "token_id": ids,
            "token": [self.tokenizer.decode([int(i)]) for i in ids],
            "count": np.bincount(index),
        }
        if values is not None:
            v = values[batch.response_mask].double().numpy()
            rows["value_sum"] = np.bincount(index, weights=v)
            rows["value_sq_sum"] = np.bincount(index, weights=v * v)
            self.log.calibration(
                step, calibration(values, returns, batch.response_mask, batch.correct)
            )
        self.log.tokens(step, rows)
