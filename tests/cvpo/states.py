"""States of samplers, trackers and curricula: through a file, and against each other."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def through_a_file(state: Any) -> Any:
    """What a checkpoint gives back: weights only, so tensors and plain values must do."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def assert_same_state(a: Any, b: Any) -> None:
    """The same fields with the same values to the last bit, NaN included."""
    if isinstance(a, Mapping):
        assert a.keys() == b.keys()
        for key in a:
            assert_same_state(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same_state(x, y)
    elif isinstance(a, Tensor):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    else:
        assert a == b or (math.isnan(a) and math.isnan(b))
