"""A run set up: models, data, log and everything with a state, new or resumed."""

from __future__ import annotations

import importlib
import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import trange
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cvpo import SAMPLERS, Method, Pool, Sampler, explained_variance
from train.checkpoint import CheckpointError, checkpoints, load_state, save_checkpoint
from train.config import Config, ConfigError, require_device
from train.data import Problem
from train.engine import Engine
from train.evaluate import Benchmark, evaluate, load_benchmarks
from train.folder import claimed, open_log
from train.grading import Grader
from train.models import (
    ModelError,
    load_actor,
    load_critic,
    load_tokenizer,
    vocabulary_of,
)
from train.record import Recorder, monte_carlo_returns
from train.rollout.backend import BACKENDS, Backend
from train.rollout.batch import Batch, ungraded
from train.rollout.collect import Collector
from train.rollout.guard import check_sync
from train.rollout.mismatch import truncated_importance
from train.seeds import seed_of
from train.sources import problems_from, prompts_of
from train.timing import Phases
from train.weigh import Weighed, Weigher
from train.world import ALONE, TrainingError, World


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
        require_device(config)
        self.world = World.join(device=config.model.device, alone=config.engine.kind == "plain")
        first = self.world.rank == 0
        folder = config.folder
        # First of all: a run that is going on there may delete the checkpoint that is read here.
        self._claim = claimed(folder) if first and folder.is_dir() else None
        self.world.barrier()
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
        self.engine, self.backend = _models(
            config,
            self.method,
            self.tokenizer,
            checkpoint,
            prompts=prompts,
            held_out=held_out,
            world=self.world,
        )
        pad_id = self.backend.pad_id
        self.grader = Grader(world=self.world)
        self.collector = Collector(
            config,
            self.method,
            problems=problems,
            prompts=prompts,
            backend=self.backend,
            sampler=self._make_sampler(problems, prompts),
            tokenizer=self.tokenizer,
            pad_id=pad_id,
            phases=self.phases,
            grader=self.grader,
        )
        self.weigher = Weigher(config, self.method, num_prompts=len(problems), phases=self.phases)
        # Nothing is written before everything above has been found in order.
        log = None
        if first:
            if self._claim is None:
                self._claim = claimed(folder)
            log = open_log(config, problems, self.step if checkpoint else -1)
        self.recorder = Recorder(log, config, self.tokenizer, self.phases)
        self.fresh = checkpoint is None
        if state is not None:
            self._restore(state)
            self.recorder.event(self.step, "resume", f"from checkpoint step-{self.step:08d}")
        self._before: Any = None  # the handler of SIGTERM that was there
        self._skipped = 0  # steps in a row in which an update was skipped
        self._stop = False
        few = prompts[: config.rollout.probe]
        self.sync(self.step, ungraded(few, few, pad_id=pad_id))

    def __enter__(self) -> Self:
        """Listens for SIGTERM, with which a cluster asks a job to end."""
        self.recorder.__enter__()
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._ask_to_stop)
        return self

    def __exit__(self, *problem: Any) -> None:
        """Ends what the run has started."""
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
        self.grader.close()
        self.recorder.__exit__(*problem)

    def steps(self) -> Iterator[int]:
        """The steps still to do, counted from 1."""
        while self.step < self.config.steps:
            self.step += 1
            yield self.step

    def sync(self, step: int, batch: Batch) -> dict[str, float]:
        """Hands the policy to the rollout backend and makes sure that it has arrived.

        Args:
            step: Updates that the policy has seen.
            batch: A few of its responses are the probe.

        Raises:
            SyncError: Engine and backend do not agree on its log-probabilities.
        """
        rollout = self.config.rollout
        self.backend.sync(self.engine.weights(), version=step)
        gap = check_sync(
            self.engine,
            self.backend,
            batch,
            step=step,
            threshold=rollout.max_logprob_gap,
            temperature=rollout.temperature,
            responses=rollout.probe,
        )
        return {"rollout/sync_gap": gap.mean}

    def kept(self, batch: Batch) -> Int[Tensor, " b"]:
        """The trajectories that the models are updated on (`rollout.truncation`)."""
        masked = self.config.rollout.truncation == "mask"
        return torch.arange(len(batch))[~batch.truncated if masked else ...]

    def ends(self, batch: Batch) -> Float[Tensor, " B"]:
        """What each trajectory's return ends with: its reward.

        With `rollout.truncation=bootstrap` it is the discounted value of the last state where a
        response was cut off, since the cut says nothing about what would have followed.
        """
        if self.config.rollout.truncation != "bootstrap" or not batch.truncated.any():
            return batch.reward
        rows = batch.truncated.nonzero().flatten()
        states = [
            batch.input_ids[row][batch.attention_mask[row].bool()].tolist() for row in rows.tolist()
        ]
        value = self._value_after(states)
        return batch.reward.index_copy(0, rows, self.config.algorithm.gamma * value)

    def corrected(
        self, advantages: Float[Tensor, "B T"], batch: Batch, log_probs: Float[Tensor, "B T"]
    ) -> Float[Tensor, "B T"]:
        """A' times the truncated importance weights, if there are to be any."""
        cap = self.config.rollout.importance_cap
        if cap is None:
            return advantages
        return advantages * truncated_importance(
            log_probs, batch.behaviour_log_probs, batch.response_mask, cap
        )

    def watch(
        self, step: int, scalars: Mapping[str, float], batch: Batch, weighed: Weighed
    ) -> None:
        """Keeps the batch of a step whose gradient was not finite; stops after several in a row.

        Raises:
            TrainingError: There were `engine.max_skipped`.
        """
        skipped = {
            name: count
            for name, count in scalars.items()
            if name.endswith("/skipped_updates") and count > 0
        }
        self._skipped = self._skipped + 1 if skipped else 0
        if not skipped:
            return
        file = self.config.folder / "skipped" / f"step-{step:08d}.pt"
        for name, count in skipped.items():
            message = f"{name}: {count:.0f}, gradient not finite; the batch is in {file.name}"
            self.recorder.event(step, "skipped_step", message)
        if self.world.rank == 0:
            file.parent.mkdir(exist_ok=True)
            torch.save(
                {
                    "batch": batch.state_dict(),
                    "advantages": weighed.advantages,
                    "returns": weighed.returns,
                },
                file,
            )
        limit = self.config.engine.max_skipped
        if self._skipped >= limit:
            raise TrainingError(
                f"step {step}: the gradient was not finite in {limit} steps in a row; their "
                f"batches are in {file.parent}, the last checkpoint is good. Look for NaN or huge "
                "rewards and values there; lower the learning rates, or raise engine.max_skipped"
            )

    def stopping(self) -> bool:
        """Whether any process has been asked to end (SIGTERM)."""
        return bool(self.world.sum(torch.tensor(float(self._stop))).item())

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
            self.recorder.event(
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
                grader=self.grader,
                step=step,
            )
        return self.recorder.evaluation(step, rows)

    def save(self, step: int) -> None:
        """A checkpoint of everything that has a state."""
        # Before the checkpoint: a run resumed from it has this line, as one that went on has.
        self.recorder.event(step, "checkpoint", f"step-{step:08d}")
        totals = self.recorder.totals
        with self.phases("save"):
            if self.world.rank > 0:  # takes part in gathering what rank 0 writes
                self.engine.save(Path())
                return
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
        self, problems: Sequence[Problem], prompts: Sequence[Sequence[int]]
    ) -> Sampler:
        """The configured sampler, with all that it may know of this run.

        Raises:
            ConfigError: It needs what the run lacks.
        """
        difficulties = [problem.difficulty for problem in problems]
        measured = [difficulty for difficulty in difficulties if difficulty is not None]
        complete = len(measured) == len(problems)

        def predict(prompt: Int[Tensor, " M"]) -> Float[Tensor, " M"]:
            with self.phases("values"):
                return self._value_after([prompts[i] for i in prompt.tolist()])

        try:
            pool = Pool(
                num_prompts=len(problems),
                seed=self.config.seed,
                steps=self.config.steps,
                rollouts=self.config.rollout.samples,
                difficulty=torch.tensor(measured, dtype=torch.float64) if complete else None,
                predict=predict if self.method.critic else None,
            )
            return _sampler_class(self.config.rollout.sampler)(pool)
        except ValueError as error:
            raise ConfigError(f"rollout.sampler: {error}") from error

    def _value_after(self, states: Sequence[Sequence[int]]) -> Float[Tensor, " M"]:
        """V of states that end with these tokens: read before a next one, whichever it is."""
        pad_id = self.backend.pad_id
        batch = ungraded(states, [[pad_id]] * len(states), pad_id=pad_id)
        return self.engine.values(batch)[:, 0]

    def _ask_to_stop(self, *_: object) -> None:
        self._stop = True

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
    config: Config, tokenizer: PreTrainedTokenizerBase, path: str, world: World = ALONE
) -> Backend:
    """The configured rollout backend with the weights at a path."""
    rollout = config.rollout
    settings: dict[str, Any] = {
        "dtype": config.model.dtype,
        "batch_size": rollout.batch_size,
        "world": world,
    }
    if rollout.backend == "vllm":
        settings |= {
            "tensor_parallel": rollout.tensor_parallel,
            "memory_share": rollout.memory_share,
            "max_model_len": rollout.max_model_len,
        }
    else:
        settings["device"] = config.model.device
    backend: Backend = BACKENDS[rollout.backend].open(path, tokenizer, **settings)
    return backend


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
    world: World,
) -> tuple[Engine, Backend]:
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
    engine = Engine(config, method, actor=actor, critic=critic, reference=reference, world=world)
    if checkpoint:
        engine.load(checkpoint)
    backend = load_policy(config, tokenizer, path, world)
    world.check()  # a rollout engine may have made a process group of its own
    require_indifference_to_padding(engine, prompts[0], pad_id=backend.pad_id, name=path)
    return engine, backend


def _sampler_class(name: str) -> Callable[[Pool], Sampler]:
    """A sampler of cvpo's by its name, or anybody's by `module:Class`.

    Raises:
        ConfigError: There is no such module or class.
    """
    module, colon, attribute = name.partition(":")
    if not colon:
        return SAMPLERS[name]
    try:
        found: Callable[[Pool], Sampler] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"rollout.sampler {name}: {error}") from error
    return found


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
