import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from train.addition import (
    CARELESS_PER_LEVEL,
    DROPPED_CARRY,
    LEVELS,
    SLIP_PER_LEVEL,
    SPLIT_SHARES,
    VOCABULARY,
    corpus,
    flawed_answer,
    problems,
    prompt_of,
    split_of,
    tokenizer,
    worked_answer,
)


@st.composite
def sums(draw: st.DrawFn) -> tuple[int, int]:
    level = draw(st.sampled_from(LEVELS))
    numbers = st.integers(0 if level == 1 else 10 ** (level - 1), 10**level - 1)
    return draw(numbers), draw(numbers)


def read_steps(answer: str) -> tuple[list[tuple[list[int], int]], str]:
    """Take an answer apart: the terms and the sum of each column, and the box."""
    *columns, box = answer.split(",")
    steps = []
    for column in columns:
        terms, total = column.split("=")
        steps.append(([int(term) for term in terms.split("+")], int(total)))
    return steps, box.removeprefix(r"\boxed{").removesuffix("}")


def led_to(steps: list[tuple[list[int], int]]) -> str:
    """What the written sums amount to if each is believed: low digits, and the last sum whole."""
    value = sum(total % 10 * 10**place for place, (_, total) in enumerate(steps[:-1]))
    return str(value + steps[-1][1] * 10 ** (len(steps) - 1))


def operands(prompt: str) -> tuple[int, int]:
    a, b = prompt.removesuffix("=").split("+")
    return int(a), int(b)


def test_worked_answer_is_the_documented_one() -> None:
    assert worked_answer(698, 814) == r"8+4+0=12,9+1+1=11,6+8+1=15,\boxed{1512}"


@pytest.mark.parametrize(
    ("a", "b", "answer"),
    [
        (0, 0, r"0+0+0=0,\boxed{0}"),
        (9, 9, r"9+9+0=18,\boxed{18}"),
        (50, 50, r"0+0+0=0,5+5+0=10,\boxed{100}"),
        (999, 101, r"9+1+0=10,9+0+1=10,9+1+1=11,\boxed{1100}"),
    ],
)
def test_carries_run_through_to_the_last_column(a: int, b: int, answer: str) -> None:
    assert worked_answer(a, b) == answer


@given(sums())
def test_worked_answer_is_right_in_every_column_and_in_the_box(pair: tuple[int, int]) -> None:
    a, b = pair
    steps, box = read_steps(worked_answer(a, b))
    assert box == led_to(steps) == str(a + b)
    assert all(sum(terms) == total for terms, total in steps)
    assert [terms[:2] for terms, _ in steps] == [
        [a // 10**place % 10, b // 10**place % 10] for place in range(len(str(a)))
    ]
    carries = [(a % 10**place + b % 10**place) // 10**place for place in range(len(str(a)))]
    assert [terms[2] for terms, _ in steps] == carries


@pytest.mark.parametrize(("a", "b"), [(12, 3), (-1, 2), (5, 10)])
def test_numbers_of_different_length_or_sign_are_refused(a: int, b: int) -> None:
    with pytest.raises(ValueError, match=f"{a} and {b} must have the same number of digits"):
        worked_answer(a, b)


@given(sums(), st.integers())
def test_flawed_answer_boxes_what_its_steps_lead_to(pair: tuple[int, int], seed: int) -> None:
    steps, box = read_steps(flawed_answer(*pair, rng=random.Random(seed)))
    assert box == led_to(steps)
    assert len(steps) == len(str(pair[0]))
    assert all(0 <= total <= 19 for _, total in steps)


@given(sums(), st.integers())
def test_a_column_is_wrong_only_by_a_forgotten_carry_or_a_slip(
    pair: tuple[int, int], seed: int
) -> None:
    carry = 0
    for terms, total in read_steps(flawed_answer(*pair, rng=random.Random(seed)))[0]:
        careful = len(terms) == 3
        assert not careful or terms[2] == carry
        allowed = {carry} if careful else {0, carry}
        misses = {total - sum(terms[:2]) - used for used in allowed}
        assert misses & {-1, 0, 1}
        carry = total // 10


def twin_is_right(level: int, rng: random.Random) -> bool:
    """Whether a flawed sum comes out right, from the constants alone, by arithmetic on columns."""
    low = 0 if level == 1 else 10 ** (level - 1)
    a, b = rng.randrange(low, 10**level), rng.randrange(low, 10**level)
    value = carry = 0
    for place in range(level):
        careless = rng.random() < CARELESS_PER_LEVEL * level
        if careless and rng.random() < DROPPED_CARRY:
            carry = 0
        total = a // 10**place % 10 + b // 10**place % 10 + carry
        if rng.random() < SLIP_PER_LEVEL * level:
            total += {0: 1, 19: -1}.get(total, rng.choice((-1, 1)))
        carry = total // 10
        value += (total if place == level - 1 else total % 10) * 10**place
    return value == a + b


@pytest.mark.parametrize("level", LEVELS)
def test_corpus_is_as_wrong_as_its_constants_imply(level: int) -> None:
    # The difference of two rates from 4000 draws each has a standard error of at most .0112.
    rng = random.Random(1)
    expected = sum(twin_is_right(level, rng) for _ in range(4000)) / 4000
    pairs = corpus(4000, seed=0, levels=[level])
    right = sum(read_steps(answer)[1] == str(sum(operands(prompt))) for prompt, answer in pairs)
    assert right / 4000 == pytest.approx(expected, abs=0.045)
    assert 0 < right < 4000


@pytest.mark.parametrize("level", LEVELS)
def test_corpus_leaves_out_the_carry_term_at_the_stated_rate(level: int) -> None:
    columns = [
        terms
        for _, answer in corpus(2000, seed=3, levels=[level])
        for terms, _ in read_steps(answer)[0]
    ]
    careless = sum(len(terms) == 2 for terms in columns) / len(columns)
    assert careless == pytest.approx(CARELESS_PER_LEVEL * level, abs=0.04)


@pytest.mark.parametrize("level", LEVELS)
def test_careful_columns_slip_at_the_stated_rate(level: int) -> None:
    columns = [
        (terms, total)
        for _, answer in corpus(24000 // level, seed=5, levels=[level])
        for terms, total in read_steps(answer)[0]
        if len(terms) == 3
    ]
    slips = sum(sum(terms) != total for terms, total in columns) / len(columns)
    expected = SLIP_PER_LEVEL * level
    assert slips == pytest.approx(expected, abs=4 * (expected / len(columns)) ** 0.5)


@pytest.mark.parametrize(("terms", "slipped"), [([0, 0, 0], 1), ([9, 9, 1], 18)])
def test_a_column_at_its_bound_slips_as_often_but_only_inwards(
    terms: list[int], slipped: int
) -> None:
    rng = random.Random(0)
    columns = [
        column
        for _ in range(6000)
        for pair in [(10, 10), (99, 99)]
        for column in read_steps(flawed_answer(*pair, rng=rng))[0]
    ]
    totals = [total for found, total in columns if found == terms]
    assert set(totals) == {sum(terms), slipped}
    assert totals.count(slipped) / len(totals) == pytest.approx(SLIP_PER_LEVEL * 2, abs=0.01)


def test_corpus_keeps_to_the_warm_start_split_and_shares_levels_evenly() -> None:
    prompts = [prompt for prompt, _ in corpus(6000, seed=0)]
    assert {split_of(prompt) for prompt in prompts} == {"warmstart"}
    shares = Counter(len(str(operands(prompt)[0])) for prompt in prompts)
    assert set(shares) == set(LEVELS)
    assert all(share == pytest.approx(1000, abs=150) for share in shares.values())


def test_same_seed_same_corpus_other_seed_other_corpus() -> None:
    assert corpus(50, seed=4) == corpus(50, seed=4)
    assert corpus(50, seed=4) != corpus(50, seed=5)


def test_splits_do_not_move() -> None:
    golden = {
        "0+0=": "development",
        "9+9=": "test",
        "7+5=": "warmstart",
        "50+50=": "rl",
        "698+814=": "warmstart",
        "123456+654321=": "warmstart",
    }
    assert {prompt: split_of(prompt) for prompt in golden} == golden


def test_splits_have_their_shares() -> None:
    shares = Counter(split_of(prompt_of(a, b)) for a in range(10, 100) for b in range(10, 100))
    for split, share in SPLIT_SHARES.items():
        assert shares[split] / 8100 == pytest.approx(share, abs=0.02)
    one_digit = Counter(split_of(prompt_of(a, b)) for a in range(10) for b in range(10))
    assert all(one_digit[split] >= 50 * share for split, share in SPLIT_SHARES.items())


def test_splits_share_no_problem() -> None:
    drawn = {split: {p.text for p in problems(split, count=600)} for split in SPLIT_SHARES}
    assert sum(map(len, drawn.values())) == len(set.union(*drawn.values())) == 4 * 600
    for split, texts in drawn.items():
        assert {split_of(text) for text in texts} == {split}


def test_problems_say_what_they_are() -> None:
    for index, problem in enumerate(problems("rl", count=60)):
        a, b = operands(problem.text)
        assert problem.prompt_id == index
        assert problem.source_id == problem.text == prompt_of(a, b)
        assert problem.gold == str(a + b)
        assert len(str(a)) == len(str(b)) == problem.level
        assert problem.dataset == "addition"
        assert problem.difficulty is None


def test_the_few_one_digit_sums_are_all_used_and_the_other_levels_share_the_rest() -> None:
    held = sum(split_of(prompt_of(a, b)) == "rl" for a in range(10) for b in range(10))
    levels = Counter(problem.level for problem in problems("rl", count=256))
    assert levels[1] == held < 256 / 6
    others = [levels[level] for level in LEVELS if level > 1]
    assert max(others) - min(others) <= 1


def test_levels_are_balanced_while_none_is_used_up() -> None:
    assert Counter(p.level for p in problems("test", count=60)) == dict.fromkeys(LEVELS, 10)
    assert {p.level for p in problems("test", count=20, levels=[5, 2])} == {2, 5}


def test_same_seed_same_problems_and_fewer_are_the_first_of_more() -> None:
    assert problems("rl", count=100) == problems("rl", count=100)
    assert problems("rl", count=256)[:100] == problems("rl", count=100)
    assert problems("rl", count=100, seed=1) != problems("rl", count=100)


def test_more_problems_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match=r"count is 101, but split 'rl' has only \d+ problems"):
        problems("rl", count=101, levels=[1])


@pytest.mark.parametrize("levels", [[], [0], [3, 7]])
def test_unknown_levels_are_refused(levels: list[int]) -> None:
    with pytest.raises(ValueError, match=r"levels is \[.*\]; give at least one number of digits"):
        problems("rl", count=1, levels=levels)
    with pytest.raises(ValueError, match=r"levels is \[.*\]; give at least one number of digits"):
        corpus(1, seed=0, levels=levels)


def test_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="split 'train' is unknown; choose one of warmstart"):
        problems("train", count=1)  # type: ignore[arg-type]


@given(sums(), st.integers())
def test_tokenizer_gives_back_the_text_exactly(pair: tuple[int, int], seed: int) -> None:
    tok = tokenizer()
    text = prompt_of(*pair) + flawed_answer(*pair, rng=random.Random(seed))
    ids = tok.encode(text)
    assert tok.decode(ids) == text
    assert len(ids) == len(text) - len(r"\boxed{") + 1
    assert tok.eos_token_id not in ids
    assert tok.decode([*ids, tok.eos_token_id, tok.pad_token_id], skip_special_tokens=True) == text


def test_tokenizer_survives_saving(tmp_path: Path) -> None:
    tok = tokenizer()
    tok.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = prompt_of(698, 814) + worked_answer(698, 814)
    assert again.encode(text) == tok.encode(text)
    assert again.decode(again.encode(text)) == text
    assert again.get_vocab() == tok.get_vocab()
    assert (again.pad_token_id, again.eos_token_id, again.bos_token_id) == (0, 1, None)
    assert len(again) == len(VOCABULARY) == 17


def test_tokenizer_refuses_text_it_cannot_write() -> None:
    with pytest.raises(Exception, match=r"Missing \[UNK\] token"):
        tokenizer().encode("698 + 814 =")
