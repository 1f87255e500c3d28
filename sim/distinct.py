"""A check that settings share: what a list names is measured once."""

from __future__ import annotations

from typing import Any


def distinct(value: Any) -> Any:
    """Refuses a tuple that holds something twice; for ``field_validator("*")``.

    Raises:
        ValueError: It does.
    """
    if isinstance(value, tuple) and len(set(value)) < len(value):
        raise ValueError("holds something twice, which would count it as two measurements")
    return value
