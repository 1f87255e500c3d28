"""Verdicts of a whole batch: text is compared here, algebra in processes with a time limit.

The exact and normalized verifiers are string work in linear time, so they need no process. What
only algebra can tell (`cvpo.reward.match_text`) is asked of several `SymbolicWorker`s at a time,
each question once however many responses gave that answer. A response that hangs, crashes or fills
a process's memory costs its own reward alone; nothing from a model is ever evaluated as code.

The processes of a distributed run share the questions out and tell each other the verdicts. Were
each to ask them all, a comparison near its limit would be right in one and wrong in another.

Decision: no process-pool library. A pool that shares one task channel can stand still for ever when
a worker is killed while it holds the channel, and killed workers are the daily business here. Each
worker has pipes of its own, so the end of one is nobody else's, and it imports SymPy alone: neither
torch nor the program that started it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from cvpo import extract_answer
from cvpo.reward import FAILURES, SYMBOLIC_SECONDS, Comparison, SymbolicWorker, match_text
from train.world import ALONE, World


class Grader:
    """Grades batches of responses, the same ones in every process of the run.

    Attributes:
        world: Those who grade together.
        seconds: Wall-clock limit of one comparison.
        failures: Responses since the last `reset` that got no verdict, hence 0, by reason (the keys
            are `cvpo.reward.FAILURES`).
    """

    def __init__(
        self,
        world: World = ALONE,
        *,
        workers: int = 1,
        seconds: float = SYMBOLIC_SECONDS,
    ) -> None:
        """No process is started before an answer needs algebra.

        Args:
            world: Those who call `grade` together, with the same responses.
            workers: Processes, for each of those, that compare by algebra side by side. 0 is 1:
                text is compared in this process whatever the number.
            seconds: Wall-clock time one comparison may take, positive, finite.

        Raises:
            ValueError: A number is out of range.
        """
        if workers < 0 or not 0 < seconds < math.inf:
            raise ValueError(f"need workers >= 0 and seconds > 0, got {workers=} and {seconds=}")
        self.world, self.seconds = world, seconds
        self.failures = dict.fromkeys(FAILURES, 0)
        self._workers = [SymbolicWorker() for _ in range(max(1, workers))]
        self._free: SimpleQueue[SymbolicWorker] = SimpleQueue()
        for worker in self._workers:
            self._free.put(worker)

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends its processes."""
        self.close()

    def close(self) -> None:
        """Ends its processes, as the end of this program does too, however it comes."""
        for worker in self._workers:
            worker.close()

    def grade(
        self, texts: Sequence[str], golds: Sequence[str], *, verifier: str
    ) -> Float[Tensor, " B"]:
        """`cvpo.verify` of every response, in order.

        Args:
            texts: The B responses.
            golds: Their right answers.
            verifier: One of `cvpo.reward.VERIFIERS`.

        Returns:
            1 where the response is right, 0 where it is wrong or got no verdict.

        Raises:
            TypeError: A response or a right answer is not a string.
            ValueError: There are more of the ones than of the others, or no such verifier.
            ImportError: `symbolic` is asked for and math-verify is not installed.
            RuntimeError: A process does not start, here or at another rank.
        """
        return torch.tensor(self.grade_all(texts, golds, [verifier])[verifier])

    def grade_all(
        self, texts: Sequence[str], golds: Sequence[str], verifiers: Sequence[str]
    ) -> dict[str, list[float]]:
        """`grade` under several verifiers, for evaluations.

        Returns:
            The verdicts of each verifier, in the order of the responses.

        Raises:
            TypeError: As `grade`; so are ValueError, ImportError and RuntimeError.
        """
        if len(texts) != len(golds):
            raise ValueError(f"got {len(texts)} responses and {len(golds)} right answers")
        answers = [extract_answer(text) for text in texts]
        return {verifier: self._verdicts(answers, golds, verifier) for verifier in verifiers}

    def reset(self) -> dict[str, int]:
        """Returns the failures and starts again at 0."""
        taken, self.failures = self.failures, dict.fromkeys(FAILURES, 0)
        return taken

    def _verdicts(
        self, answers: Sequence[str | None], golds: Sequence[str], verifier: str
    ) -> list[float]:
        found = [
            match_text(answer or "", gold, verifier=verifier)
            for answer, gold in zip(answers, golds, strict=True)
        ]
        compared = self._compare_all([pair for pair in found if isinstance(pair, tuple)])
        outcomes = [
            compared[verdict] if isinstance(verdict, tuple) else Comparison(equal=verdict)
            for verdict in found
        ]
        for outcome in outcomes:
            if outcome.failure:
                self.failures[outcome.failure] += 1
        return [float(outcome.equal) for outcome in outcomes]

    def _compare_all(self, pairs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Comparison]:
        different = list(dict.fromkeys(pairs))
        if not different:
            return {}
        return dict(zip(different, self.world.spread(different, self._compare_here), strict=True))

    def _compare_here(self, pairs: Sequence[tuple[str, str]]) -> list[Comparison]:
        with ThreadPoolExecutor(len(self._workers)) as threads:
            return list(threads.map(self._compare, pairs))

    def _compare(self, pair: tuple[str, str]) -> Comparison:
        worker = self._free.get()
        try:
            return worker.compare(*pair, seconds=self.seconds)
        finally:
            self._free.put(worker)
