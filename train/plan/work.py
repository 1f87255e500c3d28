"""What a step has to do, and with which models."""

from __future__ import annotations

import math
from dataclasses import dataclass

from train.config import Config
from train.plan.layout import KEYS, Assumptions, Layout, require
from train.plan.shape import Shape


@dataclass(frozen=True)
class Models:
    """The models of a run."""

    actor: Shape
    critic: Shape | None
    """The model whose trunk the critic has."""
    reference: bool
    """Whether a frozen copy of the first policy stands beside them."""

    @property
    def trained(self) -> tuple[int, ...]:
        """Parameters of each model with an optimiser."""
        return (self.actor.parameters, *([self.critic.critic] if self.critic else []))

    @property
    def frozen(self) -> int:
        """Parameters of the reference."""
        return self.actor.parameters if self.reference else 0

    @property
    def trunks(self) -> tuple[Shape, ...]:
        """What leaves activations, one at a time."""
        return (self.actor, *([self.critic] if self.critic else []))

    @property
    def positions(self) -> float:
        """Tokens of the longest sequence that all of them can read."""
        return min(shape.positions or math.inf for shape in self.trunks)


@dataclass(frozen=True)
class Work:
    """A step's responses, their lengths in tokens, and the updates made of them."""

    trajectories: int
    prompt: float
    """Mean."""
    response: float
    """Mean."""
    longest_prompt: int
    longest_response: int
    actor_updates: int
    """Optimiser batches of one pass."""
    actor_passes: int
    critic_updates: int
    critic_passes: int
    critic: bool
    reference: bool
    lag: int

    @property
    def sequence(self) -> float:
        """Mean tokens of prompt and response."""
        return self.prompt + self.response

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and response."""
        return self.longest_prompt + self.longest_response

    @property
    def tokens(self) -> float:
        """Prompt and response tokens of the step."""
        return self.trajectories * self.sequence


def work_of(config: Config, assume: Assumptions) -> Work:
    """What a step of this run has to do.

    Raises:
        ConfigError: A mean length is not between 1 and its limit.
    """
    longest_prompt, longest_response = config.data.max_prompt_tokens, config.rollout.max_tokens
    method = config.declared()
    return Work(
        trajectories=config.rollout.prompts * config.rollout.samples,
        prompt=_mean("prompt", assume.prompt_tokens, longest_prompt, "data.max_prompt_tokens"),
        response=_mean("response", assume.response_tokens, longest_response, "rollout.max_tokens"),
        longest_prompt=longest_prompt,
        longest_response=longest_response,
        actor_updates=config.actor.minibatches,
        actor_passes=config.actor.passes,
        critic_updates=config.critic.minibatches,
        critic_passes=config.critic.passes,
        critic=method.critic,
        reference=config.algorithm.kl_coefficient > 0,
        lag=method.lag,
    )


def _mean(name: str, mean: float | None, limit: int, key: str) -> float:
    if mean is None:
        return limit
    require(
        1 <= mean <= limit,
        f"--{name}-tokens: a mean of {mean} is not between 1 and the limit {limit} ({key})",
    )
    return mean


def check_work(config: Config, layout: Layout, work: Work, actor: Shape) -> None:
    """Refuses a model or a batch that the layout's devices cannot share evenly.

    Raises:
        ConfigError: Names the key and the remedy.
    """
    able = [count for count in range(1, actor.heads + 1) if _divides_heads(actor, count)]
    require(
        layout.tensor_parallel in able,
        f"{KEYS['tensor_parallel']}: {layout.tensor_parallel} does not divide the model's "
        f"{actor.heads} heads and {actor.kv_heads} key-value heads; take one of {able}",
    )
    longest, limit = work.longest, layout.max_model_len
    require(
        limit is None or limit >= longest,
        f"{KEYS['max_model_len']}: {limit} is less than data.max_prompt_tokens + "
        f"rollout.max_tokens; raise it to {longest}",
    )
    if layout.engine == "plain":
        return
    prompts, samples = config.rollout.prompts, config.rollout.samples
    updates = [work.actor_updates, *([work.critic_updates] if work.critic else [])]
    divisor = math.lcm(layout.replicas, *(count * layout.training_devices for count in updates))
    multiple = divisor // math.gcd(divisor, samples)
    require(
        work.trajectories % divisor == 0,
        f"rollout.prompts: {prompts} x {samples} responses do not divide evenly into "
        f"{' and '.join(map(str, dict.fromkeys(updates)))} updates (actor.minibatches, "
        f"critic.minibatches) on {layout.training_devices} devices, rolled out by "
        f"{layout.replicas} replicas; take {math.ceil(prompts / multiple) * multiple} prompts",
    )


def _divides_heads(actor: Shape, count: int) -> bool:
    # With more devices than key-value heads, each keeps a copy of one.
    shared = actor.kv_heads % count == 0 or count % actor.kv_heads == 0
    return actor.heads % count == 0 and shared
