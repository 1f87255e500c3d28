"""The supervised warm start on the built-in task: a small Qwen2 learns to write column additions.

It imitates a corpus in which some of the worked steps are wrong on purpose (`train.addition`), so
the model knows the form and errs at every level: something is left for reinforcement learning.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import shutil
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import trange
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from train import addition
from train.config import Config, Warmstart

_RECIPE = "warmstart.json"
_IGNORED = -100  # the label that cross_entropy leaves out
_WINDOW = 16  # batches among whose examples those of about the same length are found

Example = tuple[list[int], list[int]]
"""A prompt and its answer, as tokens."""


def warm_start(config: Config) -> Path:
    """Trains the model, or finds it already trained by the same recipe.

    Returns:
        The folder, as `save_pretrained` writes it, with the tokenizer: a `model.path`.
    """
    recipe = config.warmstart
    folder = Path(recipe.output)
    fingerprint = json.dumps(
        {"recipe": recipe.model_dump(mode="json"), "corpus": _digest(recipe)}, indent=1
    )
    noted = folder / _RECIPE
    if noted.is_file() and noted.read_text() == fingerprint:
        return folder
    if config.engine.threads:
        torch.set_num_threads(config.engine.threads)
    tokenizer = addition.tokenizer()
    model = _fit(recipe, tokenizer)
    aside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    (aside / _RECIPE).write_text(fingerprint)
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
    return folder


def _fit(recipe: Warmstart, tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    torch.manual_seed(recipe.seed)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=recipe.hidden_size,
            intermediate_size=recipe.intermediate_size,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.heads,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    examples = [
        (tokenizer.encode(prompt), [*tokenizer.encode(answer), tokenizer.eos_token_id])
        for prompt, answer in _corpus(recipe)
    ]
    batches = _batches(examples, recipe)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.0
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: _rate(done, recipe))
    model.train()
    bar = trange(recipe.steps, desc="warm start", unit="step")
    for step in bar:
        ids, labels = _collate(batches[step], tokenizer.pad_token_id)
        # Padding stands on the right of a causal model: no attention mask is needed.
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORED
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 20 == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}")
    model.eval()
    return model


def _batches(examples: list[Example], recipe: Warmstart) -> list[list[Example]]:
    """Batches of examples of about the same length: otherwise half of each would be padding."""
    size, shuffle = recipe.batch_size, random.Random(recipe.seed).shuffle
    batches = []
    for start in range(0, len(examples), _WINDOW * size):
        window = examples[start : start + _WINDOW * size]
        window.sort(key=lambda example: len(example[0]) + len(example[1]))
        alike = [window[first : first + size] for first in range(0, len(window), size)]
        shuffle(alike)
        batches += alike
    return batches


def _corpus(recipe: Warmstart) -> list[tuple[str, str]]:
    return addition.corpus(recipe.steps * recipe.batch_size, seed=recipe.seed)


def _digest(recipe: Warmstart) -> str:
    """Changes when the corpus does, so that an old cache is not taken for the new model."""
    sample = addition.corpus(200, seed=recipe.seed)
    return hashlib.blake2b(repr(sample).encode(), digest_size=8).hexdigest()


def _rate(done: int, recipe: Warmstart) -> float:
    """Learning-rate factor: a linear rise, then half a cosine down to 0."""
    if done < recipe.warmup_steps:
        return (done + 1) / recipe.warmup_steps
    progress = (done - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def _collate(examples: list[tuple[list[int], list[int]]], pad_id: int) -> tuple[Tensor, Tensor]:
    width = max(len(prompt) + len(answer) for prompt, answer in examples)
    ids = torch.full((len(examples), width), pad_id)
    labels = torch.full_like(ids, _IGNORED)
    for row, (prompt, answer) in enumerate(examples):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return ids, labels
