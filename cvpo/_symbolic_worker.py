"""The process that compares answers with Math-Verify, one JSON line in, one word out.

Run by `cvpo.reward` as a script, never imported. Parsing and simplifying a model's text can take
for ever, take all memory or crash the interpreter, and Math-Verify's own time limit works only on
a main thread; a separate process can simply be killed. Its argument is the limit of its address
space in bytes.
"""

# mypy: disable-error-code="import-untyped"
import contextlib
import json
import logging
import os
import re
import resource
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn


def _refuse_code(*_arguments: object) -> NoReturn:
    raise ValueError("text is never evaluated as Python here")


def _number(text: str, *_arguments: object, **_options: object) -> Any:
    """All that SymPy's parser is asked for here: a number as the LaTeX grammar has it."""
    from sympy import Float, Integer

    if re.fullmatch(r"[0-9]+", text):
        return Integer(text)
    if re.fullmatch(r"[0-9]*\.[0-9]+|[0-9]+\.", text):
        return Float(text)
    return _refuse_code()


def _guard_libraries() -> None:
    """Close SymPy's evaluation of strings; make Math-Verify compare numbers relatively."""
    import sympy.physics.units  # noqa: F401 - read from strings by simplify() on first use
    from math_verify import grader
    from sympy import Float, solve
    from sympy.parsing import sympy_parser

    # sympify("...") ends in eval(), and the LaTeX parser calls it on every number.
    sympy_parser.parse_expr = _number
    sympy_parser.eval_expr = _refuse_code

    numeric_eq = grader.sympy_numeric_eq

    def relative_numeric_eq(a: Any, b: Any, *digits: int) -> bool:
        # Its comparison is absolute: 1/2^98 and 1/2^99 differ by "0", and so do 1e-7 and 2e-7.
        if not numeric_eq(a, b, *digits):
            return False
        if not (getattr(a, "is_number", False) and getattr(b, "is_number", False)):
            return True
        # 28\% may be meant as 28 or as .28.
        return any(
            close(x.doit(), y.doit())
            for x in {a, grader.get_pct_val(a, a)}
            for y in {b, grader.get_pct_val(b, b)}
        )

    def close(a: Any, b: Any) -> bool:
        if a == b:
            return True
        if a.is_Rational and b.is_Rational:
            return False
        tolerance = 1e-5 if a.has(Float) or b.has(Float) else 1e-12
        size = max(abs(a.evalf(30)), abs(b.evalf(30)))
        return bool(abs((a - b).evalf(30)) <= tolerance * size or size < 1e-60)

    solve_and_compare = grader.sympy_solve_and_compare

    def solvable_and_equal(gold: Any, answer: Any, *digits: int) -> bool:
        # It pairs the solutions off: x^2 = -1, x^2 = -2 and 2 = 3 have none, so none that differ.
        symbols = gold.free_symbols
        return bool(symbols and solve(gold, symbols) and solve_and_compare(gold, answer, *digits))

    grader.sympy_numeric_eq = relative_numeric_eq
    grader.sympy_solve_and_compare = solvable_and_equal


def _parse(text: str) -> Any:
    """LaTeX to SymPy; of a chain of equations that cannot be read, the last right side."""
    try:
        return _parse_latex(text)
    except Exception:
        if not re.fullmatch(r"[^,;<>]*=[^,;<>]*", text):
            raise
        return _parse_latex(text.rpartition("=")[2])


def _parse_latex(text: str) -> Any:
    # Not math_verify.parse: it searches prose for an answer, and evaluates what it finds.
    from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
    from math_verify.grader import should_treat_as_complex

    latex = normalize_latex(
        text,
        config=NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
        ),
    )
    return latex2sympy(
        latex,
        is_real=not should_treat_as_complex(latex),
        normalization_config=None,
    )


def equal(answer: str, gold: str) -> bool:
    """Whether two LaTeX answers mean the same."""
    from math_verify import verify

    return bool(verify(_parse(gold), _parse(answer), timeout_seconds=None, raise_on_error=True))


def _reply(answer: str, gold: str, memory: int) -> str:
    """true, false, or why there is no verdict: memory, unreadable."""
    try:
        found = "true" if equal(answer, gold) else "false"
    except MemoryError:
        return "memory"
    except Exception:  # noqa: BLE001 - the parsers raise anything
        found = "unreadable"
    # The libraries catch memory errors too; with what this answer left behind the next would fail.
    return "memory" if found != "true" and _address_space() > memory / 2 else found


def _address_space() -> int:
    """What this process holds, in bytes; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def main() -> None:
    """Answer requests until standard input ends."""
    memory = int(sys.argv[1])
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # whatever a library prints must not look like a verdict
    logging.disable(logging.CRITICAL)
    _guard_libraries()
    equal("x^{2}-1", "(x-1)(x+1)")  # what the libraries load on first use costs no answer its time
    with contextlib.suppress(ValueError, OSError):  # a system without this limit
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    # If the parent is gone nobody kills a hanging comparison; the alarm does, Python or C.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["seconds"] + 1)
        reply = _reply(request["answer"], request["gold"], memory)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(reply, file=replies, flush=True)


if __name__ == "__main__":
    main()
