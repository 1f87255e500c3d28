"""A model of 20 000 parameters that has half learnt to add one digit, and configurations for it."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from train import addition
from train.config import Config, load_config
from train.rollout.batch import Batch, Responses, pad

MakeConfig = Callable[..., Config]
MakeBatch = Callable[..., Batch]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It is right about one time in four, so that groups hold both right and wrong responses."""
    torch.set_num_threads(1)
    tokenizer = addition.tokenizer()
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    steps, rows = 200, 32
    examples = [
        (tokenizer.encode(prompt), [*tokenizer.encode(answer), tokenizer.eos_token_id])
        for prompt, answer in addition.corpus(steps * rows, seed=0, levels=[1])
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        chosen = examples[step * rows : (step + 1) * rows]
        width = max(len(prompt) + len(answer) for prompt, answer in chosen)
        ids, labels = torch.zeros(rows, width, dtype=torch.long), torch.full((rows, width), -100)
        for row, (prompt, answer) in enumerate(chosen):
            ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
        logits = model(input_ids=ids).logits[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    folder = tmp_path_factory.mktemp("models") / "tiny"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def tiny_arguments(tiny_model: Path, tmp_path: Path) -> list[str]:
    """Overrides of the laptop configuration; those given after them win."""
    benchmarks = [
        f"{{name: add-{level}, source: addition, split: test, levels: [{level}], limit: {limit}}}"
        for level, limit in ((1, 3), (2, 2))
    ]
    return [
        f"model.path={tiny_model}",
        f"run_dir={tmp_path / 'run'}",
        "steps=3",
        "data.train.limit=16",
        "data.train.levels=[1]",
        "rollout.prompts=4",
        "rollout.samples=4",
        "rollout.max_tokens=16",
        "actor.minibatches=2",
        "critic.minibatches=2",
        "actor.lr=1e-3",
        "engine.threads=1",
        "pretraining.max_steps=1",
        f"evaluation.benchmarks=[{', '.join(benchmarks)}]",
        "evaluation.samples=2",
        "evaluation.max_tokens=16",
        "evaluation.every=0",
        "checkpoints.every=2",
        "log.tokens_every=2",
        "log.tensorboard=false",
    ]


@pytest.fixture
def tiny_config(tiny_arguments: list[str]) -> MakeConfig:
    def make(*overrides: str) -> Config:
        return load_config(None, [*tiny_arguments, *overrides])

    return make


@pytest.fixture(scope="session")
def ragged_batch() -> MakeBatch:
    """Random tokens: any prompts and responses, whatever a policy would say."""

    def make(
        lengths: Sequence[int] = (7, 1, 12, 4, 9, 3),
        prompts: Sequence[int] = (2, 9, 4, 4, 1, 6),
        *,
        seed: int = 0,
    ) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        vocabulary, B = len(addition.VOCABULARY), len(lengths)

        def text(length: int) -> list[int]:
            return torch.randint(2, vocabulary, (length,), generator=generator).tolist()

        responses = Responses(
            [text(length) for length in lengths],
            [[-1.0] * length for length in lengths],
            [False] * B,
            version=0,
        )
        correct = torch.arange(B).remainder(2).float()
        prompt_id = torch.arange(B) // 2
        names, trials = prompt_id.unique(return_counts=True)
        return Batch(
            prompt_id=prompt_id,
            sample=torch.arange(B).remainder(2),
            **pad([text(length) for length in prompts], responses, pad_id=0),
            truncated=torch.zeros(B, dtype=torch.bool),
            correct=correct,
            reward=2 * correct - 1,
            responses=[""] * B,
            answers=[None] * B,
            version=0,
            observed={
                "prompt": names,
                "trials": trials.float(),
                "successes": torch.zeros(len(names)).index_add(0, prompt_id, correct),
            },
            generated_tokens=sum(lengths),
        )

    return make
