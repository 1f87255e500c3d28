"""The trainer on problems as published: DAPO-Math-17k in, AIME, AMC and MATH-500 out."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from cvpo import read_evals, read_metrics, read_problems, read_trajectories
from train.config import Config
from train.loop import train

MakeConfig = Callable[..., Config]

PROBLEMS = Path(__file__).parents[3] / "shared" / "data" / "problems"
CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def byte_model(tmp_path: Path) -> Path:
    """A model with a vocabulary of bytes: it can be asked anything, and knows nothing."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>"
    )
    tokenizer.chat_template = CHAT
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=8192,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    )
    folder = tmp_path / "bytes"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("template", ["chat", "dapo"])
def test_dapo_trains_and_the_paper_s_benchmarks_are_graded(
    tiny_config: MakeConfig, byte_model: Path, template: str
) -> None:
    if not PROBLEMS.is_dir():
        pytest.skip("needs ../shared/data/problems, the real problem files")
    names = ("aime24", "aime25", "amc23", "amc24", "math500")
    benchmarks = ", ".join(
        f"{{name: {name}, source: '{PROBLEMS / name}.jsonl', limit: 2}}" for name in names
    )
    config = tiny_config(
        "method=cvpo",
        "steps=1",
        f"model.path={byte_model}",
        f"data.train={{source: '{PROBLEMS / 'dapo_math_17k.jsonl'}', deduplicate: true}}",
        f"data.template={template}",
        "data.max_prompt_tokens=8000",
        "rollout.prompts=2",
        "rollout.samples=2",
        "rollout.max_tokens=6",
        "evaluation.max_tokens=6",
        "evaluation.samples=2",
        f"evaluation.benchmarks=[{benchmarks}]",
    )
    train(config)
    assert len(read_problems(config.folder)) == 17_176
    assert len(read_trajectories(config.folder)) == 4
    evals = read_evals(config.folder)
    assert evals.groupby("benchmark").size().to_dict() == dict.fromkeys(names, 2 * 2 * 2)
    assert evals[["exact", "normalized", "symbolic"]].notna().all(axis=None)
    assert read_metrics(config.folder)["rollout/logprob_gap"].iloc[-1] < 1e-4
