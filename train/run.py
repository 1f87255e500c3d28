"""A run set up: models, data, log and everything with a state, new or resumed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import trange
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cvpo import SAMPLERS, Method, Pool, Sampler, explained_variance
from train.checkpoint import CheckpointError, checkpoints, load_state, save_checkpoint
from train.config import Config, ConfigError
from train.data import Problem
from train.engine import ENGINES, Engine
from train.evaluate import Benchmark, evaluate, load_benchmarks
from train.folder import claimed, open_log
from train.models import (
    ModelError,
    end_of_sequence,
    load_actor,
    load_critic,
    load_tokenizer,
    padding_of,
    vocabulary_of,
)
from train.record import Recorder, monte_carlo_returns
from train.rollout.backend import BACKENDS, TransformersBackend
from train.rollout.batch import ungraded
from train.rollout.collect import Collector
from train.seeds import seed_of
from train.sources import problems_from, prompts_of
from train.timing import Phases
from train.weigh import Weigher


class Run:
    """Everything that the loop works with."""

    def __init__(self, config: Config) -> None:
        """Opens the run's folder: a new run starts, an interrupted one goes on.

        Raises:
            ConfigError: The folder holds a run of another configuration or one that is going on,
                or a prompt is too long.
            DataError: Problems cannot be read.
            ModelError: A model cannot be loaded.
            CheckpointError: The last checkpoint is damaged.
        """
        self.config, self.method = config, config.declared()
        if config.engine.threads:
            torch.set_num_threads(config.engine.threads)
        folder = config.folder
        # First of all: a run that is going on there may delete the checkpoint that is read here.
        self._claim = claimed(folder) if folder.is_dir() else None
        saved = checkpoints(folder / "checkpoints")
        self.step, checkpoint = saved[-1] if saved else (0, None)
        if checkpoint is None:
            require_warm_start(config)
        state = load_state(checkpoint) if checkpoint else None
        torch.manual_seed(seed_of(config.seed, "models"))
        self.tokenizer = load_tokenizer(_actor_path(config, checkpoint))
        problems = problems_from(config.data.train)
        prompts = prompts_of(problems, config, self.tokenizer)
        self.benchmarks: list[Benchmark] = load_benchmarks(config, self.tokenizer)
        self.phases = Phases()
        held_out = [prompt for benchmark in self.benchmarks for prompt in benchmark.prompts]
        self.engine, self.backend, pad_id = _models(
            config,
            self.method,
            self.tokenizer,
            checkpoint,
            prompts=prompts,
            held_out=held_out,
        )
        self.collector = Collector(
            config,
            self.method,
            problems=problems,
            prompts=prompts,
            backend=self.backend,
            sampler=self._make_sampler(problems, prompts, pad_id),
            tokenizer=self.tokenizer,
            pad_id=pad_id,
            phases=self.phases,
        )
        self.weigher = Weigher(config, self.method, num_prompts=len(problems), phases=self.phases)
        # Nothing is written before everything above has been found in order.
        if self._claim is None:
            self._claim = claimed(folder)
        log = open_log(config, problems, self.step if checkpoint else -1)
        self.recorder = Recorder(log, config, self.tokenizer, self.phases)
        self.fresh = checkpoint is None
        if state is not None:
            self._restore(state)
            log.event(self.step, "resume", f"from checkpoint step-{self.step:08d}")
        self.backend.sync(self.engine.weights(), version=self.step)

    def steps(self) -> Iterator[int]:
        """The steps still to do, counted from 1."""
        while self.step < self.config.steps:
            self.step += 1
            yield self.step

    def pretrain_critic(self) -> dict[str, float]:
        """Fits the critic to Monte-Carlo returns of the frozen actor's rollouts (section 6).

        A batch is judged before it is fitted, so the explained variance is that of held-out
        rollouts.
        """
        settings = self.config.pretraining
        wanted = settings.min_explained_variance
        steps = self.method.value_pretraining_steps
        if not self.method.critic or steps == 0:
            return {}
        explained = loss = math.nan
        used, enough = 0, False
        for number in trange(steps, desc="value pretraining", unit="batch"):
            batch = self.collector.frozen(number)
            with self.phases("values"):
                values = self.engine.values(batch)
            returns = monte_carlo_returns(batch, self.config.algorithm.gamma)
            mask = batch.response_mask
            explained = explained_variance(values, returns, mask=mask)
            loss = (values - returns)[mask].square().mean().item()
            enough = wanted is not None and explained > wanted and loss < 1
            if enough:
                self.recorder.charge(batch)
                break
            with self.phases("critic"):
                self.engine.update_critic(batch, returns, values, passes=settings.passes)
            self.recorder.charge(batch)
            used += 1
        if wanted is not None and not enough:
            self.recorder.log.event(
                0,
                "warning",
                f"value pretraining ended after {steps} batches with explained variance "
                f"{explained:.3f} (wanted {wanted}) and squared error {loss:.3f}; W_S rests on "
                "these values: raise pretraining.max_steps or critic.lr",
            )
        return {
            "pretraining/steps": float(used),
            "pretraining/explained_variance": explained,
            "pretraining/squared_error": loss,
            "pretraining/device_seconds": self.recorder.totals.device_seconds,
            "pretraining/tokens": float(self.recorder.totals.tokens),
        }

    def evaluate(self, step: int) -> dict[str, float]:
        """All benchmarks with the policy as it stands, into the log."""
        with self.phases("eval"):
            rows = evaluate(
                self.benchmarks,
                config=self.config,
                backend=self.backend,
                tokenizer=self.tokenizer,
                step=step,
            )
        return self.recorder.evaluation(step, rows)

    def save(self, step: int) -> None:
        """A checkpoint of everything that has a state."""
        # Before the checkpoint: a run resumed from it has this line, as one that went on has.
        self.recorder.log.event(step, "checkpoint", f"step-{step:08d}")
        totals = self.recorder.totals
        with self.phases("save"):
            save_checkpoint(
                self.config.folder / "checkpoints",
                step,
                state={
                    "collector": self.collector.state_dict(),
                    "weigher": self.weigher.state_dict(),
                    "totals": [totals.device_seconds, totals.tokens],
                    # Nothing of ours draws from it, but a model's forward pass may.
                    "torch_rng": torch.get_rng_state(),
                },
                write_models=self._write_models,
                keep=self.config.checkpoints.keep,
            )

    def due(self, every: int, step: int) -> bool:
        """Whether something that happens every so many steps, and after the last, happens now."""
        return step == self.config.steps or (every > 0 and step % every == 0)

    def _make_sampler(
        self, problems: Sequence[Problem], prompts: Sequence[Sequence[int]], pad_id: int
    ) -> Sampler:
        """The configured sampler, with all that it may know of this run.

        Raises:
            ConfigError: It needs what the run lacks.
        """
        difficulties = [problem.difficulty for problem in problems]
        measured = [difficulty for difficulty in difficulties if difficulty is not None]
        complete = len(measured) == len(problems)

        def predict(prompt: Int[Tensor, " M"]) -> Float[Tensor, " M"]:
            # V(s_0) is read where the prompt ends; which token follows does not matter.
            asked = [prompts[i] for i in prompt.tolist()]
            batch = ungraded(asked, [[pad_id]] * len(asked), pad_id=pad_id)
            with self.phases("values"):
                return self.engine.values(batch)[:, 0]

        try:
            pool = Pool(
                num_prompts=len(problems),
                seed=self.config.seed,
                steps=self.config.steps,
                rollouts=self.config.rollout.samples,
                difficulty=torch.tensor(measured, dtype=torch.float64) if complete else None,
                predict=predict if self.method.critic else None,
            )
            return SAMPLERS[self.config.rollout.sampler](pool)
        except ValueError as error:
            raise ConfigError(f"rollout.sampler: {error}") from error

    def _write_models(self, folder: Path) -> None:
        self.engine.save(folder)
        self.tokenizer.save_pretrained(folder / "actor")

    def _restore(self, state: dict[str, Any]) -> None:
        try:
            self.collector.load_state_dict(state["collector"])
            self.weigher.load_state_dict(state["weigher"])
        except (KeyError, ValueError) as error:
            raise CheckpointError(
                f"{self.config.folder}: the checkpoint does not fit this run: {error}"
            ) from error
        self.recorder.totals.device_seconds, self.recorder.totals.tokens = state["totals"]
        torch.set_rng_state(state["torch_rng"])


def require_warm_start(config: Config) -> None:
    """Says what to do where the warm start's model is asked for but was never made.

    Raises:
        ConfigError: It is not there. (Its path would be tried as a hub id, for half a minute.)
    """
    path = config.model.path
    if path == config.warmstart.output and not Path(path).exists():
        raise ConfigError(
            f"model.path {path}: no such folder; run `python -m train warmstart` first"
        )


def require_room(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], *, max_tokens: int, key: str
) -> None:
    """Says so where a model cannot read its prompts, or cannot go on for long enough.

    Args:
        model: Actor, or the critic's trunk.
        prompts: What it will be asked; none is in order.
        max_tokens: How long the response may be.
        key: Where that stands, for the message.

    Raises:
        ConfigError: A token has no embedding, or prompt and response need more positions than the
            model has.
    """
    name, known = model.name_or_path, vocabulary_of(model)
    largest = max((max(prompt) for prompt in prompts), default=0)
    if largest >= known:
        raise ConfigError(
            f"model.path {name}: knows {known} tokens, but the tokenizer writes token {largest}; "
            "actor, critic and tokenizer must belong together"
        )
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    needed = max(map(len, prompts), default=0) + max_tokens
    if limit is not None and needed > limit:
        raise ConfigError(
            f"{key}: the longest prompt and response need {needed} positions, the model {name} has "
            f"{limit}; allow shorter ones"
        )


def load_policy(
    config: Config, tokenizer: PreTrainedTokenizerBase, path: str
) -> tuple[TransformersBackend, int]:
    """A rollout backend with the weights at a path, and the padding token."""
    model = load_actor(path, dtype=config.model.dtype, device=config.model.device)
    pad_id = padding_of(model, tokenizer)
    backend = BACKENDS[config.rollout.backend](
        model,
        end_tokens=end_of_sequence(model, tokenizer),
        pad_id=pad_id,
        batch_size=config.rollout.batch_size,
    )
    return backend, pad_id


def _actor_path(config: Config, checkpoint: Path | None) -> str:
    return str(checkpoint / "actor") if checkpoint else config.model.path


def _models(
    config: Config,
    method: Method,
    tokenizer: PreTrainedTokenizerBase,
    checkpoint: Path | None,
    *,
    prompts: Sequence[Sequence[int]],
    held_out: Sequence[Sequence[int]],
) -> tuple[Engine, TransformersBackend, int]:
    start, placement = config.model.path, config.model.model_dump(include={"dtype", "device"})
    path = _actor_path(config, checkpoint)
    actor = load_actor(path, **placement)
    limit = config.rollout.max_tokens
    require_room(actor, prompts, max_tokens=limit, key="rollout.max_tokens")
    require_room(
        actor, held_out, max_tokens=config.evaluation.max_tokens, key="evaluation.max_tokens"
    )
    critic = None
    if method.critic:
        trunk = config.model.critic_path or start
        critic = load_critic(str(checkpoint / "critic") if checkpoint else trunk, **placement)
        # It reads whatever the actor may say. Rows beyond the tokenizer's are padding.
        last = min(vocabulary_of(actor), len(tokenizer)) - 1
        require_room(critic.trunk, [*prompts, [last]], max_tokens=limit, key="rollout.max_tokens")
    reference = None
    if config.algorithm.kl_coefficient:
        reference = load_actor(start, **placement).requires_grad_(False)
    engine = ENGINES[config.engine.kind](
        config, method, actor=actor, critic=critic, reference=reference
    )
    if checkpoint:
        engine.load(checkpoint)
    backend, pad_id = load_policy(config, tokenizer, path)
    require_indifference_to_padding(engine, prompts[0], pad_id=pad_id, name=path)
    return engine, backend, pad_id


def require_indifference_to_padding(
    engine: Engine, prompt: Sequence[int], *, pad_id: int, name: str
) -> None:
    """Says so where a model reads a prompt otherwise if padding stands before it.

    Rollouts and updates pad prompts on the left. A model with learned positions that takes neither
    `position_ids` nor counts the attention mask would be trained on wrong numbers in silence.

    Raises:
        ModelError: The log-probabilities of one response differ with and without padding.
    """
    tokens = list(prompt[:4])
    alone = ungraded([tokens], [tokens], pad_id=pad_id)
    beside = ungraded([tokens, [*tokens, *tokens[:3]]], [tokens, tokens], pad_id=pad_id)
    (plain, _), (padded, _) = engine.log_probs(alone), engine.log_probs(beside)
    gap = (plain[0] - padded[0]).abs().max().item()
    if not gap < 1e-3:
        raise ModelError(
            f"model.path {name}: its log-probabilities change by {gap:.3g} when padding stands "
            "before a prompt; it cannot be trained on prompts of different lengths"
        )
