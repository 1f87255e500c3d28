r"""Was the final answer right? Extraction, three verifiers and the +1 / -1 rule.

The final answer of a response is the content of its last `\boxed{...}` (or `\fbox{...}`, braces
balanced) or else what follows the last `Answer:` at the start of a line. It is right if it equals
the gold answer under a verifier:

- `exact`: the same characters; only surrounding white space, `$` and a final full stop are
  dropped. The paper's rule.
- `normalized`: the same string normal form (`cvpo._normalize`).
- `symbolic`: that, or Math-Verify calls the two equal. It runs in a process of its own, which is
  killed when it takes too long.

There is no partial credit: no answer, an unreadable one and a wrong one all score 0. No response
may raise, hang or run anything, whatever is in it.
"""

import atexit
import contextlib
import importlib.util
import json
import os
import re
import selectors
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import torch
from torch import Tensor

from cvpo._normalize import NormalAnswer, symbolic_form, take_apart

VERIFIERS = ("exact", "normalized", "symbolic")

MAX_ANSWER_LENGTH = 4000
"""Characters. A longer answer (or gold) is only compared exactly; real ones are below 500."""

SYMBOLIC_SECONDS = 5.0
"""Wall-clock time one symbolic comparison may take. An answer that takes longer counts as wrong."""

SYMBOLIC_BYTES = 4 * 2**30
"""Address space the symbolic verifier's process may take. Read when the process starts."""

FAILURES = ("timeout", "crash", "memory", "unreadable")
"""Why a symbolic comparison may have no verdict: it took too long, its process died, it took too
much memory, or Math-Verify raised (the common fate of prose in a box)."""

_START_SECONDS = 120.0  # importing SymPy from a cold network disk
_REQUESTS_PER_PROCESS = 20_000  # then a fresh one: the parser's caches only grow

# --- extraction ------------------------------------------------------------------------------

# A doubled backslash before `boxed` is an escape left in; anywhere else it is a line break.
_INTEGER = re.compile(r"-?\d+", re.ASCII)
_BOX_OR_BRACE = re.compile(
    r"(?P<box>\\(?:boxed|fbox)(?![A-Za-z])\s*)(?P<open>\{)?|\\\\(?!boxed|fbox)|\\[{}]|(?P<brace>[{}])"
)
_BARE_START = re.compile(r"[-+]?\.?\d|[-+]?\\(?!boxed|fbox)[A-Za-z]")
_BARE_PIECE = re.compile(r"\\[()\[\]{}]|[\s${}]")
_ANSWER_LINE = re.compile(r"^[ \t>#*_~`-]*Answer[*_`]*[ \t]*[:：]", re.MULTILINE | re.IGNORECASE)
_EDGES = "$" + "".join(filter(str.isspace, map(chr, range(0x3001))))
_PLAIN_BRACKETS = re.compile(r"(\()[^()\[\]{}]*\)|(\\\{)[^()\[\]{}]*\\\}")
_MATH_DELIMITERS = ("$", "$$", r"\[", r"\(")


@dataclass
class _Box:
    """Where a box's command, its content and its closing brace (None: never closed) stand."""

    command: int
    start: int
    end: int | None = None
    braced: bool = True


def extract_answer(response: str) -> str | None:
    r"""The final answer of a response, or None.

    The last box wins over any `Answer:`. If it is not closed the response was cut short and has
    no answer, whatever stands before it; an empty one holds no answer either. A box around boxes
    is one answer, the inner commands dropped. `\boxed 42` counts, up to the next space; `\boxed`
    before a word is only a mention of the command and is passed over.

    `Answer:` may be in any case and stand behind Markdown (`**Answer:** 7`, `> # Answer: 7`); the
    last one wins. If the rest of its line is empty, the answer is the next line that is not.

    Args:
        response: The model's whole response, without the prompt.

    Returns:
        The answer without surrounding white space, never empty; None if there is none.

    Raises:
        TypeError: If `response` is not a string.
    """
    _require_text(response=response)
    boxes = _find_boxes(response)
    if not boxes:
        return _after_answer_line(response)
    last = boxes[-1]
    if not last.braced:
        last.end = _bare_end(response, last.start)
    if last.end is None:
        return None
    first = next(i for i, box in enumerate(boxes) if box.end is not None and box.end >= last.end)
    return _content(response, boxes[first], boxes[first + 1 :]).strip() or None


def _find_boxes(text: str) -> list[_Box]:
    """All boxes in the order of their commands, in one pass over the text."""
    boxes: list[_Box] = []
    opened: list[_Box | None] = []  # the open braces, with the box each belongs to
    for match in _BOX_OR_BRACE.finditer(text):
        if match["box"] and match["open"]:
            boxes.append(_Box(match.start(), match.end()))
            opened.append(boxes[-1])
        elif match["box"]:
            if _BARE_START.match(text, match.end()):
                boxes.append(_Box(match.start(), match.end(), braced=False))
        elif match["brace"] == "{":
            opened.append(None)
        elif match["brace"] == "}" and opened and (box := opened.pop()):
            box.end = match.start()
    return boxes


def _bare_end(text: str, start: int) -> int:
    r"""Where the answer of `\boxed 42` ends: at white space or a math delimiter outside braces."""
    depth = 0
    for match in _BARE_PIECE.finditer(text, start):
        if match[0] == "{":
            depth += 1
        elif match[0] == "}":
            depth -= 1
        if depth < 0 or (depth == 0 and match[0] not in ("}", r"\{", r"\}")):
            return match.start()
    return len(text)


def _content(text: str, box: _Box, inner: list[_Box]) -> str:
    """The content of a box without the commands and braces of the boxes inside it."""
    cuts = [(b.command, b.start) for b in inner]
    cuts += [(b.end, b.end + 1) for b in inner if b.end is not None and b.braced]
    pieces, at = [], box.start
    for start, end in sorted(cuts):
        pieces.append(text[at:start])
        at = end
    return "".join(pieces) + text[at : box.end]


def _after_answer_line(text: str) -> str | None:
    match = None
    for match in _ANSWER_LINE.finditer(text):  # noqa: B007 - the last one is wanted
        pass
    if match is None:
        return None
    for line in text[match.end() :].split("\n"):
        line = line.strip().strip("`").strip()
        if line.startswith("*") or "*" in match[0]:
            line = line.strip("* \t").strip()
        if line and line not in _MATH_DELIMITERS:
            return line
    return None


# --- verification ----------------------------------------------------------------------------


def verify(response: str, gold: str, *, verifier: str = "exact") -> float:
    """Grade a whole response.

    Args:
        response: The model's response; its final answer is extracted here.
        gold: The right answer, bare.
        verifier: One of `VERIFIERS`.

    Returns:
        1.0 if the response has a final answer and it is right, else 0.0.

    Raises:
        TypeError: If `response` or `gold` is not a string.
        ValueError: If the verifier is unknown.
        ImportError: If `symbolic` is asked for and math-verify is not installed.
    """
    _require_text(gold=gold)
    _require_verifier(verifier)
    answer = extract_answer(response)
    return float(answer is not None and answers_match(answer, gold, verifier=verifier))


def answers_match(answer: str, gold: str, *, verifier: str) -> bool:
    """Whether a bare answer equals the gold answer. An empty one equals nothing.

    Args:
        answer: The final answer, already extracted.
        gold: The right answer. `symbolic` is not symmetric: an answer `2x + z = 1` may stand for
            1, but 1 does not answer a gold equation.
        verifier: One of `VERIFIERS`.

    Raises:
        TypeError: If `answer` or `gold` is not a string.
        ValueError: If the verifier is unknown.
        ImportError: If `symbolic` is asked for and math-verify is not installed.
    """
    found = match_text(answer, gold, verifier=verifier)
    if isinstance(found, bool):
        return found
    return _WORKER.compare(*found, seconds=SYMBOLIC_SECONDS).equal


def match_text(answer: str, gold: str, *, verifier: str) -> bool | tuple[str, str]:
    """`answers_match` as far as text decides it, without algebra.

    Args:
        answer: The final answer, already extracted.
        gold: The right answer.
        verifier: One of `VERIFIERS`.

    Returns:
        The verdict, or what `SymbolicWorker.compare` is to be asked: the two answers in symbolic
        form.

    Raises:
        TypeError: If `answer` or `gold` is not a string.
        ValueError: If the verifier is unknown.
        ImportError: If `symbolic` is asked for and math-verify is not installed.
    """
    _require_text(answer=answer, gold=gold)
    _require_verifier(verifier)
    if not _bare(answer) or not _bare(gold):
        return False
    if _bare(answer) == _bare(gold):
        return True
    if verifier == "exact" or max(len(answer), len(gold)) > MAX_ANSWER_LENGTH:
        return False
    ours, theirs = take_apart(answer), take_apart(gold)
    if _conflict(ours, theirs):
        return False
    values = (ours.value, theirs.value), (ours.choice, theirs.value), (ours.value, theirs.choice)
    if any(a and a == b for a, b in values):
        return True
    if verifier == "normalized" or _both_integers(ours.value, theirs.value):
        return False
    left, right = symbolic_form(answer), symbolic_form(gold)
    return (left, right) if left is not None and right is not None else False


def _both_integers(ours: str, theirs: str) -> bool:
    """Two different whole numbers need no algebra: most wrong answers end here, not in SymPy."""
    return bool(_INTEGER.fullmatch(ours) and _INTEGER.fullmatch(theirs))


def normalize_answer(answer: str) -> str:
    r"""The normal form two answers must share to be equal under `normalized`.

    `\dfrac12` and `1/2` give `\frac{1}{2}`, `10{,}000` and `10,000.0` give `10000`, `x = 5` gives
    `5`, `\text{(A)}` gives `A`, `15\text{ cm}^2` gives `15`. Unequal values keep unequal forms.
    An answer longer than `MAX_ANSWER_LENGTH` is only stripped.

    Raises:
        TypeError: If `answer` is not a string.
    """
    _require_text(answer=answer)
    return take_apart(answer).value if len(answer) <= MAX_ANSWER_LENGTH else _bare(answer)


def _bare(answer: str) -> str:
    """Without surrounding white space, `$` and a final full stop, inside or outside the `$`."""
    return answer.strip(_EDGES).removesuffix(".").strip(_EDGES)


def _conflict(ours: NormalAnswer, theirs: NormalAnswer) -> bool:
    r"""Both say a unit, a variable or a bracket, not the same: 5 cm and 5 m, (1,2) and \{1,2\}."""
    pairs = (
        (ours.unit, theirs.unit),
        (ours.name, theirs.name),
        (_bracket(ours.value), _bracket(theirs.value)),
    )
    return any(a and b and a != b for a, b in pairs)


def _bracket(value: str) -> str:
    """The bracket around a value that has no other."""
    match = _PLAIN_BRACKETS.fullmatch(value)
    return (match[1] or match[2]) if match else ""


def _require_text(**values: object) -> None:
    for name, value in values.items():
        if not isinstance(value, str):
            raise TypeError(f"{name} must be a string, got {type(value).__name__}")


def _require_verifier(verifier: str) -> None:
    if verifier not in VERIFIERS:
        raise ValueError(f"unknown verifier {verifier!r}: choose one of {', '.join(VERIFIERS)}")
    if verifier == "symbolic" and importlib.util.find_spec("math_verify") is None:
        raise ImportError("the symbolic verifier needs math-verify: pip install 'cvpo[grade]'")


# --- the symbolic verifier's process ---------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """What came of a symbolic comparison."""

    equal: bool
    failure: str = ""
    """Why there is no verdict, one of `FAILURES`. Such an answer counts as wrong."""


_REPLIES = {
    b"true\n": Comparison(equal=True),
    b"false\n": Comparison(equal=False),
    b"memory\n": Comparison(equal=False, failure="memory"),
    b"unreadable\n": Comparison(equal=False, failure="unreadable"),
}


class SymbolicWorker:
    """A child process that compares answers, started on first use and replaced when it fails.

    A plain subprocess, since daemonic pool workers may not use multiprocessing; threads take turns.
    A forked child forgets its parent's and starts its own. It ends with this program, however that
    ends: idle, it reads the end of its input; busy, its own alarm goes off.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.served = 0  # by this process
        _WORKERS.add(self)

    def compare(self, answer: str, gold: str, *, seconds: float) -> Comparison:
        """Ask the process; one that fails is ended.

        Args:
            answer: In symbolic form, as `match_text` returns it.
            gold: Likewise.
            seconds: Wall-clock time the comparison may take; a start of the process not included.

        Raises:
            RuntimeError: If the process does not start.
        """
        request = {"answer": answer, "gold": gold, "seconds": seconds}
        line = json.dumps(request, ensure_ascii=True).encode("ascii") + b"\n"
        with self.lock:
            process = self._running()
            found = Comparison(equal=False, failure="timeout")
            try:
                with contextlib.suppress(TimeoutError):
                    reply = _ask(process, line, seconds)
                    found = _REPLIES.get(reply, Comparison(equal=False, failure="crash"))
            finally:
                self.served += 1
                # An unread reply, were it left, would answer the next question.
                failed = found.failure not in ("", "unreadable")
                if failed or self.served >= _REQUESTS_PER_PROCESS:
                    self._stop()
        return found

    def close(self) -> None:
        """End the process. It is started again if it is asked again."""
        with self.lock:
            self._stop()

    def _running(self) -> subprocess.Popen[bytes]:
        if self.process is not None and self.process.poll() is None:
            return self.process
        self._stop()
        script = Path(__file__).with_name("_symbolic_worker.py")
        command = [sys.executable, "-P", str(script), str(SYMBOLIC_BYTES)]
        process = self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # Ctrl-C is for the trainer
        )
        self.served = 0
        ready = False
        try:
            with contextlib.suppress(TimeoutError):
                ready = _ask(process, b"", _START_SECONDS) == b"ready\n"
        finally:
            if not ready:
                self._stop()
        if not ready:
            raise RuntimeError(
                f"the symbolic verifier did not start; to see why, run: {' '.join(command)}"
            )
        return process

    def _stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self._close_pipes()
            self.process.wait()
            self.process = None

    def _close_pipes(self) -> None:
        if self.process is not None and self.process.stdin and self.process.stdout:
            self.process.stdin.close()
            self.process.stdout.close()

    def forget(self) -> None:
        """In a forked child: drop the parent's process and lock without touching either."""
        if self.process is not None:
            self._close_pipes()
            self.process.returncode = 0  # not this process's child, so not ours to wait for
        self.lock = threading.Lock()
        self.process = None


def _ask(process: subprocess.Popen[bytes], line: bytes, seconds: float) -> bytes:
    """Write a line, read the line that answers it; b"" if the process ends instead.

    Raises:
        TimeoutError: If neither happens in time.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    deadline = time.monotonic() + seconds
    reply = b""
    try:
        while line:
            line = line[process.stdin.write(line) :]
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not reply.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                piece = process.stdout.read(4096)
                if not piece:
                    return b""
                reply += piece
    except BrokenPipeError:
        return b""
    return reply


def _stop_all() -> None:
    for worker in _WORKERS:
        worker._stop()


def _forget_all() -> None:
    for worker in _WORKERS:
        worker.forget()


_WORKERS: weakref.WeakSet[SymbolicWorker] = weakref.WeakSet()
_WORKER = SymbolicWorker()  # behind `answers_match`, one for all threads
atexit.register(_stop_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)

# --- rewards ---------------------------------------------------------------------------------


@overload
def training_reward(correct: float) -> float: ...
@overload
def training_reward(correct: Tensor) -> Tensor: ...
def training_reward(correct: float | Tensor) -> float | Tensor:
    """The terminal reward r = 2R - 1 of a correctness R in [0, 1]: +1 right, -1 wrong.

    Args:
        correct: R, a number or a tensor of any shape and dtype.

    Returns:
        r in [-1, 1], a float or a floating-point tensor of the same shape.
    """
    if isinstance(correct, Tensor) and not correct.is_floating_point():
        correct = correct.to(torch.get_default_dtype())
    return 2.0 * correct - 1.0


@overload
def overlong_penalty(length: int, *, max_length: int, cache: int) -> float: ...
@overload
def overlong_penalty(length: Tensor, *, max_length: int, cache: int) -> Tensor: ...
def overlong_penalty(length: int | Tensor, *, max_length: int, cache: int) -> float | Tensor:
    """DAPO's soft penalty on long responses (arXiv 2503.14476, eq. 13), added to the reward.

    0 up to max_length - cache tokens, then falling linearly to -1 at max_length and staying there.
    With cache 0 it is a step: 0 up to max_length, -1 above.

    Args:
        length: Response tokens, a number or a tensor of any shape.
        max_length: L_max in tokens, positive.
        cache: L_cache in tokens, in [0, max_length].

    Returns:
        The penalty in [-1, 0], a float or a floating-point tensor of the same shape.

    Raises:
        ValueError: If `max_length` or `cache` is out of range.
    """
    if max_length <= 0 or not 0 <= cache <= max_length:
        raise ValueError(f"need 0 <= cache <= max_length, got {cache=} and {max_length=}")
    lengths = torch.as_tensor(length)
    dtype = lengths.dtype if lengths.is_floating_point() else torch.get_default_dtype()
    excess = lengths - (max_length - cache)
    penalty = -(excess / cache).clamp(0, 1) if cache else -(excess > 0).to(dtype)
    penalty = torch.where(excess > 0, penalty, 0.0).to(dtype)  # 0, not -0
    return penalty if isinstance(length, Tensor) else penalty.item()
