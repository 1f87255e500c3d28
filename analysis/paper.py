"""The paper's own numbers, as far as they are known, to stand beside ours.

Accuracies are avg@32 in [0, 1], of Qwen2.5-7B on 64 A800 (arXiv 2608.03068).
"""

from __future__ import annotations

import re

BENCHMARKS = ("AIME24", "AIME25", "AMC23", "AMC24", "MATH-500")

TABLE_1: dict[str, tuple[float, ...]] = {
    "vapo": (0.144, 0.046, 0.441, 0.260, 0.452),
    "cvpo-stochasticity": (0.188, 0.100, 0.676, 0.497, 0.765),
    "cvpo-curriculum": (0.162, 0.065, 0.538, 0.412, 0.558),
    "cvpo": (0.237, 0.133, 0.720, 0.512, 0.802),
}
"""Our label of a row -> accuracy on each of `BENCHMARKS`. Of the base model and GRPO (one-step
async) rows exist whose numbers are not known to us."""

BEST_BASELINE = (0.144, 0.102, 0.468, 0.383, 0.665)
"""What the paper's reported gains over the best baseline imply for it, on each of `BENCHMARKS`."""

FIGURE_4: dict[str, dict[float, float]] = {
    "AMC23": {0.1: 0.658, 0.3: 0.720, 0.5: 0.767},
    "AIME24": {0.1: 0.169, 0.3: 0.220, 0.5: 0.167},
    "AIME25": {0.1: 0.082, 0.3: 0.133, 0.5: 0.117},
}
"""Benchmark -> coefficient -> accuracy."""

DISAGREEMENT = "At c = .3 the paper's figure 4 has .220 on AIME24 and its table 1 has .237."

OVERLAP = (
    "25 of AMC23's 40 problems stand in the training set DAPO-Math-17k, 22 of them with the same "
    "answer: AMC23 measures memory too."
)


def paper_benchmark(name: str) -> str | None:
    """The paper's name of a benchmark that is one of the paper's; None for any other."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    return {re.sub(r"[^a-z0-9]", "", known.lower()): known for known in BENCHMARKS}.get(plain)


def paper_accuracy(label: str, benchmark: str) -> float | None:
    """What table 1 says of a label on a benchmark, by our names; None where it says nothing."""
    known = paper_benchmark(benchmark)
    if label not in TABLE_1 or known is None:
        return None
    return TABLE_1[label][BENCHMARKS.index(known)]
