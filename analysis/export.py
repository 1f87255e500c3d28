"""Tidy tables of any log, as CSV or Parquet: one file for each part of each run.

Parts are read file by file. A file of the output appears whole: it is written aside and renamed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from analysis import AnalysisError
from analysis.sources import PARTS, Source, open_sources
from cvpo.runlog import COLUMNS

FORMATS = ("csv", "parquet")


def export(
    sources: Sequence[Source],
    folder: Path,
    *,
    file_format: str = "csv",
    parts: Sequence[str] | None = None,
) -> tuple[list[Path], list[str]]:
    """Write the parts of every source to `folder/<name>/<part>.<format>`.

    Args:
        sources: of distinct names.
        folder: made if need be; earlier exports in it are replaced.
        file_format: one of `FORMATS`. CSV has null and NaN as empty fields, and lists as JSON;
            Parquet has the run log's units in the columns' metadata.
        parts: which; `scores` and `tables` mean all of them. Default: all that a log holds.

    Returns:
        The files, and a note on every part asked for that a log does not hold.

    Raises:
        AnalysisError: an unknown part, one that no log holds, a column that is text in one file and
            numbers in another, or a damaged log.
    """
    _check_parts(parts)
    files, notes = [], []
    for source in sources:
        place = folder / source.name.strip("/").replace("/", "_")
        for wanted in parts or source.parts:
            chosen = [name for name in source.parts if wanted in (name, name.split("/")[0])]
            if not chosen:
                notes.append(f"{source.name} has no {wanted}: {source.lacks(wanted)}")
            for part in chosen:
                file = place / f"{part}.{file_format}"
                file.parent.mkdir(parents=True, exist_ok=True)
                aside = file.with_name(f".{file.name}.tmp")
                try:
                    (_write_csv if file_format == "csv" else _write_parquet)(source, part, aside)
                    aside.replace(file)
                finally:
                    aside.unlink(missing_ok=True)
                files.append(file)
    if not files:
        raise AnalysisError("there is nothing to export: " + ("; ".join(notes) or "no part at all"))
    return files, notes


def _check_parts(parts: Sequence[str] | None) -> None:
    for part in parts or ():
        if part.split("/")[0] not in PARTS:
            raise AnalysisError(f"--parts: unknown part {part!r}; there are {', '.join(PARTS)}")


def _write_csv(source: Source, part: str, file: Path) -> None:
    with file.open("w", encoding="utf-8", newline="") as out:
        pd.DataFrame(columns=source.contents[part].columns).to_csv(out, index=False)
        for frame in source.scan(part):
            _plain(frame).to_csv(out, index=False, header=False)


def _plain(frame: pd.DataFrame) -> pd.DataFrame:
    """Lists, such as token ids, as JSON."""
    lists = [
        name
        for name in frame
        if frame[name].dtype == object
        and frame[name].map(lambda entry: isinstance(entry, np.ndarray)).any()
    ]
    return frame.assign(
        **{
            str(name): frame[name].map(
                lambda x: None if x is None else json.dumps(list(map(int, x)))
            )
            for name in lists
        }
    )


def _write_parquet(source: Source, part: str, file: Path) -> None:
    """In two passes: types first, since a column may be null throughout a file."""
    schema = _schema(source, part)
    with pq.ParquetWriter(file, schema, compression="zstd") as out:
        for frame in source.scan(part):
            out.write_table(pa.Table.from_pandas(frame, schema=schema, preserve_index=False))


def _schema(source: Source, part: str) -> pa.Schema:
    try:
        schema = pa.unify_schemas(list(_schemas(source, part)), promote_options="permissive")
    except pa.ArrowException as error:
        raise AnalysisError(
            f"{source.path}: {part} has a column of different types in different files ({error}); "
            "export it as CSV"
        ) from error
    units = {column.name: column.unit for column in COLUMNS.get(part.split("/")[0], ())}
    return pa.schema(
        [
            field.with_metadata({"unit": units[field.name]}) if units.get(field.name) else field
            for field in schema
        ]
    )


def _schemas(source: Source, part: str) -> Iterator[pa.Schema]:
    for frame in source.scan(part):
        yield pa.Schema.from_pandas(frame, preserve_index=False).remove_metadata()


def add_command(commands: Any) -> None:
    """Add `export` to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "export",
        help="tidy tables of any log, as CSV or Parquet",
        description="Writes FOLDER/<run>/<part>.csv (or .parquet) for every part of every log.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a log's folder or file")
    parser.add_argument("-o", "--output", required=True, metavar="FOLDER")
    parser.add_argument("--format", choices=FORMATS, default="csv", help="default: csv")
    parser.add_argument(
        "--parts", nargs="+", metavar="PART", help=f"default: all; of {', '.join(PARTS)}"
    )
    parser.set_defaults(act=_act)


def _act(arguments: argparse.Namespace) -> None:
    sources = open_sources(arguments.runs)
    files, notes = export(
        sources, Path(arguments.output), file_format=arguments.format, parts=arguments.parts
    )
    for file in files:
        print(f"wrote {file}")
    for source in sources:
        notes += [f"{source.name}: {note}" for note in source.notes]
    for note in notes:
        print(f"note: {note}")
