"""JSON lines as a killed or a running writer leaves them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from analysis import AnalysisError


def json_lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers, from 1, and rows. A torn last line is passed over: a kill's doing.

    Raises:
        AnalysisError: a line that is no JSON object; the file and the line are named.
    """
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                if not line.endswith(b"\n"):
                    return
                raise AnalysisError(
                    f"{file}, line {number} is damaged ({error}); mend or remove the line"
                ) from error
            if not isinstance(row, dict):
                raise AnalysisError(
                    f"{file}, line {number} is no JSON object; mend or remove the line"
                )
            yield number, row


def torn_note(file: Path) -> list[str]:
    """A note on a last line without its line feed, if that is so."""
    with file.open("rb") as lines:
        end = lines.seek(0, 2)
        lines.seek(max(end - 1, 0))
        if lines.read(1) in (b"", b"\n"):
            return []
    return [f"{file}: the last line is torn: its writer was killed, or is writing now"]
