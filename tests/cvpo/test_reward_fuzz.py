"""No response may raise, hang or run anything: seeded random text and worst cases, timed."""

import random
import time

import pytest

from cvpo import reward
from cvpo.reward import VERIFIERS, answers_match, extract_answer, normalize_answer, verify

FRAGMENTS = [
    *(r"\boxed{ \boxed \fbox{ \boxed{} \\boxed{ Answer: **Answer:** answer： \frac \frac{ \dfrac12 "
      r"\sqrt \sqrt[ \sqrt( \left( \right) \left. \text{ \mathrm{E} \text{and} \begin{pmatrix} "
      r"\end{pmatrix} \\ & \, \! \; \% \$ $ $$ \( \) \[ \] \{ \} { } { } ( ) [ ] {,} ^ _ ^{ _{ ^\circ "
      r"\pi \infty \pm \in = \neq < > \leq \cup + - * / | ! ' : ; , . 0 1 12 007 1,000 3.50 .4 10^9 "
      r"9^{9^{9}} x y=5 x_1 e i abc and or cm dollars percent (A) B. \overline{3} \sum_{k=1}^{n} \int "
      r"\lim \log_2 \sin \binom \cdot \times \bmod \mathbb \unknown").split(),
    " ", "  ", "\n", "\t", "\r\n", "\x00", "\x0b", "\x85", "\u200b", "\u2028", "\ud800", "\udfff",
    "\ufffe", "é", "答", "千克", "½", "²", "−", "π", "４", "٣", "😀", "\\", '"', "'''", "%s", "{0}",
    "__import__('os')", "lambda", "None", "nan", "inf", "1e999",
]  # fmt: skip


def response(rng: random.Random) -> str:
    text = "".join(rng.choice(FRAGMENTS) for _ in range(rng.randrange(1, 25)))
    if rng.random() < 0.6:
        text = f"\\boxed{{{text}}}"
    return text


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["exact", "normalized"])
def test_hundred_thousand_random_responses_are_graded(verifier: str) -> None:
    rng = random.Random(verifier)
    answered = right = 0
    for _ in range(100_000):
        text = response(rng)
        answer = extract_answer(text)
        if answer is None:
            assert verify(text, "12", verifier=verifier) == 0.0
            continue
        answered += 1
        assert answer == answer.strip() != ""
        score = verify(text, "12", verifier=verifier)
        assert score in (0.0, 1.0)
        right += score == 1.0
        # What it answered is right when it is the gold answer, unless that is empty of content.
        assert verify(text, answer, verifier=verifier) == float(bool(answer.strip("$ .")) or 0) or (
            not any(char.isalnum() for char in answer)
        )
    assert answered > 50_000
    assert right > 0


@pytest.mark.slow
def test_two_thousand_random_responses_are_graded_symbolically(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reward, "SYMBOLIC_SECONDS", 1.0)
    rng = random.Random("symbolic")
    scores = []
    for _ in range(2_000):
        start = time.monotonic()
        scores.append(
            verify(response(rng), rng.choice(["12", "x=5", "[0,1)"]), verifier="symbolic")
        )
        assert time.monotonic() - start < 30.0  # with the start of a new process
    assert set(scores) <= {0.0, 1.0}
    assert answers_match("4", "12/3", verifier="symbolic")


PIECES = sorted(
    {
        *FRAGMENTS,
        "\\boxed 1{",
        "\\boxed{}",
        "a ",
        "aa bb ",
        "1,",
        "1,111",
        "1/",
        "x=1,",
        "and ",
        "~",
    }
    | {
        "\nAnswer:\n",
        "*Answer:",
        "> ",
        "{}^\\circ",
        "\\text{a}",
        "\\text{\\text{",
        "(A) ",
        "1 1/1 ",
    }
    | {"\\hspace{", "\\begin{a}\\\\", "\\sqrt{a}/", "a_b(", "f(a,", "0.\\overline{3}", " / ", "1 "},
    key=repr,
)


@pytest.mark.slow
@pytest.mark.parametrize("piece", PIECES, ids=ascii)
def test_a_megabyte_of_one_piece_takes_linear_time(piece: str) -> None:
    text = piece * (2**20 // len(piece))
    for whole in (text, text + "5", f"\\boxed{{{text}}}", f"\\boxed{{{text}"):
        start = time.process_time()
        for verifier in VERIFIERS:
            assert verify(whole, "no such answer", verifier=verifier) == 0.0
        assert time.process_time() - start < 15.0


@pytest.mark.parametrize("piece", PIECES, ids=ascii)
def test_longest_normalised_answer_takes_no_time(piece: str) -> None:
    text = piece * (reward.MAX_ANSWER_LENGTH // len(piece) - 1)
    for whole in (text, text + "}", text + "x", "1" + text, "{" + text):
        start = time.process_time()
        normalize_answer(whole)
        assert time.process_time() - start < 1.0
