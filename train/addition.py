r"""Column addition: the built-in task, small enough to learn on a laptop.

Level d asks for the sum of two numbers of d digits each, ``698+814=``. The answer works through the
columns from the right, each written digit+digit+carry=sum, and ends in a box::

    8+4+0=12,9+1+1=11,6+8+1=15,\boxed{1512}

The corpus the warm start imitates holds **mistakes put in on purpose**, so that there is something
left for reinforcement learning to learn. It mixes a careful writer, who is right, with a careless
one, who does not write the carry down and then often forgets it; the harder the level, the more
often careless. Now and then either slips by one. The box always holds what the written steps lead
to. A model that imitates this corpus knows the form, is wrong at every level, and can do better
than its teacher by preferring one of two styles it already has. The reward never sees any of this:
it compares the box with the true sum.

Nothing here depends on the machine: splits come from a hash, everything else from a seed.
"""

import hashlib
import random
from collections.abc import Iterator, Sequence
from typing import Literal

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from train.data import Problem

DATASET = "addition"
LEVELS = range(1, 7)

Split = Literal["warmstart", "rl", "development", "test"]
SPLIT_SHARES: dict[Split, float] = {"warmstart": 0.4, "rl": 0.3, "development": 0.1, "test": 0.2}
"""The share of all prompts that belongs to each split."""

CARELESS_PER_LEVEL = 0.15
"""Probability, times the level, that a column of the corpus leaves out the carry term."""

DROPPED_CARRY = 0.7
"""Probability that a column without its carry term also forgets a carry of 1."""

SLIP_PER_LEVEL = 0.015
"""Probability, times the level, that a column's sum is written one too high or one too low."""

PAD, EOS = "<pad>", "<eos>"
VOCABULARY = (PAD, EOS, *"0123456789+=,}", r"\boxed{")


def tokenizer() -> PreTrainedTokenizerFast:
    r"""Build the tokenizer: one token a character, ``\boxed{`` in one, no token at the start.

    Encoding adds nothing (the caller ends an answer with ``eos_token_id``) and decoding gives back
    the text exactly. Text with any other character is refused by ``encode``.
    """
    vocabulary = {token: index for index, token in enumerate(VOCABULARY)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))  # not in it: an error
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\\boxed\{|[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
    )


def prompt_of(a: int, b: int) -> str:
    """Write the prompt that asks for ``a + b``."""
    return f"{a}+{b}="


def split_of(prompt: str) -> Split:
    """Say which split a prompt belongs to, by a hash of its text: the same everywhere, for ever."""
    digest = hashlib.blake2b(prompt.encode(), digest_size=8, person=b"addition").digest()
    position = int.from_bytes(digest, "big") / 2**64
    for split, share in SPLIT_SHARES.items():
        position -= share
        if position < 0:
            return split
    return split


def problems(
    split: Split, *, count: int, levels: Sequence[int] = LEVELS, seed: int = 0
) -> list[Problem]:
    """Draw distinct problems of one split, as evenly over the levels as the levels go.

    There are only 100 one-digit sums; once a level has given all that the split holds of it, the
    other levels share the rest. The levels take turns, so a smaller ``count`` gives the first
    problems of a larger one.

    Args:
        split: where to draw from.
        count: how many problems.
        levels: the numbers of digits, each in ``LEVELS``.
        seed: another seed, another draw.

    Returns:
        ``count`` problems with ``prompt_id`` 0, 1, 2, ...; ``difficulty`` is None.

    Raises:
        ValueError: an unknown split or level, or more problems asked for than there are.
    """
    if split not in SPLIT_SHARES:
        raise ValueError(f"split {split!r} is unknown; choose one of {', '.join(SPLIT_SHARES)}")
    turns = [_distinct(split, level, seed) for level in _checked(levels)]
    drawn: list[Problem] = []
    while len(drawn) < count:
        if not turns:
            raise ValueError(
                f"count is {count}, but split {split!r} has only {len(drawn)} problems at levels "
                f"{list(levels)}; ask for fewer or add levels"
            )
        turn = turns.pop(0)
        if (pair := next(turn, None)) is None:
            continue
        turns.append(turn)
        a, b = pair
        prompt = prompt_of(a, b)
        drawn.append(
            Problem(
                prompt_id=len(drawn),
                source_id=prompt,
                dataset=DATASET,
                text=prompt,
                gold=str(a + b),
                level=len(str(a)),
                difficulty=None,
            )
        )
    return drawn


def worked_answer(a: int, b: int) -> str:
    """Write the careful, right answer to ``a + b``.

    Raises:
        ValueError: a negative number, or numbers of different length.
    """
    steps, carry = [], 0
    for x, y in _columns(a, b):
        total = x + y + carry
        steps.append(f"{x}+{y}+{carry}={total}")
        carry = total // 10
    return _boxed(steps)


def flawed_answer(a: int, b: int, *, rng: random.Random) -> str:
    """Write an answer to ``a + b`` with the mistakes of the corpus (see the module's constants).

    Each column on its own may be careless and may slip; what it gets wrong is carried on.

    Raises:
        ValueError: a negative number, or numbers of different length.
    """
    columns = _columns(a, b)
    level = len(columns)
    steps, carry = [], 0
    for x, y in columns:
        careless = rng.random() < CARELESS_PER_LEVEL * level
        forgets = careless and rng.random() < DROPPED_CARRY
        total = x + y + (0 if forgets else carry)
        if rng.random() < SLIP_PER_LEVEL * level:
            total = _one_off(total, rng)
        steps.append(f"{x}+{y}={total}" if careless else f"{x}+{y}+{carry}={total}")
        carry = total // 10
    return _boxed(steps)


def corpus(count: int, *, seed: int, levels: Sequence[int] = LEVELS) -> list[tuple[str, str]]:
    """Write the warm start's corpus: prompts of its split and answers that are often wrong.

    Levels are drawn evenly and prompts with replacement, each time with new mistakes.

    Returns:
        ``count`` pairs (prompt, answer), without end-of-sequence token.

    Raises:
        ValueError: an unknown level, or none.
    """
    levels = _checked(levels)
    rng = random.Random(f"corpus {seed}")
    pairs: list[tuple[str, str]] = []
    while len(pairs) < count:
        level = rng.choice(levels)
        a, b = _number(level, rng), _number(level, rng)
        while split_of(prompt_of(a, b)) != "warmstart":
            a, b = _number(level, rng), _number(level, rng)
        pairs.append((prompt_of(a, b), flawed_answer(a, b, rng=rng)))
    return pairs


def _checked(levels: Sequence[int]) -> list[int]:
    """Refuse a level outside ``LEVELS``, and no level at all."""
    if not levels or not set(levels) <= set(LEVELS):
        raise ValueError(
            f"levels is {list(levels)}; give at least one number of digits from "
            f"{LEVELS.start} to {LEVELS.stop - 1}"
        )
    return sorted(set(levels))


def _number(level: int, rng: random.Random) -> int:
    """Draw a number of ``level`` digits; 0 has one digit."""
    return rng.randrange(_smallest(level), 10**level)


def _smallest(level: int) -> int:
    return 0 if level == 1 else 10 ** (level - 1)


def _distinct(split: Split, level: int, seed: int) -> Iterator[tuple[int, int]]:
    """Yield the split's pairs of numbers at one level in random order, each once."""
    rng = random.Random(f"problems {split} {level} {seed}")
    seen: set[tuple[int, int]] = set()
    while len(seen) < (10**level - _smallest(level)) ** 2:
        pair = _number(level, rng), _number(level, rng)
        if pair in seen:
            continue
        seen.add(pair)
        if split_of(prompt_of(*pair)) == split:
            yield pair


def _columns(a: int, b: int) -> list[tuple[int, int]]:
    """Pair the digits of two numbers, from the right."""
    if min(a, b) < 0 or len(str(a)) != len(str(b)):
        raise ValueError(f"{a} and {b} must have the same number of digits and no sign")
    return [(int(x), int(y)) for x, y in zip(reversed(str(a)), reversed(str(b)), strict=True)]


def _one_off(total: int, rng: random.Random) -> int:
    """Miss a column's sum by one, up or down, staying within what a column can hold (0 to 19)."""
    missed = total + rng.choice((-1, 1))
    return missed if 0 <= missed <= 19 else 2 * total - missed


def _boxed(steps: list[str]) -> str:
    """Join the columns and box what they lead to: each sum's last digit, the last sum whole."""
    *low, high = (step.split("=")[1] for step in steps)
    result = high + "".join(total[-1] for total in reversed(low))
    return ",".join(steps) + rf",\boxed{{{result}}}"
