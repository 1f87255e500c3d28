"""A rollout engine that missed an update is found out, whichever engine it is."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.train.small_policy import save_policy
from train import addition
from train.config import Config, Sampling
from train.engine import Engine
from train.models import load_actor
from train.rollout.backend import Backend, TransformersBackend
from train.rollout.batch import Batch
from train.rollout.guard import Gap, SyncError, check_sync

MakeConfig = Callable[..., Config]
MakeBatch = Callable[..., Batch]
TrainerOf = Callable[..., Engine]

EOS = addition.tokenizer().eos_token_id
THRESHOLD = 1e-4


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("policies")
    return {name: save_policy(folder / name, tied=name == "tied") for name in ("tied", "untied")}


@pytest.fixture
def trainer(policies: dict[str, str], tiny_config: MakeConfig) -> TrainerOf:
    def make(name: str = "tied", *overrides: str) -> Engine:
        config = tiny_config("method=grpo", "actor.lr=1e-2", "actor.warmup_steps=0", *overrides)
        actor = load_actor(policies[name], dtype="float32", device="cpu")
        return Engine(config, config.declared(), actor=actor, critic=None)

    return make


def transformers_backend(path: str) -> TransformersBackend:
    model = load_actor(path, dtype="float32", device="cpu")
    return TransformersBackend(model, end_tokens=[EOS], pad_id=0, batch_size=4)


def learn(engine: Engine, batch: Batch) -> None:
    """One real step of the optimiser."""
    generator = torch.Generator().manual_seed(0)
    advantages = torch.randn(batch.response_mask.shape, generator=generator)
    engine.update_actor(batch, advantages, engine.log_probs(batch)[0])


def check(engine: Engine, backend: Backend, batch: Batch, **settings: Any) -> Gap:
    given = {"step": 7, "threshold": THRESHOLD, "temperature": 1.0}
    return check_sync(engine, backend, batch, **(given | settings))


# ------------------------------------------------------------------------------------- what it says


def test_a_sync_that_arrived_passes(
    trainer: TrainerOf, policies: dict[str, str], ragged_batch: MakeBatch
) -> None:
    engine, backend, batch = trainer(), transformers_backend(policies["tied"]), ragged_batch()
    assert check(engine, backend, batch).mean < 1e-6
    learn(engine, batch)
    backend.sync(engine.weights(), version=1)
    gap = check(engine, backend, batch)
    assert gap.mean <= gap.max < 1e-5
    assert gap.tokens == int(batch.lengths.sum())


def test_a_sync_that_was_left_out_stops_the_run(
    trainer: TrainerOf, policies: dict[str, str], ragged_batch: MakeBatch
) -> None:
    engine, backend, batch = trainer(), transformers_backend(policies["tied"]), ragged_batch()
    learn(engine, batch)
    with pytest.raises(SyncError) as raised:
        check(engine, backend, batch)
    message = str(raised.value)
    for part in ("step 7", "rollout.max_logprob_gap is 0.0001", "weights that did not arrive"):
        assert part in message


@pytest.mark.parametrize("broken", ["trainer", "rollout", "both"])
def test_a_gap_that_is_no_number_stops_the_run(
    trainer: TrainerOf, policies: dict[str, str], ragged_batch: MakeBatch, broken: str
) -> None:
    engine, backend = trainer(), transformers_backend(policies["tied"])
    models = {"trainer": [engine.actor], "rollout": [backend.model]}
    models["both"] = models["trainer"] + models["rollout"]
    with torch.no_grad():
        for model in models[broken]:
            next(model.parameters()).fill_(math.nan)
    with pytest.raises(SyncError, match="are nan nats a token"):
        check(engine, backend, ragged_batch(), threshold=math.inf)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_gap_is_the_loop_s(
    trainer: TrainerOf, policies: dict[str, str], ragged_batch: MakeBatch, temperature: float
) -> None:
    engine = trainer("tied", f"rollout.temperature={temperature}")
    backend, batch = transformers_backend(policies["tied"]), ragged_batch()
    learn(engine, batch)
    found = check(engine, backend, batch, threshold=100.0, temperature=temperature)
    gaps = [
        abs(a - b)
        for row in range(len(batch))
        for a, b in zip(
            loop(engine.actor, batch, row, temperature),
            loop(backend.model, batch, row, temperature),
            strict=True,
        )
    ]
    assert found.mean == pytest.approx(sum(gaps) / len(gaps), rel=1e-3)
    assert found.max == pytest.approx(max(gaps), rel=1e-3)
    assert found.tokens == len(gaps)


def loop(model: Any, batch: Batch, row: int, temperature: float) -> list[float]:
    """log pi of a row's response, a token at a time."""
    prompt, response = (part[row] for part in tokens_of(batch))
    found = []
    for t, token in enumerate(response):
        ids = torch.tensor([prompt + response[:t]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, -1] / temperature
        found.append(logits.log_softmax(-1)[token].item())
    return found


def tokens_of(batch: Batch) -> tuple[list[list[int]], list[list[int]]]:
    def real(ids: Tensor, mask: Tensor) -> list[list[int]]:
        return [row[there].tolist() for row, there in zip(ids, mask.bool(), strict=True)]

    P = batch.prompt_width
    prompts = real(batch.input_ids[:, :P], batch.attention_mask[:, :P])
    return prompts, real(batch.response_ids, batch.response_mask)


@pytest.mark.parametrize(
    ("responses", "tokens", "expected"),
    [(100, 100, 36), (100, 5, 5 + 1 + 5 + 4 + 5 + 3), (2, 100, 7 + 3), (1, 2, 2)],
)
def test_a_probe_is_a_part_of_the_batch(
    trainer: TrainerOf,
    policies: dict[str, str],
    ragged_batch: MakeBatch,
    responses: int,
    tokens: int,
    expected: int,
) -> None:
    backend = transformers_backend(policies["tied"])
    gap = check(trainer(), backend, ragged_batch(), responses=responses, tokens=tokens)
    assert gap.tokens == expected


def test_an_empty_response_is_not_probed(
    trainer: TrainerOf, policies: dict[str, str], ragged_batch: MakeBatch
) -> None:
    batch = ragged_batch((0, 5, 0, 2), (3, 3, 2, 2))
    assert check(trainer(), transformers_backend(policies["tied"]), batch).tokens == 7


# ---------------------------------------------------------------------------- what it is built upon


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_transformers_scores_given_responses(
    policies: dict[str, str], ragged_batch: MakeBatch, temperature: float, batch_size: int
) -> None:
    batch = ragged_batch((7, 1, 0, 4), (2, 9, 4, 1))
    backend = transformers_backend(policies["untied"])
    backend.batch_size = batch_size
    prompts, responses = tokens_of(batch)
    found = backend.log_probs_of(prompts, responses, temperature=temperature)
    for row, scores in enumerate(found):
        expected = loop(backend.model, batch, row, temperature)
        assert scores == pytest.approx(expected, abs=1e-5)


def test_what_transformers_generated_it_scores_alike(policies: dict[str, str]) -> None:
    backend = transformers_backend(policies["tied"])
    prompts = [[5, 6, 7], [8, 9], [10]]
    drawn = backend.generate(prompts, [1, 2, 3], Sampling(temperature=0.8, max_tokens=9))
    scored = backend.log_probs_of(prompts, drawn.tokens, temperature=0.8)
    for a, b in zip(scored, drawn.log_probs, strict=True):
        assert a == pytest.approx(b, abs=2e-5)


# ------------------------------------------------------------------------------------ vLLM's reload


@pytest.fixture(scope="module")
def vllm_backends(policies: dict[str, str]) -> Callable[[str], Any]:
    pytest.importorskip("vllm", reason="vLLM is not installed (requirements/vllm-cpu.txt)")
    from train.rollout.vllm import VllmBackend

    started: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in started:
            started[name] = VllmBackend(
                policies[name], end_tokens=[EOS], memory_share=0.02, batch_size=16
            )
        return started[name]

    return get


def fresh(backend: Any, path: str) -> Any:
    """The backend with the weights of the file again."""
    backend.sync(load_actor(path, dtype="float32", device="cpu").named_parameters(), version=0)
    return backend


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_vllm_passes_after_a_sync_and_only_then(
    trainer: TrainerOf,
    policies: dict[str, str],
    ragged_batch: MakeBatch,
    vllm_backends: Callable[[str], Any],
    name: str,
) -> None:
    engine, backend = trainer(name), fresh(vllm_backends(name), policies[name])
    batch = ragged_batch()
    assert check(engine, backend, batch).max < 1e-5
    for step in range(2):
        learn(engine, batch)
        with pytest.raises(SyncError):
            check(engine, backend, batch, step=step)
        backend.sync(engine.weights(), version=step + 1)
        assert check(engine, backend, batch, step=step).max < 1e-5


@pytest.mark.slow
def test_vllm_s_own_reload_leaves_a_tied_output_layer_behind(
    trainer: TrainerOf,
    policies: dict[str, str],
    ragged_batch: MakeBatch,
    vllm_backends: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, backend = trainer("tied"), fresh(vllm_backends("tied"), policies["tied"])
    batch = ragged_batch()
    learn(engine, batch)
    with monkeypatch.context() as patch:
        patch.setattr("train.rollout.vllm._pack_output_layers", lambda _: None)
        backend.sync(engine.weights(), version=1)
    with pytest.raises(SyncError):
        check(engine, backend, batch)
    backend.sync(engine.weights(), version=1)
    assert check(engine, backend, batch).max < 1e-5
