"""A table as Markdown, for an exhibit's text."""

from __future__ import annotations

import pandas as pd


def markdown(table: pd.DataFrame) -> str:
    """Every column as text, in a pipe table; the columns are as wide as their longest cell."""
    columns = [[_cell(name), *map(_cell, table[name])] for name in table]
    widths = [max(map(len, column)) for column in columns]
    lines = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |"
        for row in zip(*columns, strict=True)
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def _cell(entry: object) -> str:
    """On one line, and without what would end the cell."""
    return " ".join(str(entry).split()).replace("|", r"\|")
