"""Measuring in turns, and the printed table."""

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
    target: float | None
    goal: float | None

    def verdict(self) -> str:
        """In words."""
        if self.target is None or self.goal is None:
            return "for information"
        sign, word = (1, "at least") if self.faster else (-1, "at most")
        wanted = f"target {word} {self.target:g}, goal {self.goal:g}"
        if sign * self.ratio >= sign * self.goal:
            return f"passes, goal met ({wanted})"
        return f"{'passes' if sign * self.ratio >= sign * self.target else 'MISSES'} ({wanted})"


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
