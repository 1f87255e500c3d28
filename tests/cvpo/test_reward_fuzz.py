"""No response may raise, hang or run anything: seeded random text and worst cases, timed."""

import random
import time

import pytest

from cvpo import reward
from cvpo.reward import answers_match, extract_answer, normalize_answer, verify

MATHEMATICS = r"""
\boxed{ \boxed \fbox{ \boxed{} \\boxed{ Answer: **Answer:** answer： \frac \frac{ \dfrac12 \sqrt
\sqrt[ \sqrt( \left( \right) \left. \text{ \mathrm{E} \text{and} \begin{pmatrix} \end{pmatrix} \\ &
\, \! \; \% \$ $ $$ \( \) \[ \] \{ \} { } { } ( ) [ ] {,} ^ _ ^{ _{ ^\circ \pi \infty \pm \in = \neq
< > \leq \cup + - * / | ! ' : ; , . 0 1 12 007 1,000 3.50 .4 10^9 9^{9^{9}} x y=5 x_1 e i abc and or
cm dollars percent (A) B. \overline{3} \sum_{k=1}^{n} \int \lim \log_2 \sin \binom \cdot \times
\bmod \mathbb \unknown
"""
CHARACTERS = [*' \n\t\r\x00\x0b\x85\u200b\u2028\ud800\udfff\ufffeé答½²−π４٣😀"', "\\", "  ", "千克"]
CODE = ["千克", "__import__('os')", "lambda", "None", "nan", "inf", "1e999", "%s", "{0}", "'''"]
FRAGMENTS = [*MATHEMATICS.split(), *CHARACTERS, *CODE]


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
        # Its own answer as the gold one makes it right, unless nothing but $ and space is in it.
        assert verify(text, answer, verifier=verifier) == float(bool(reward._bare(answer)))
    assert answered > 40_000
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
        gold = rng.choice(["12", "x=5", "[0,1)"])
        scores.append(verify(response(rng), gold, verifier="symbolic"))
        assert time.monotonic() - start < 30.0  # with the start of a new process
    assert set(scores) <= {0.0, 1.0}
    assert answers_match("4", "12/3", verifier="symbolic")


REPEATED = r"""
\boxed{ \boxed \boxed_1 \boxed_1{ \boxed{} \\boxed{ { } \frac \frac{ \sqrt[ \sqrt( ( ) \text{
\text{a} \text{\text{ \left \left. \hspace{ \begin{a}\\ \sqrt{a}/ \\ \! \% \$ $ ~ ^\circ {}^\circ
{,} - + a a_ a. aa_bb_ 1 1_ 1, 1,111 1. . 0 00 1/ 1_1/1_ x= x=1, _/_ and_ (A)_ A._ a_b( f(a, |a|=
0.\overline{3} Answer: *Answer: >_ 千 答
"""
PIECES = [piece.replace("_", " ") for piece in REPEATED.split()]
PIECES += [" ", "\t", "\n", "\nAnswer:\n", "\x00", "\ud800", "a_", "_{1}"]


@pytest.mark.slow
@pytest.mark.parametrize("piece", PIECES, ids=ascii)
def test_a_megabyte_of_one_piece_takes_linear_time(piece: str) -> None:
    text = piece * (2**20 // len(piece))
    for whole in (text + "5", f"\\boxed{{{text}}}"):
        start = time.process_time()
        assert verify(whole, "no such answer", verifier="symbolic") == 0.0
        assert time.process_time() - start < 10.0


@pytest.mark.parametrize("piece", PIECES, ids=ascii)
def test_longest_normalised_answer_takes_no_time(piece: str) -> None:
    text = piece * (reward.MAX_ANSWER_LENGTH // len(piece) - 1)
    for whole in (text, text + "}", text + "x", "1" + text, "{" + text):
        start = time.process_time()
        normalize_answer(whole)
        assert time.process_time() - start < 1.0
