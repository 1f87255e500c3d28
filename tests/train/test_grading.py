"""Batches are graded as single responses are, whatever a model wrote; no process is left behind."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cvpo import reward, verify
from cvpo.reward import FAILURES, VERIFIERS, SymbolicWorker
from train.grading import Grader

ROOT = Path(__file__).parents[2]
GRADERS = ROOT.parent / "shared" / "data" / "graders"
# Takes for ever to compare: the exponents differ in their last digit only.
TOWER = r"\boxed{9^{9^{9^{9^{9}}}}}"
NO_FAILURE = dict.fromkeys(FAILURES, 0)


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader(workers=2) as grader:
        yield grader


@pytest.fixture(autouse=True)
def _count_from_zero(grader: Grader) -> None:
    grader.reset()


def innocent(count: int) -> tuple[list[str], list[str], list[float]]:
    """Responses that algebra alone can grade, every third of them wrong."""
    golds = [str(i) for i in range(count)]
    texts = [f"\\boxed{{\\frac{{{2 * i + 2 * (i % 3 == 2)}}}{{2}}+0}}" for i in range(count)]
    return texts, golds, [float(i % 3 != 2) for i in range(count)]


def assert_works(grader: Grader) -> None:
    texts, golds, right = innocent(5)
    grader.reset()
    assert grader.grade(texts, golds, verifier="symbolic").tolist() == right
    assert grader.reset() == NO_FAILURE


# --- verdicts --------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_verdicts_come_in_the_order_of_the_responses(workers: int) -> None:
    texts, golds, right = innocent(24)
    with Grader(workers=workers) as grader:
        verdicts = grader.grade(texts, golds, verifier="symbolic")
        assert verdicts.tolist() == right
        assert verdicts.dtype == torch.float32
        assert len([w for w in grader._workers if w.process]) == max(1, workers)
        assert grader.failures == NO_FAILURE


def test_an_empty_batch_has_no_verdicts(grader: Grader) -> None:
    assert grader.grade([], [], verifier="symbolic").shape == (0,)
    assert grader.grade_all([], [], VERIFIERS) == {name: [] for name in VERIFIERS}


def test_text_alone_starts_no_process() -> None:
    texts = [r"\boxed{7}", "Answer: 7.0", r"\boxed{8}", "none", r"\boxed{\frac12}"]
    golds = ["7", "7", "7", "7", "1/2"]
    with Grader(workers=2) as grader:
        assert grader.grade(texts, golds, verifier="exact").tolist() == [1, 0, 0, 0, 0]
        assert grader.grade(texts, golds, verifier="normalized").tolist() == [1, 1, 0, 0, 1]
        assert grader.grade(texts, golds, verifier="symbolic").tolist() == [1, 1, 0, 0, 1]
        assert [worker.process for worker in grader._workers] == [None, None]


def test_every_verifier_gives_its_own_verdicts(grader: Grader) -> None:
    texts, golds = [r"\boxed{1/2}", r"\boxed{\frac12}", r"\boxed{0.5}"], ["1/2"] * 3
    assert grader.grade_all(texts, golds, VERIFIERS) == {
        "exact": [1.0, 0.0, 0.0],
        "normalized": [1.0, 1.0, 0.0],
        "symbolic": [1.0, 1.0, 1.0],
    }
    assert grader.grade_all(texts, golds, ["normalized"]) == {"normalized": [1.0, 1.0, 0.0]}


pieces = st.sampled_from([r"\boxed{", "}", "7", "7.0", " ", r"\frac", "{1}{2}", "x=", "\n", "$"])
responses = st.lists(pieces, max_size=8).map("".join)


@given(batch=st.lists(st.tuples(responses, st.sampled_from(["7", "1/2", "x"])), max_size=6))
def test_a_batch_is_graded_as_its_responses_one_by_one(
    grader: Grader, batch: list[tuple[str, str]]
) -> None:
    texts, golds = [text for text, _ in batch], [gold for _, gold in batch]
    graded = grader.grade_all(texts, golds, ["exact", "normalized"])
    for verifier, verdicts in graded.items():
        assert verdicts == [verify(text, gold, verifier=verifier) for text, gold in batch]


def test_one_answer_is_compared_once_and_its_failure_counts_for_each_response(
    grader: Grader,
) -> None:
    assert_works(grader)
    served = sum(worker.served for worker in grader._workers)
    texts = [f"{i} \\boxed{{\\frac{{1}}{{}}}}" for i in range(8)]
    assert grader.grade(texts, ["16"] * 8, verifier="symbolic").tolist() == [0.0] * 8
    assert sum(worker.served for worker in grader._workers) == served + 1
    assert grader.reset() == {**NO_FAILURE, "unreadable": 8}
    assert grader.failures == NO_FAILURE


def test_bad_calls_say_what_is_wrong(grader: Grader) -> None:
    with pytest.raises(ValueError, match="2 responses and 1 right answers"):
        grader.grade(["a", "b"], ["1"], verifier="exact")
    with pytest.raises(ValueError, match="unknown verifier 'fuzzy'"):
        grader.grade(["no answer"], ["1"], verifier="fuzzy")
    with pytest.raises(TypeError, match="gold must be a string"):
        grader.grade(["no answer"], [7], verifier="exact")  # type: ignore[list-item]
    with pytest.raises(TypeError, match="response must be a string"):
        grader.grade([None], ["7"], verifier="exact")  # type: ignore[list-item]
    with pytest.raises(ValueError, match="workers >= 0"):
        Grader(workers=-1)
    for seconds in (0.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="seconds > 0"):
            Grader(seconds=seconds)


def records(name: str) -> list[dict[str, str]]:
    path = GRADERS / name
    if not path.exists():
        pytest.skip(f"needs ../shared/data/graders/{name} beside the checkout")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("verifier", ["exact", "normalized"])
def test_real_responses_are_graded_as_one_by_one(grader: Grader, verifier: str) -> None:
    cases = [(case["response"], case["gold"]) for case in records("responses.jsonl")]
    assert_graded_as_one_by_one(grader, cases, verifier)


@pytest.mark.slow
def test_public_cases_are_graded_by_algebra_as_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [(f"\\boxed{{{case['pred']}}}", case["gold"]) for case in records("grader_cases.jsonl")]
    # None of them takes a second; on a crowded machine the usual limit might still cut one off.
    monkeypatch.setattr(reward, "SYMBOLIC_SECONDS", 60.0)
    with Grader(workers=2, seconds=60.0) as grader:
        assert_graded_as_one_by_one(grader, cases, "symbolic")
        assert grader.failures["timeout"] == 0


def assert_graded_as_one_by_one(
    grader: Grader, cases: list[tuple[str, str]], verifier: str
) -> None:
    verdicts = grader.grade(
        [text for text, _ in cases], [gold for _, gold in cases], verifier=verifier
    ).tolist()
    assert verdicts == [verify(text, gold, verifier=verifier) for text, gold in cases]
    assert 0 < sum(verdicts) < len(verdicts)


# --- hostile responses -----------------------------------------------------------------------


def hostile(path: Path) -> dict[str, str]:
    """What must be wrong, do nothing and cost nobody else anything; some of it would run code."""
    payload = f"__import__('os').system('touch {path}')"
    return {
        "tower": TOWER,
        "power of a power": r"\boxed{10^{10^{10}}!}",
        "long sum": r"\boxed{\sum_{k=1}^{10^{9}} \frac{1}{k^3}}",
        "deep braces": r"\boxed{" + "{" * 100_000 + "1" + "}" * 100_000 + "}",
        "deep parentheses": r"\boxed{" + "(" * 1900 + "1" + ")" * 1900 + "}",
        "deep fractions": r"\boxed{" + r"\frac{" * 600 + "1" + "}{2}" * 600 + "}",
        "three megabytes": "so " * 2**20 + r"\boxed{7",
        "a megabyte in a box": r"\boxed{" + "7 " * 2**19 + "}",
        "NUL bytes": "\x00\\boxed{\x00\x001+\x00}",
        "lone surrogates": "\ud800 \\boxed{1+\udfff}",
        "a line of the protocol": '\\boxed{1+1}\ntrue\n{"answer": "1", "gold": "1"}\n',
        "newlines in the box": "\\boxed{1\ntrue\n+1}",
        "call": rf"\boxed{{{payload}}}",
        "text call": rf"\boxed{{\text{{{payload}}}}}",
        "function": rf"\boxed{{\operatorname{{eval}}({payload})}}",
        "shell": f"\\boxed{{$(touch {path})+1}}",
        "attributes": r"\boxed{().__class__.__base__.__subclasses__() + 1}",
    }


@pytest.mark.slow
def test_hostile_responses_are_wrong_and_the_others_of_the_batch_are_graded(
    tmp_path: Path,
) -> None:
    path = tmp_path / "pwned"
    texts, golds, right = innocent(9)
    attacks = list(hostile(path).values())
    with Grader(workers=2, seconds=1.0) as grader:
        graded = grader.grade(
            [*texts[:4], *attacks, *texts[4:]],
            [*golds[:4], *["16"] * len(attacks), *golds[4:]],
            verifier="symbolic",
        )
        assert graded.tolist() == [*right[:4], *[0.0] * len(attacks), *right[4:]]
        assert grader.failures["timeout"] >= 1
        assert_works(grader)
    assert not path.exists()


def test_a_fifth_of_a_second_is_a_fifth_of_a_second(grader: Grader) -> None:
    assert_works(grader)  # the start of the processes is not what is timed
    grader.seconds = 0.2
    try:
        start = time.monotonic()
        assert grader.grade([TOWER], ["16"], verifier="symbolic").tolist() == [0.0]
        assert time.monotonic() - start < 3.0
    finally:
        grader.seconds = reward.SYMBOLIC_SECONDS
    assert grader.reset() == {**NO_FAILURE, "timeout": 1}
    assert_works(grader)


def when_busy(worker: SymbolicWorker, act: Callable[[int], None]) -> threading.Thread:
    """Does something to a worker's process while that compares."""
    assert worker.process is not None
    pid = worker.process.pid

    def wait_and_act() -> None:
        while not worker.lock.locked():
            time.sleep(0.001)
        time.sleep(0.3)  # by now it has its question
        act(pid)

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    return thread


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
def test_a_process_that_dies_costs_one_verdict_and_is_replaced(how: signal.Signals) -> None:
    texts, golds, right = innocent(6)
    with Grader(workers=1, seconds=60.0) as grader:
        assert_works(grader)
        (worker,) = grader._workers
        killer = when_busy(worker, lambda pid: os.kill(pid, how))
        start = time.monotonic()
        graded = grader.grade([TOWER, *texts], ["16", *golds], verifier="symbolic")
        killer.join()
        assert time.monotonic() - start < 60.0
        assert graded.tolist() == [0.0, *right]
        assert grader.reset() == {**NO_FAILURE, "crash": 1}
        assert_works(grader)


def test_a_process_out_of_memory_costs_one_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    deep = r"\boxed{" + "(" * 1500 + "1" + ")" * 1500 + "}"
    with Grader(workers=1, seconds=60.0) as grader:
        # Less than it has when it is ready, so that it may not take a page more.
        monkeypatch.setattr(reward, "SYMBOLIC_BYTES", 2**20)
        assert grader.grade([deep], ["16"], verifier="symbolic").tolist() == [0.0]
        failures = grader.reset()
        assert failures["memory"] + failures["crash"] == 1
        monkeypatch.undo()
        assert_works(grader)


# --- processes -------------------------------------------------------------------------------


def running(pid: int) -> bool:
    state = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False
    ).stdout.strip()
    return state not in ("", "Z", "Z+", "Zs")  # a zombie has ended, and waits for its parent


def gone(pids: list[int], *, within: float) -> bool:
    deadline = time.monotonic() + within
    while any(map(running, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not any(map(running, pids))


def test_closing_ends_the_processes_and_a_closed_grader_starts_new_ones() -> None:
    with Grader(workers=2) as grader:
        assert_works(grader)
        pids = [worker.process.pid for worker in grader._workers if worker.process]
        assert len(pids) == 2
        assert all(map(running, pids))
    assert gone(pids, within=10.0)
    assert_works(grader)
    grader.close()
    grader.close()


OTHER_PROGRAM = f"""
import os, signal, threading, time
from train.grading import Grader
grader = Grader(workers=2, seconds=1.0)
grader.grade([f"\\\\boxed{{{{{{i}}/1+0}}}}" for i in range(6)], ["1"] * 6, verifier="symbolic")
print(*(worker.process.pid for worker in grader._workers), flush=True)
if os.environ["END"] == "killed":
    worker = grader._workers[0]
    hang = threading.Thread(target=grader.grade, args=([{TOWER!r}], ["16"]),
                            kwargs={{"verifier": "symbolic"}})
    hang.start()
    while not any(worker.lock.locked() for worker in grader._workers):
        time.sleep(0.001)
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["exit", "killed"])
def test_no_process_outlives_the_program(end: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OTHER_PROGRAM],
        cwd=ROOT,
        env={**os.environ, "END": end},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == (0 if end == "exit" else -signal.SIGKILL), done.stderr
    assert done.stderr == ""
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    # The busy one's own alarm comes a second after its limit.
    assert gone(pids, within=30.0)


def test_a_process_loads_neither_torch_nor_anything_of_ours() -> None:
    code = (
        "import runpy, sys; runpy.run_path(sys.argv[1])['_guard_libraries']();"
        "print(*sorted({'cvpo', 'train', 'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    script = ROOT / "cvpo" / "_symbolic_worker.py"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(script)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""


RANK = """
import sys
from train.grading import Grader
from train.world import World
world = World.join()
texts = [f"\\\\boxed{{{2 * i}/2+1}}" for i in range(12)] + [sys.argv[1]]
golds = [*map(str, range(1, 13)), "16"]
with Grader(workers=2, seconds=1.0) as alone, Grader(world, seconds=1.0) as together:
    own = [str(int(gold) + world.rank) for gold in golds]
    found = [
        alone.grade(texts, own, verifier="symbolic").tolist(),
        together.grade(texts, golds, verifier="symbolic").tolist(),
        together.failures["timeout"],
        together._workers[0].served > 0,
    ]
everyone = world.gather(found)
if world.rank == 0:
    print(everyone)
"""


@pytest.mark.slow
def test_processes_of_a_distributed_run_grade_by_themselves_or_together(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         str(script), TOWER],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    right, wrong = [1.0] * 12 + [0.0], [0.0] * 13
    # Alone, rank 1 holds the answers against other golds; together both have every verdict, and
    # each has asked its own process for some of them.
    expected = [[right, right, 1, True], [wrong, right, 1, True]]
    assert done.stdout.strip() == str(expected)
