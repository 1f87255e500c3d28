"""Measuring in turns, and the printed table."""

import operator
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One ratio and what it should be."""

    what: str
    against: str
    seconds: float
    ratio: float
    faster: bool
    """Whether the ratio says how many times faster (more is better), or how many times slower."""
    target: float | None = None
    goal: float | None = None

    def verdict(self) -> str:
        """In words."""
        if self.target is None:
            return "for information"
        word, meets = ("at least", operator.ge) if self.faster else ("at most", operator.le)
        wanted = f"target {word} {self.target:g}"
        if self.goal is None:
            return f"{'passes' if meets(self.ratio, self.target) else 'MISSES'} ({wanted})"
        wanted += f", goal {self.goal:g}"
        if meets(self.ratio, self.goal):
            return f"passes, and its goal ({wanted})"
        return f"{'passes' if meets(self.ratio, self.target) else 'MISSES'} ({wanted})"


def fastest(jobs: Mapping[str, Callable[[], object]], *, repeats: int) -> dict[str, float]:
    """Seconds of each job's fastest call; they take turns, so that all see the same machine."""
    best = dict.fromkeys(jobs, float("inf"))
    for _ in range(repeats):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def show(rows: list[Row]) -> None:
    """Prints one line for each row."""
    width = max(len(row.what) for row in rows)
    against = max(len(row.against) for row in rows)
    print(f"{'what':{width}}  {'seconds':>8}  {'against':{against}}  {'ratio':>14}  ")
    for row in rows:
        ratio = f"{row.ratio:.2f}x {'faster' if row.faster else 'slower'}"
        print(
            f"{row.what:{width}}  {row.seconds:8.4f}  {row.against:{against}}  {ratio:>14}  "
            f"{row.verdict()}",
        )
