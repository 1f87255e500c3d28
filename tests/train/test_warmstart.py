import itertools
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from train import addition, warmstart
from train.config import Config, Warmstart
from train.models import end_of_sequence, load_actor, load_tokenizer
from train.warmstart import warm_start

MakeConfig = Callable[..., Config]

RECIPE = [
    "warmstart.steps=40",
    "warmstart.batch_size=16",
    "warmstart.warmup_steps=5",
    "warmstart.lr=1e-2",
    "warmstart.hidden_size=32",
    "warmstart.layers=1",
    "warmstart.heads=4",
    "warmstart.intermediate_size=64",
]


@pytest.fixture
def recipe(tiny_config: MakeConfig, tmp_path: Path) -> MakeConfig:
    output = tmp_path / "warm" / "model"
    return lambda *overrides: tiny_config(*RECIPE, f"warmstart.output={output}", *overrides)


def loss_of(folder: Path) -> float:
    """Mean negative log-likelihood of answers of another corpus, one at a time, in nats."""
    model = load_actor(str(folder), dtype="float32", device="cpu")
    tokenizer = load_tokenizer(str(folder))
    losses = []
    for prompt, answer in addition.corpus(20, seed=99):
        start, end = tokenizer.encode(prompt), tokenizer.encode(answer)
        ids = torch.tensor([*start, *end, tokenizer.eos_token_id])
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, :-1]
        losses.append(
            nn.functional.cross_entropy(logits[len(start) - 1 :], ids[len(start) :]).item()
        )
    return sum(losses) / len(losses)


def touched(folder: Path) -> tuple[int, bytes]:
    file = folder / "model.safetensors"
    return file.stat().st_mtime_ns, file.read_bytes()


def test_the_loss_falls(recipe: MakeConfig) -> None:
    short = loss_of(warm_start(recipe("warmstart.steps=1", "warmstart.lr=1e-6")))
    long = loss_of(warm_start(recipe()))
    assert short == pytest.approx(math.log(len(addition.VOCABULARY)), abs=0.2)
    assert long < 0.7 * short


def test_the_model_can_be_trained_on(recipe: MakeConfig) -> None:
    config = recipe()
    folder = warm_start(config)
    assert folder == Path(config.warmstart.output)
    model = load_actor(str(folder), dtype="float32", device="cpu")
    tokenizer = load_tokenizer(str(folder))
    assert model.config.hidden_size == 32
    assert model.config.num_hidden_layers == 1
    assert end_of_sequence(model, tokenizer) == (addition.tokenizer().eos_token_id,)
    assert tokenizer.encode("1+2=") == addition.tokenizer().encode("1+2=")


def test_a_warm_start_is_found_again(recipe: MakeConfig) -> None:
    folder = warm_start(recipe())
    before = touched(folder)
    assert warm_start(recipe("seed=9", "rollout.prompts=2")) == folder
    assert touched(folder) == before
    assert not list(folder.parent.glob(".*"))


@pytest.mark.parametrize(
    "change", ["warmstart.steps=3", "warmstart.seed=1", "warmstart.hidden_size=16"]
)
def test_another_recipe_is_trained_anew(recipe: MakeConfig, change: str) -> None:
    few = "warmstart.steps=2"
    before = touched(warm_start(recipe(few)))
    assert touched(warm_start(recipe(few, change)))[1] != before[1]
    # And back again: the same recipe makes the same model.
    assert touched(warm_start(recipe(few)))[1] == before[1]


def test_an_interrupted_warm_start_is_not_taken_for_a_model(recipe: MakeConfig) -> None:
    config = recipe("warmstart.steps=2")
    folder = Path(config.warmstart.output)
    aside = folder.with_name(f".{folder.name}.partial")
    aside.mkdir(parents=True)
    (aside / "model.safetensors").write_bytes(b"torn")
    assert warm_start(config) == folder
    assert not aside.exists()
    assert loss_of(folder) > 0


def test_a_warm_start_without_its_recipe_beside_it_is_made_again(recipe: MakeConfig) -> None:
    config = recipe("warmstart.steps=2")
    folder = warm_start(config)
    (folder / "warmstart.json").write_text('{"recipe": ')
    before = touched(folder)
    assert warm_start(config) == folder
    assert touched(folder)[0] != before[0]
    assert touched(folder)[1] == before[1]


@given(st.integers(1, 40), st.integers(1, 7), st.integers(0, 5))
def test_batches_hold_every_example_once_beside_others_of_its_length(
    steps: int, batch_size: int, seed: int
) -> None:
    recipe = Warmstart(steps=steps, batch_size=batch_size, seed=seed)
    lengths = random.Random(seed).choices(range(1, 60), k=steps * batch_size)
    examples = [([number], [0] * length) for number, length in enumerate(lengths)]
    batches = warmstart._batches(list(examples), recipe)
    assert [len(batch) for batch in batches] == [batch_size] * steps
    assert sorted(prompt for batch in batches for prompt, _ in batch) == [p for p, _ in examples]
    again = warmstart._batches(list(examples), recipe)
    assert again == batches
    if steps >= 16:  # in a window of 16 batches, 16 ranges of lengths that at most touch
        ranges = sorted(sorted(len(answer) for _, answer in batch) for batch in batches[:16])
        assert all(one[-1] <= other[0] for one, other in itertools.pairwise(ranges))
