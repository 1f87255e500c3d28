"""A run's configuration: YAML file, then ``key=value`` overrides, checked before anything starts.

Every key has one meaning and a default that works on a laptop. A key that nobody reads is refused,
with the nearest one suggested; so is a combination that could not run.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from cvpo import METHODS, SAMPLERS, CurriculumConfig, Curve, Method, StochasticityConfig
from cvpo.stochasticity import Arm
from train.data import TEMPLATES

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]
Verifier = Literal["exact", "normalized", "symbolic"]


class ConfigError(ValueError):
    """The configuration cannot be run; the message names the key and what to do."""


class Section(BaseModel):
    """A group of keys. Unknown ones are an error, and nothing changes after the start."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="wrap")
    @classmethod
    def _yes_is_no_number(cls, value: Any, check: ValidatorFunctionWrapHandler) -> Any:
        found = check(value)
        if isinstance(value, bool) and not isinstance(found, bool):
            raise ValueError("yes or no (true, false) stands where a number belongs")
        return found


class Model(Section):
    """Which actor, and which critic."""

    path: Text
    """A folder that `save_pretrained` wrote, or a hub id: any causal language model."""
    critic_path: Text | None = None
    """Where the critic's trunk comes from; the actor's `path` when null."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 under DeepSpeed only, which keeps float32 master weights: without them small updates
    would vanish."""
    device: str = "cpu"

    @field_validator("device")
    @classmethod
    def _a_device(cls, device: str) -> str:
        try:
            kind = torch.device(device).type
        except RuntimeError:
            raise ValueError("is no device of PyTorch; write cpu, cuda or cuda:1, say") from None
        if kind == "meta":
            raise ValueError("computes nothing; write cpu, cuda or cuda:1, say")
        return device


class Dataset(Section):
    """Problems from a file, a folder, a hub id or the built-in task."""

    source: Text
    """Path, hub id `org/name`, or `addition`."""
    split: str = "train"
    name: str | None = None
    """What the run log calls it; the source's own name when null."""
    limit: Count | None = None
    """Use the first so many problems; null: all. `addition` draws so many; null: 256."""
    levels: Annotated[tuple[int, ...], Field(min_length=1)] | None = None
    """Only problems of these levels."""
    deduplicate: bool = False


class Data(Section):
    """What is trained on, and how a problem becomes a prompt."""

    train: Dataset
    template: str = "none"
    """none | chat | dapo | boxed, or a text of your own with {problem} in it."""
    max_prompt_tokens: Count = 1024

    @field_validator("template")
    @classmethod
    def _holds_the_problem(cls, template: str) -> str:
        if template not in TEMPLATES and "{problem}" not in template:
            raise ValueError(
                f"must be one of {', '.join(TEMPLATES)}, or a text with {{problem}} in it"
            )
        return template


class Sampling(Section):
    """How a response is sampled."""

    temperature: Annotated[float, Field(ge=1e-6, allow_inf_nan=False)] = 1.0
    """Below the bound float32 overflows; greedy decoding is reached long before it."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_tokens: Count = 72


class Rollout(Sampling):
    """Rollouts of a training step."""

    backend: Literal["transformers", "vllm"] = "transformers"
    sampler: str = "shuffled-epochs"
    """One of cvpo's, or your own as module:Class, made from a `cvpo.Pool`."""
    prompts: Count = 32
    """Groups in a step."""
    samples: Count = 8
    """Rollouts of each prompt."""
    batch_size: Count = 256
    """Responses that are generated side by side."""
    lag: Literal[0, 1] | None = None
    """1: batch t+1 comes from the weights of before update t. Null: the method's own."""
    max_refills: Annotated[int, Field(ge=0)] = 3
    """What dynamic sampling or the sampler drops is replaced in so many extra rounds at most."""
    overlong_cache: Annotated[int, Field(ge=0)] | None = None
    """Length of the zone before max_tokens in which the overlong penalty grows; null: a fifth."""
    truncation: Literal["terminal", "mask", "bootstrap"] = "terminal"
    """A response that was cut off: it failed; it is left out of the update; or its return goes on
    with the critic's value of where it was cut."""
    tensor_parallel: Count = 1
    """vllm: processes that share one engine."""
    memory_share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """vllm: of a device's memory, for its weights and KV cache."""
    max_model_len: Count | None = None
    """vllm: positions of prompt and response; null: the model's own number."""
    probe: Count = 8
    """Responses whose log-probabilities are compared with the trainer's after every weight sync."""
    max_logprob_gap: Positive = 0.01
    """Largest mean difference of them, in nats, with which the run goes on."""
    importance_cap: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    """Multiply a token's advantage by min(pi_trainer / pi_rollout, cap); null: do not."""


class Algorithm(Section):
    """The method's numbers. Null keeps what the method declares (`cvpo/estimator.py`)."""

    gamma: Share = 1.0
    lambda_critic: Share | None = None
    lambda_policy: Share | None = None
    length_adaptive_alpha: Positive | None = None
    """Replaces alpha where lambda_policy adapts to the length; other methods ignore it."""
    clip_low: BelowOne | None = None
    clip_high: NonNegative | None = None
    reduction: Literal["token", "sequence", "fixed"] | None = None
    lm_coefficient: NonNegative | None = None
    whiten: Literal["none", "scale", "full"] = "none"
    kl_coefficient: NonNegative = 0.0
    entropy_coefficient: NonNegative = 0.0
    dynamic_sampling: bool | None = None
    overlong_penalty: bool | None = None
    stochasticity: bool | None = None
    curriculum: bool | None = None


class Stochasticity(Section):
    """W_S; see `cvpo.StochasticityConfig` for what each key decides."""

    alpha_p: NonNegative = 0.3
    alpha_n: BelowOne = 0.3
    lambda_p: NonNegative = 50.0
    lambda_n: NonNegative = 50.0
    arm: Arm = "literal"
    mu: Literal["group", "outcome_group"] = "group"
    signal: Literal["std", "variance"] = "std"
    sharpness_unit: Literal["absolute", "deviation_sd"] = "absolute"

    def declared(self) -> StochasticityConfig:
        """The method's own configuration object."""
        return StochasticityConfig(**self.model_dump())


class Curriculum(Section):
    """Tracker, detector and W_D; see `cvpo.CurriculumConfig` for what each key decides."""

    discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    detector: Literal["printed", "pooled"] = "printed"
    quantifier: Literal["mean", "all", "fraction"] = "mean"
    fraction: Annotated[float, Field(gt=0, le=1)] = 0.9
    min_prompts: Count = 1
    low: Share = 0.3
    high: Share = 0.8
    low_delta: NonNegative = 0.05
    high_delta: Finite = 0.03
    window: Annotated[int, Field(ge=2, multiple_of=2)] = 8
    margin: NonNegative = 0.01
    z: NonNegative = 1.645
    early: tuple[Finite, Finite, Finite, Finite] = (1.6, -0.2, 2.0, 1.2)
    bottleneck: tuple[Finite, Finite, Finite, Finite] = (4.1, -0.1, 2.0, 0.9)
    round_steps: Count | None = None
    """Steps of a round; null: a round is one pass over the prompts."""

    @model_validator(mode="after")
    def _low_below_high(self) -> Curriculum:
        if self.low >= self.high:
            raise ValueError(f"low ({self.low}) must be below high ({self.high})")
        return self

    def declared(self) -> CurriculumConfig:
        """The method's own configuration object."""
        given = self.model_dump(exclude={"round_steps"})
        given |= {"early": Curve(*self.early), "bottleneck": Curve(*self.bottleneck)}
        return CurriculumConfig(**given)


class Optimizer(Section):
    """AdamW and how a step is cut into updates."""

    lr: Positive
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    weight_decay: NonNegative = 0.0
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises from 0."""
    minibatches: Count = 4
    """Optimiser updates in one pass over a step's trajectories."""
    passes: Count = 1
    max_grad_norm: Positive = 1.0


class Actor(Optimizer):
    """The policy's optimiser."""

    lr: Positive = 2e-4
    warmup_steps: Annotated[int, Field(ge=0)] = 5


class Critic(Optimizer):
    """The critic's optimiser."""

    lr: Positive = 3e-4
    value_clip: Positive | None = None


class Engine(Section):
    """What computes gradients."""

    kind: Literal["plain", "deepspeed"] = "plain"
    """deepspeed: one process a device, launched by torchrun or deepspeed."""
    stage: Literal[0, 1, 2, 3] = 2
    """ZeRO: nothing sharded; optimiser; gradients too; parameters too."""
    offload_optimizer: bool = False
    """Keep the optimiser's state in the machine's memory, not the device's."""
    offload_parameters: bool = False
    """The same for parameters; stage 3 only."""
    checkpoint_activations: bool = False
    """Compute a layer's activations again in the backward pass, for memory."""
    max_skipped: Count = 5
    """Steps in a row in which an update was skipped for its gradient before the run stops."""
    micro_batch_tokens: Count = 16384
    """Prompt and response slots, padding included, of one forward pass on one device."""
    packed: bool | None = None
    """Sequences one after the other, without padding; null: where the model's attention can."""
    logit_rows: Count = 1024
    """Tokens whose logits are held at once; each takes the vocabulary times four bytes, a few times
    over."""
    threads: Count | None = None
    """CPU threads; null leaves PyTorch's own choice."""


class Pretraining(Section):
    """Value pretraining: the actor frozen, the critic fitted to Monte-Carlo returns."""

    max_steps: Annotated[int, Field(ge=0)] | None = None
    """Rollout batches at most; null: the method's own (50 in VAPO, 21 in CVPO). Methods without
    value pretraining ignore it."""
    passes: Count = 2
    """Passes over each batch."""
    min_explained_variance: Annotated[float, Field(lt=1)] | None = 0.1
    """Stop as soon as rollouts not yet fitted are explained this well and the squared error is
    below 1; null: always max_steps."""


class Evaluation(Sampling):
    """avg@k and pass@k on held-out problems."""

    benchmarks: tuple[Dataset, ...] = ()
    every: Annotated[int, Field(ge=0)] = 25
    """Steps between evaluations; there is always one before the first and after the last; 0:
    only those two."""
    samples: Count = 4
    """k: responses of each problem."""
    verifiers: tuple[Verifier, ...] = ("exact", "normalized", "symbolic")


class Checkpoints(Section):
    """When to save, and how many to keep."""

    every: Count = 25
    keep: Count = 2


class Log(Section):
    """What the run log keeps."""

    trajectories_every: Count = 1
    text_share: Share = 1.0
    """Share of trajectories whose text and token ids are kept (`score` needs the ids)."""
    tokens_every: Annotated[int, Field(ge=0)] = 25
    """Steps between the tables of values by token and of critic calibration; 0: never."""
    tensorboard: bool = True


class Warmstart(Section):
    """The supervised warm start on the built-in task's corpus."""

    output: Text = "runs/warmstart"
    steps: Count = 1600
    batch_size: Count = 48
    lr: Positive = 3e-3
    warmup_steps: Annotated[int, Field(ge=0)] = 50
    seed: int = 0
    hidden_size: Count = 96
    layers: Count = 3
    heads: Count = 4
    intermediate_size: Count = 288


class Config(Section):
    """Everything that decides a run."""

    method: str = "cvpo"
    seed: Annotated[int, Field(ge=0)] = 1
    steps: Count = 100
    run_dir: Text = "runs/{method}-{seed}"
    """Where the run log and the checkpoints go; {method} and {seed} are filled in."""
    verifier: Verifier = "exact"
    """Makes the training reward, and is the headline of evaluations."""
    model: Model
    data: Data
    rollout: Rollout = Rollout()
    algorithm: Algorithm = Algorithm()
    stochasticity: Stochasticity = Stochasticity()
    curriculum: Curriculum = Curriculum()
    actor: Actor = Actor()
    critic: Critic = Critic()
    engine: Engine = Engine()
    pretraining: Pretraining = Pretraining()
    evaluation: Evaluation = Evaluation()
    checkpoints: Checkpoints = Checkpoints()
    log: Log = Log()
    warmstart: Warmstart = Warmstart()

    @model_validator(mode="after")
    def _runnable(self) -> Config:
        if self.method not in METHODS:
            raise ValueError(f"method: {unknown(self.method, METHODS)}")
        if ":" not in self.rollout.sampler and self.rollout.sampler not in SAMPLERS:
            raise ValueError(f"rollout.sampler: {unknown(self.rollout.sampler, SAMPLERS)}")
        declared = METHODS[self.method]
        trajectories = self.rollout.prompts * self.rollout.samples
        for section, optimizer in (("actor", self.actor), ("critic", self.critic)):
            if optimizer.minibatches > trajectories:
                raise ValueError(
                    f"{section}.minibatches: {optimizer.minibatches} updates of "
                    f"{trajectories} trajectories (rollout.prompts x rollout.samples); lower it"
                )
        if self.rollout.samples < 2 and not declared.critic:
            raise ValueError(
                f"rollout.samples: {self.method} compares rollouts of one prompt with each other "
                "and needs at least 2"
            )
        algorithm = self.algorithm
        if algorithm.stochasticity and not declared.critic:
            raise ValueError(
                f"algorithm.stochasticity: W_S is made of a critic's values, and {self.method} "
                "has no critic"
            )
        if self.rollout.truncation == "bootstrap" and not declared.critic:
            raise ValueError(
                f"rollout.truncation: bootstrap takes a critic's value, and {self.method} has no "
                "critic; use terminal or mask"
            )
        adapts = declared.length_adaptive_alpha is not None
        if adapts and None not in (algorithm.lambda_policy, algorithm.length_adaptive_alpha):
            raise ValueError(
                "algorithm.lambda_policy and algorithm.length_adaptive_alpha exclude each other; "
                "set one of them to null"
            )
        if self.rollout.overlong_cache is not None and (
            self.rollout.overlong_cache > self.rollout.max_tokens
        ):
            raise ValueError("rollout.overlong_cache must not exceed rollout.max_tokens")
        names = [benchmark_name(benchmark) for benchmark in self.evaluation.benchmarks]
        if len(set(names)) < len(names):
            raise ValueError(f"evaluation.benchmarks: names must differ, got {names}")
        if self.model.dtype != "float32" and self.engine.kind == "plain":
            raise ValueError(
                f"model.dtype: {self.model.dtype} needs float32 master weights, which "
                "engine.kind=deepspeed keeps and plain PyTorch does not; use float32"
            )
        if self.model.dtype != "float32" and self.engine.stage == 0:
            raise ValueError(
                f"model.dtype: {self.model.dtype} needs engine.stage 1 or higher: DeepSpeed keeps "
                "no float32 master weights at 0"
            )
        if self.engine.offload_parameters and self.engine.stage < 3:
            raise ValueError("engine.offload_parameters: only engine.stage=3 shards parameters")
        if self.engine.offload_optimizer and self.engine.stage == 0:
            raise ValueError("engine.offload_optimizer: needs engine.stage 1 or higher")
        if self.verifier not in self.evaluation.verifiers:
            raise ValueError(
                f"evaluation.verifiers must contain the headline verifier {self.verifier}"
            )
        return self

    @property
    def folder(self) -> Path:
        """The run's folder."""
        filled = self.run_dir.replace("{method}", self.method).replace("{seed}", f"{self.seed}")
        return Path(filled).expanduser()

    def declared(self) -> Method:
        """The method with this run's overrides in it."""
        method = METHODS[self.method]
        names = {field.name for field in fields(Method)}
        given = {
            name: value
            for name, value in self.algorithm.model_dump().items()
            if name in names and value is not None
        }
        if method.length_adaptive_alpha is None:
            given.pop("length_adaptive_alpha", None)
        elif self.algorithm.lambda_policy is not None:
            given["length_adaptive_alpha"] = None
        if self.rollout.lag is not None:
            given["lag"] = self.rollout.lag
        if self.pretraining.max_steps is not None and method.value_pretraining_steps:
            given["value_pretraining_steps"] = self.pretraining.max_steps
        return replace(method, **given)

    def resolved(self) -> dict[str, Any]:
        """Plain data for the run log: every key, and what the method came to."""
        return {**self.model_dump(mode="json"), "declared": asdict(self.declared())}


def require_device(config: Config) -> None:
    """Makes sure that the models' device is here; a configuration can be read without it.

    Raises:
        ConfigError: It is not.
    """
    kind = torch.device(config.model.device).type
    here = torch.accelerator.current_accelerator(check_available=True)
    if kind != "cpu" and (here is None or kind != here.type):
        raise ConfigError(
            f"model.device: {config.model.device}: PyTorch finds no such device on this machine; "
            "write cpu"
        )


def benchmark_name(dataset: Dataset) -> str:
    """What a benchmark is called in logs and tables."""
    return dataset.name or Path(dataset.source).stem


def load_config(file: Path | None, overrides: Sequence[str] = ()) -> Config:
    """Reads YAML, applies ``section.key=value`` overrides (values are YAML too) and checks all.

    Args:
        file: A YAML mapping; the laptop configuration when None. With the key ``extends`` it holds
            only what differs from another file beside it.
        overrides: As typed on the command line.

    Raises:
        ConfigError: Unreadable file, unknown key, bad value or impossible combination. The message
            names the file and the key's path and suggests the nearest known key.
    """
    path = file or Path(__file__).parent / "configs" / "laptop.yaml"
    raw = _read(path, ())
    for override in overrides:
        _apply(raw, override)
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        lines = [_explain(problem) for problem in error.errors()]
        raise ConfigError(f"{path}: " + "\n  ".join(lines)) from None


def _read(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    """A file's keys, over those of the file that it extends.

    Args:
        path: The file.
        above: The files that extend it.
    """
    if path.resolve() in above:
        raise ConfigError(f"{path}: extends itself, by way of {above[-1].name}")
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: must be a mapping of keys, is {type(raw).__name__}")
    keys: dict[str, Any] = raw
    extended = keys.pop("extends", None)
    if extended is None:
        return keys
    if not isinstance(extended, str):
        raise ConfigError(f"{path}: extends: must be the name of a file beside it")
    below = _read(path.parent / extended, (*above, path.resolve()))
    return _over(below, keys)


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Keys of `above` take the place of those of `below`, section by section."""
    merged = dict(below)
    for key, value in above.items():
        held = merged.get(key)
        if isinstance(held, dict) and isinstance(value, dict):
            value = _over(held, value)
        merged[key] = value
    return merged


def unknown(name: str, known: Mapping[str, Any] | Sequence[str]) -> str:
    """'x is unknown; did you mean y?', or the list of what is known."""
    near = difflib.get_close_matches(name, list(known), n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    return f"{name!r} is unknown; {hint}"


class _Loader(yaml.SafeLoader):
    """YAML in which a key that stands twice is an error, not a silent choice of the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for name, _ in node.value:
            key = (name.tag, name.value)
            if isinstance(name, yaml.ScalarNode) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {name.value!r} stands twice", name.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _apply(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"{override!r}: overrides are written section.key=value")
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{key}: {text!r} is not a YAML value: {error}") from error
    if isinstance(value, str):
        value = _number(value)
    *parents, last = key.split(".")
    place = raw
    for parent in parents:
        place = place.setdefault(parent, {})
        if not isinstance(place, dict):
            raise ConfigError(f"{key}: {parent} holds a value, not keys")
    place[last] = value


def _number(text: str) -> float | str:
    # YAML 1.1 reads 3e-4 as text, since it lacks a dot; everybody who types it means the number.
    try:
        return float(text)
    except ValueError:
        return text


def _explain(problem: Mapping[str, Any]) -> str:
    path = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        *parents, last = problem["loc"]
        return f"{path}: {unknown(str(last), list(_keys_at(parents)))}"
    if problem["type"] == "missing":
        return f"{path}: is missing and has no default"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{path}: {message} (got {problem['input']!r})" if path else message


def _keys_at(parents: Sequence[str | int]) -> Iterator[str]:
    section: type[BaseModel] = Config
    for parent in parents:
        if isinstance(parent, int):
            continue
        annotation = section.model_fields[parent].annotation
        inner = getattr(annotation, "__args__", (annotation,))[0]
        section = inner if isinstance(inner, type) else section
    yield from section.model_fields
