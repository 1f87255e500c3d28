import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from cvpo import policy_loss
from train import addition
from train.config import Config
from train.engine import Engine
from train.models import Critic, load_actor, load_critic
from train.passes import parts
from train.rollout.batch import Batch

MakeConfig = Callable[..., Config]
MakeBatch = Callable[..., Batch]

VOCABULARY = len(addition.VOCABULARY)
ARCHITECTURES = ("qwen2", "llama", "gpt2")


def built(architecture: str) -> PreTrainedModel:
    """Random weights. Dropout is asked for where there is any: it must be off in training."""
    torch.manual_seed(1)
    if architecture == "gpt2":
        # GPT-2 has absolute positions: counting the padding would change every number.
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY,
                n_positions=64,
                n_embd=32,
                n_layer=2,
                n_head=4,
                resid_pdrop=0.5,
                embd_pdrop=0.5,
                attn_pdrop=0.5,
                bos_token_id=None,
                eos_token_id=1,
                initializer_range=0.3,
            )
        )
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "attention_dropout": 0.5,
        "bos_token_id": None,
        "eos_token_id": 1,
        "initializer_range": 0.3,
    }
    if architecture == "llama":
        return LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False))
    return Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=True))


@pytest.fixture(scope="session")
def saved_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("architectures")
    for name in ARCHITECTURES:
        built(name).save_pretrained(folder / name)
    return {name: str(folder / name) for name in ARCHITECTURES}


@pytest.fixture
def engine_of(tiny_config: MakeConfig, saved_models: dict[str, str]) -> Callable[..., Engine]:
    def make(*overrides: str, architecture: str = "qwen2", reference: bool = False) -> Engine:
        config = tiny_config(*overrides)
        method = config.declared()
        path = saved_models[architecture]
        placement = {"dtype": "float32", "device": "cpu"}
        critic = load_critic(path, **placement) if method.critic else None
        if critic is not None:
            torch.manual_seed(2)
            nn.init.normal_(critic.head.weight)
            nn.init.normal_(critic.head.bias)
        return Engine(
            config,
            method,
            actor=load_actor(path, **placement),
            critic=critic,
            reference=load_actor(path, **placement).requires_grad_(False) if reference else None,
        )

    return make


EngineOf = Callable[..., Engine]


def advantages_like(batch: Batch, seed: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch.response_mask.shape, generator=generator)


def parameters_of(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def update_actor(engine: Engine, batch: Batch, advantages: Tensor) -> dict[str, float]:
    return engine.update_actor(batch, advantages, engine.log_probs(batch)[0])


class GradientKept(torch.optim.SGD):
    """Plain descent at rate 1, so that a step of a parameter is its gradient, negated."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=1.0)


def actor_gradient(
    engine_of: EngineOf, batch: Batch, advantages: Tensor, *overrides: str, **keywords: Any
) -> Tensor:
    """The gradient of the engine's own first update, without the clipping of its norm."""
    engine = engine_of(
        "actor.minibatches=1",
        "actor.max_grad_norm=1e30",
        "actor.lr=1",
        "actor.warmup_steps=0",
        *overrides,
        **keywords,
    )
    engine.policy.optimizer = GradientKept(engine.actor)  # type: ignore[assignment]
    before = parameters_of(engine.actor)
    # Off the policy, so that the loss sees ratios other than 1, clipped ones among them.
    old = engine.log_probs(batch)[0] + 0.3 * advantages_like(batch, seed=6)
    engine.update_actor(batch, advantages, old)
    return before - parameters_of(engine.actor)


# --------------------------------------------------------------------------------- forward passes


def alone(model: nn.Module, batch: Batch, row: int) -> tuple[Tensor, int, list[int]]:
    """What the model says of one trajectory without padding, prompt length and tokens."""
    ids = batch.input_ids[row][batch.attention_mask[row].bool()]
    prompt = int(batch.attention_mask[row, : batch.prompt_width].sum())
    with torch.no_grad():
        out = model(input_ids=ids[None])
    found: Tensor = out if isinstance(out, Tensor) else out.logits
    return found[0], prompt, ids.tolist()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_entropy_are_those_of_each_sequence_alone(
    engine_of: EngineOf, ragged_batch: MakeBatch, architecture: str, temperature: float
) -> None:
    engine = engine_of(
        f"rollout.temperature={temperature}",
        "engine.micro_batch_tokens=40",
        architecture=architecture,
    )
    batch = ragged_batch()
    log_probs, entropy = engine.log_probs(batch)
    for row, length in enumerate(batch.lengths.tolist()):
        logits, prompt, ids = alone(engine.actor, batch, row)
        for t in range(length):
            # The token at prompt + t is predicted one place before it.
            distribution = (logits[prompt + t - 1] / temperature).log_softmax(-1)
            assert log_probs[row, t].item() == pytest.approx(
                distribution[ids[prompt + t]].item(), abs=2e-5
            )
            H = -(distribution.exp() * distribution).sum().item()
            assert entropy[row, t].item() == pytest.approx(H, abs=2e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_values_are_of_the_state_before_each_token(
    engine_of: EngineOf, ragged_batch: MakeBatch, architecture: str
) -> None:
    engine = engine_of("engine.micro_batch_tokens=40", architecture=architecture)
    assert engine.critic is not None
    batch = ragged_batch()
    values = engine.values(batch)
    for row, length in enumerate(batch.lengths.tolist()):
        found, prompt, _ = alone(engine.critic, batch, row)
        twin = [found[prompt + t - 1].item() for t in range(length)]
        assert values[row, :length].tolist() == pytest.approx(twin, abs=2e-5)
        # V_0 knows the prompt and nothing of the response.
        ids = batch.input_ids[row][batch.attention_mask[row].bool()][:prompt]
        with torch.no_grad():
            of_prompt = engine.critic(input_ids=ids[None])[0, -1].item()
        assert values[row, 0].item() == pytest.approx(of_prompt, abs=2e-5)
    assert values[batch.response_mask].std() > 0.1


def test_a_new_critic_says_zero(saved_models: dict[str, str]) -> None:
    for path in saved_models.values():
        critic = load_critic(path, dtype="float32", device="cpu")
        with torch.no_grad():
            assert critic(input_ids=torch.tensor([[3, 4, 5]])).tolist() == [[0.0, 0.0, 0.0]]


def test_the_critic_has_a_trunk_of_its_own(engine_of: EngineOf, ragged_batch: MakeBatch) -> None:
    engine, batch = engine_of("critic.warmup_steps=0"), ragged_batch()
    before = parameters_of(engine.actor)
    returns = torch.ones(batch.response_mask.shape)
    engine.update_critic(batch, returns, engine.values(batch), passes=2)
    assert torch.equal(parameters_of(engine.actor), before)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_dropout_is_off_in_the_update(
    engine_of: EngineOf, ragged_batch: MakeBatch, architecture: str
) -> None:
    # With dropout the first pass would already see ratios other than 1.
    engine, batch = engine_of("actor.minibatches=1", architecture=architecture), ragged_batch()
    metrics = update_actor(engine, batch, advantages_like(batch))
    assert metrics["policy/ratio_ess"] == pytest.approx(1, abs=1e-9)
    assert metrics["policy/update_kl"] == pytest.approx(0, abs=1e-9)


def test_empty_responses_are_carried_along(engine_of: EngineOf, ragged_batch: MakeBatch) -> None:
    engine, batch = engine_of(), ragged_batch((0, 5, 0), (3, 2, 4))
    log_probs, _ = engine.log_probs(batch)
    assert log_probs[1].lt(0).all()
    metrics = update_actor(engine, batch, advantages_like(batch))
    assert metrics["policy/skipped_updates"] == 0
    assert parameters_of(engine.actor).isfinite().all()


# ------------------------------------------------------------------------ how the batch is cut up


@pytest.mark.parametrize("reduction", ["token", "sequence", "fixed"])
def test_the_update_does_not_depend_on_the_micro_batches(
    engine_of: EngineOf, ragged_batch: MakeBatch, reduction: str
) -> None:
    batch = ragged_batch((7, 1, 12, 4, 9, 3, 12, 2), (2, 9, 4, 4, 1, 6, 3, 5))
    A = advantages_like(batch)
    overrides = [
        f"algorithm.reduction={reduction}",
        "algorithm.lm_coefficient=0.3",
        "algorithm.kl_coefficient=0.2",
        "algorithm.entropy_coefficient=0.1",
    ]
    gradients = {
        budget: actor_gradient(
            engine_of,
            batch,
            A,
            *overrides,
            f"engine.micro_batch_tokens={budget}",
            reference=True,
        )
        for budget in (1, 20, 50, 100000)
    }
    whole = gradients.pop(100000)
    assert whole.norm() > 1e-2
    for gradient in gradients.values():
        torch.testing.assert_close(gradient, whole, rtol=1e-4, atol=1e-6)


def test_the_critic_update_does_not_depend_on_the_micro_batches(
    engine_of: EngineOf, ragged_batch: MakeBatch
) -> None:
    batch = ragged_batch()
    returns = advantages_like(batch)
    found = []
    for budget in (1, 30, 100000):
        engine = engine_of(
            f"engine.micro_batch_tokens={budget}",
            "critic.minibatches=1",
            "critic.max_grad_norm=1e30",
            "critic.lr=1",
            "critic.value_clip=0.2",
        )
        assert engine.critic is not None
        engine.value.optimizer = GradientKept(engine.critic)  # type: ignore[assignment]
        before = parameters_of(engine.critic)
        metrics = engine.update_critic(batch, returns, engine.values(batch), passes=1)
        found.append((before - parameters_of(engine.critic), metrics["critic/loss"]))
    for gradient, loss in found[:-1]:
        assert (gradient - found[-1][0]).norm() < 1e-5 * found[-1][0].norm()
        assert loss == pytest.approx(found[-1][1], rel=1e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_activations_computed_again_give_the_same_gradient(
    engine_of: EngineOf, ragged_batch: MakeBatch, architecture: str
) -> None:
    batch = ragged_batch()
    A = advantages_like(batch)
    saved: list[int] = []
    gradients = []
    for again in ("false", "true"):
        sizes: list[int] = []

        def count(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            gradients.append(
                actor_gradient(
                    engine_of,
                    batch,
                    A,
                    f"engine.checkpoint_activations={again}",
                    architecture=architecture,
                )
            )
        saved.append(sum(sizes))
    assert (gradients[0] - gradients[1]).norm() < 1e-6 * gradients[0].norm()
    assert saved[0] != saved[1]


@pytest.mark.parametrize("packed", [True, False])
def test_micro_batches_keep_to_their_budget(ragged_batch: MakeBatch, packed: bool) -> None:
    batch = ragged_batch()
    cut = list(
        parts(
            batch,
            torch.arange(len(batch)),
            model=built("qwen2"),
            packed=packed,
            budget=40,
            device=torch.device("cpu"),
        )
    )
    assert sorted(row for part in cut for row in part.rows.tolist()) == list(range(len(batch)))
    assert len(cut) > 1
    assert all(part.inputs["input_ids"].numel() <= 40 for part in cut)


def permuted(batch: Batch, order: Tensor) -> Batch:
    rows = {
        name: value[order]
        for name, value in vars(batch).items()
        if isinstance(value, Tensor) and len(value) == len(order)
    }
    return replace(batch, **rows)


def test_the_order_of_the_trajectories_does_not_matter(
    engine_of: EngineOf, ragged_batch: MakeBatch
) -> None:
    batch = ragged_batch()
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    A = advantages_like(batch)
    engines = [engine_of("actor.minibatches=1"), engine_of("actor.minibatches=1")]
    old = engines[0].log_probs(batch)[0]
    engines[0].update_actor(batch, A, old)
    engines[1].update_actor(permuted(batch, order), A[order], old[order])
    # Adam divides by the gradient's own size, so that rounding shows most where it is smallest.
    torch.testing.assert_close(
        parameters_of(engines[0].actor), parameters_of(engines[1].actor), rtol=0, atol=2e-5
    )


@pytest.mark.parametrize("minibatches", [1, 3])
def test_a_step_makes_one_update_for_each_minibatch_and_pass(
    engine_of: EngineOf, ragged_batch: MakeBatch, minibatches: int
) -> None:
    engine = engine_of(f"actor.minibatches={minibatches}", "actor.passes=2")
    batch = ragged_batch()
    update_actor(engine, batch, advantages_like(batch))
    steps = {int(state["step"]) for state in engine.policy.optimizer.state.values()}
    assert steps == {2 * minibatches}


# ------------------------------------------------------------------------------------ the gradient


def test_masked_slots_may_hold_nan(engine_of: EngineOf, ragged_batch: MakeBatch) -> None:
    batch = ragged_batch()
    clean, hole = advantages_like(batch), ~batch.response_mask
    found = []
    for fill in (0.0, math.nan, math.inf):
        engine = engine_of("algorithm.kl_coefficient=0.1", reference=True)
        old = engine.log_probs(batch)[0].masked_fill(hole, fill)
        actor_metrics = engine.update_actor(batch, clean.masked_fill(hole, fill), old)
        values = engine.values(batch).masked_fill(hole, fill)
        critic_metrics = engine.update_critic(
            batch, clean.masked_fill(hole, fill), values, passes=1
        )
        assert engine.critic is not None
        found.append(
            (
                parameters_of(engine.actor),
                parameters_of(engine.critic),
                actor_metrics | critic_metrics,
            )
        )
    for actor, critic, metrics in found[1:]:
        assert torch.equal(actor, found[0][0])
        assert torch.equal(critic, found[0][1])
        assert metrics == found[0][2]


@pytest.mark.parametrize(
    "extra",
    [
        "algorithm.lm_coefficient=0.5",
        "algorithm.kl_coefficient=0.5",
        "algorithm.entropy_coefficient=0.5",
    ],
)
def test_the_weight_multiplies_the_policy_gradient_and_nothing_else(
    engine_of: EngineOf, ragged_batch: MakeBatch, extra: str
) -> None:
    batch = ragged_batch()
    A = advantages_like(batch)
    off = ["algorithm.lm_coefficient=0"]
    policy = actor_gradient(engine_of, batch, A, *off)
    doubled = actor_gradient(engine_of, batch, 2 * A, *off)
    torch.testing.assert_close(doubled, 2 * policy, rtol=1e-4, atol=1e-5)
    # With another loss beside it, twice the weight adds the policy's gradient once more.
    once = actor_gradient(engine_of, batch, A, *off, extra, reference="kl" in extra)
    twice = actor_gradient(engine_of, batch, 2 * A, *off, extra, reference="kl" in extra)
    torch.testing.assert_close(twice - once, policy, rtol=1e-4, atol=1e-5)
    if "kl" not in extra:  # its gradient is 0 where policy and reference are still the same
        assert (once - policy).norm() > 1e-3


def test_one_trajectory_s_weight_scales_its_own_part_only(
    engine_of: EngineOf, ragged_batch: MakeBatch
) -> None:
    batch = ragged_batch()
    A, off = advantages_like(batch), "algorithm.lm_coefficient=0"
    only = torch.zeros_like(A)
    only[2] = A[2]
    heavier = A.clone()
    heavier[2] *= 3
    difference = actor_gradient(engine_of, batch, heavier, off) - actor_gradient(
        engine_of, batch, A, off
    )
    torch.testing.assert_close(
        difference, 2 * actor_gradient(engine_of, batch, only, off), rtol=1e-4, atol=1e-5
    )


def test_the_gradient_is_that_of_the_loss_written_out_token_by_token(
    engine_of: EngineOf, ragged_batch: MakeBatch
) -> None:
    batch = ragged_batch()
    A = advantages_like(batch)
    found = actor_gradient(engine_of, batch, A, "method=vapo", "engine.micro_batch_tokens=30")
    engine = engine_of("method=vapo")
    old = engine.log_probs(batch)[0] + 0.3 * advantages_like(batch, seed=6)
    loss = torch.zeros(())
    N = int(batch.lengths.sum())
    right = int((batch.lengths * batch.correct).sum())
    for row, length in enumerate(batch.lengths.tolist()):
        ids = batch.input_ids[row][batch.attention_mask[row].bool()]
        prompt = len(ids) - length
        log_p = engine.actor(input_ids=ids[None]).logits[0].log_softmax(-1)
        for t in range(length):
            log_prob = log_p[prompt + t - 1, ids[prompt + t]]
            ratio = (log_prob - old[row, t]).exp()
            surrogate = torch.minimum(ratio * A[row, t], ratio.clamp(0.8, 1.28) * A[row, t])
            loss = loss - surrogate / N
            if batch.correct[row] == 1:
                loss = loss - 0.1 * log_prob / right
    loss.backward()
    twin = torch.cat([p.grad.flatten() for p in engine.actor.parameters() if p.grad is not None])
    torch.testing.assert_close(found, twin, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_is_skipped(
    engine_of: EngineOf, ragged_batch: MakeBatch, bad: float
) -> None:
    engine, batch = engine_of("actor.minibatches=1", "critic.minibatches=1"), ragged_batch()
    assert engine.critic is not None
    actor, critic = parameters_of(engine.actor), parameters_of(engine.critic)
    A = advantages_like(batch)
    A[2, 0] = bad
    assert update_actor(engine, batch, A)["policy/skipped_updates"] == 1
    assert torch.equal(parameters_of(engine.actor), actor)
    found = engine.update_critic(batch, A, engine.values(batch), passes=1)
    assert found["critic/skipped_updates"] == 1
    assert torch.equal(parameters_of(engine.critic), critic)
    # The bad gradient is gone: the next update is as good as a first one.
    update_actor(engine, batch, advantages_like(batch))
    other = engine_of("actor.minibatches=1")
    other.counters["actor"] = 1
    update_actor(other, batch, advantages_like(batch))
    assert torch.equal(parameters_of(engine.actor), parameters_of(other.actor))


def test_a_skipped_minibatch_leaves_the_others_to_act(
    engine_of: EngineOf, ragged_batch: MakeBatch
) -> None:
    engine, batch = engine_of("actor.minibatches=3"), ragged_batch()
    before = parameters_of(engine.actor)
    A = advantages_like(batch)
    A[2, 0] = math.inf
    assert update_actor(engine, batch, A)["policy/skipped_updates"] == 1
    after = parameters_of(engine.actor)
    assert after.isfinite().all()
    assert not torch.equal(after, before)


def test_the_gradient_norm_is_clipped(engine_of: EngineOf, ragged_batch: MakeBatch) -> None:
    batch = ragged_batch()
    A = 1000 * advantages_like(batch)
    free = actor_gradient(engine_of, batch, A)
    clipped = actor_gradient(engine_of, batch, A, "actor.max_grad_norm=0.5")
    assert free.norm() > 10
    assert clipped.norm().item() == pytest.approx(0.5, rel=1e-3)
    torch.testing.assert_close(clipped / clipped.norm(), free / free.norm(), rtol=1e-3, atol=1e-5)


def test_the_reported_loss_and_clipping_are_those_of_the_batch(
    engine_of: EngineOf, ragged_batch: MakeBatch
) -> None:
    batch = ragged_batch()
    engine = engine_of("actor.minibatches=1", "engine.micro_batch_tokens=30")
    A, log_probs = advantages_like(batch), engine.log_probs(batch)[0]
    old = log_probs + 0.5 * advantages_like(batch, seed=6)
    rows = torch.arange(len(batch))
    expected = policy_loss(
        log_probs,
        old,
        A,
        batch.response_mask,
        counts=engine._counts(batch, rows),
        clip_low=0.2,
        clip_high=0.28,
    )
    metrics = engine.update_actor(batch, A, old)
    assert metrics["policy/loss"] == pytest.approx(expected.item(), rel=1e-4)
    ratio, mask = (log_probs - old).exp(), batch.response_mask
    low = (ratio < 0.8) & (A < 0) & mask
    high = (ratio > 1.28) & (A > 0) & mask
    assert metrics["policy/clip_low"] == pytest.approx((low.sum() / mask.sum()).item())
    assert metrics["policy/clip_high"] == pytest.approx((high.sum() / mask.sum()).item())
    assert low.any()
    assert high.any()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kl_to_the_reference_is_zero_at_the_start_and_grows(
    engine_of: EngineOf, ragged_batch: MakeBatch, architecture: str
) -> None:
    engine = engine_of(
        "algorithm.kl_coefficient=0.1",
        "actor.minibatches=1",
        "actor.warmup_steps=0",
        architecture=architecture,
        reference=True,
    )
    batch = ragged_batch()
    assert engine.reference is not None
    before = parameters_of(engine.reference)
    assert update_actor(engine, batch, advantages_like(batch))["policy/kl"] == 0.0
    assert update_actor(engine, batch, advantages_like(batch))["policy/kl"] > 0.0
    assert torch.equal(parameters_of(engine.reference), before)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_learns(
    engine_of: EngineOf, ragged_batch: MakeBatch, architecture: str
) -> None:
    engine = engine_of(
        "actor.lr=3e-3",
        "actor.warmup_steps=0",
        "critic.lr=1e-2",
        "algorithm.lm_coefficient=0",
        architecture=architecture,
    )
    batch = ragged_batch()
    sign = torch.where(batch.correct > 0, 1.0, -1.0)[:, None].expand(batch.response_mask.shape)
    before, errors = engine.log_probs(batch)[0], []
    for _ in range(8):
        values = engine.values(batch)
        errors.append((values - sign)[batch.response_mask].square().mean().item())
        engine.update_critic(batch, sign, values, passes=1)
        update_actor(engine, batch, sign)
    rise = (engine.log_probs(batch)[0] - before).masked_fill(~batch.response_mask, 0).sum(1)
    assert rise[batch.correct > 0].sum() > 0 > rise[batch.correct == 0].sum()
    assert errors[-1] < 0.5 * errors[0]


def test_tied_embeddings_stay_tied(engine_of: EngineOf, ragged_batch: MakeBatch) -> None:
    engine, batch = engine_of(), ragged_batch()
    before = engine.actor.get_input_embeddings().weight.detach().clone()
    update_actor(engine, batch, advantages_like(batch))
    embedding = engine.actor.get_input_embeddings().weight
    assert engine.actor.get_output_embeddings().weight is embedding
    assert not torch.equal(embedding, before)
    names = [name for name, _ in engine.weights()]
    assert len(names) == len(set(names))
    assert "lm_head.weight" not in names


# ------------------------------------------------------------------------------------ the optimiser


def test_the_learning_rate_warms_up(engine_of: EngineOf, ragged_batch: MakeBatch) -> None:
    engine = engine_of("actor.lr=1e-3", "actor.warmup_steps=4", "critic.lr=2e-3")
    batch = ragged_batch()
    A = advantages_like(batch)
    rates = [update_actor(engine, batch, A)["policy/lr"] for _ in range(6)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])
    found = engine.update_critic(batch, A, engine.values(batch), passes=1)
    assert found["critic/lr"] == pytest.approx(2e-3)


def test_save_and_load_go_on_bit_for_bit(
    engine_of: EngineOf, ragged_batch: MakeBatch, tmp_path: Path
) -> None:
    batch = ragged_batch()
    A = advantages_like(batch)

    def step(engine: Engine) -> None:
        update_actor(engine, batch, A)
        engine.update_critic(batch, A, engine.values(batch), passes=1)

    first = engine_of()
    step(first)
    first.save(tmp_path)
    second = engine_of()
    placement = {"dtype": "float32", "device": "cpu"}
    second = Engine(
        first.config,
        first.method,
        actor=load_actor(str(tmp_path / "actor"), **placement),
        critic=load_critic(str(tmp_path / "critic"), **placement),
    )
    second.load(tmp_path)
    for engine in (first, second):
        step(engine)
    assert first.critic is not None
    assert isinstance(second.critic, Critic)
    assert torch.equal(parameters_of(first.actor), parameters_of(second.actor))
    assert torch.equal(parameters_of(first.critic), parameters_of(second.critic))
    assert first.counters == second.counters == {"actor": 2, "critic": 2}


def test_a_method_without_critic_refuses_to_update_one(
    engine_of: EngineOf, ragged_batch: MakeBatch
) -> None:
    engine, batch = engine_of("method=grpo"), ragged_batch()
    A = advantages_like(batch)
    with pytest.raises(RuntimeError, match="grpo has no critic"):
        engine.update_critic(batch, A, A, passes=1)


def test_value_clipping_holds_back_values_that_have_moved_too_far(
    engine_of: EngineOf, ragged_batch: MakeBatch
) -> None:
    batch = ragged_batch()
    moved = {}
    for clip in ("0.2", "null"):
        engine = engine_of(f"critic.value_clip={clip}", "critic.minibatches=1")
        assert engine.critic is not None
        values, before = engine.values(batch), parameters_of(engine.critic)
        # V has risen by 1 since the rollouts, on its way to V + 1: beyond the clip, where the
        # clipped error is the larger one and its gradient is 0.
        found = engine.update_critic(batch, values + 1, values - 1, passes=1)
        moved[clip] = not torch.equal(parameters_of(engine.critic), before)
        assert found["critic/loss"] == pytest.approx(0.5 * (1.8**2 if clip == "0.2" else 1))
    assert moved == {"0.2": False, "null": True}


@pytest.mark.parametrize(("actor", "critic"), [("bloom", "gpt2"), ("gpt2", "bloom")])
def test_actor_and_critic_of_two_architectures_get_each_its_own_arguments(
    tiny_config: MakeConfig,
    ragged_batch: MakeBatch,
    saved_models: dict[str, str],
    actor: str,
    critic: str,
    tmp_path: Path,
) -> None:
    # BLOOM counts positions by the mask and takes none; to GPT-2 the padding would be text.
    torch.manual_seed(3)
    shape = {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}
    BloomForCausalLM(BloomConfig(**shape, initializer_range=0.3)).save_pretrained(tmp_path)
    paths = saved_models | {"bloom": str(tmp_path)}
    placement = {"dtype": "float32", "device": "cpu"}
    judge = load_critic(paths[critic], **placement)
    nn.init.normal_(judge.head.weight)
    config = tiny_config("method=ppo")
    engine = Engine(
        config, config.declared(), actor=load_actor(paths[actor], **placement), critic=judge
    )
    batch = ragged_batch()
    values, (log_probs, _) = engine.values(batch), engine.log_probs(batch)
    for row, length in enumerate(batch.lengths.tolist()):
        found, prompt, _ = alone(judge, batch, row)
        twin = [found[prompt + t - 1].item() for t in range(length)]
        assert values[row, :length].tolist() == pytest.approx(twin, abs=2e-5)
        logits, _, ids = alone(engine.actor, batch, row)
        chosen = [logits[prompt + t - 1].log_softmax(-1)[ids[prompt + t]] for t in range(length)]
        assert log_probs[row, :length].tolist() == pytest.approx(
            [x.item() for x in chosen], abs=2e-5
        )
