"""Real drift: how often each prompt was solved in each epoch of somebody's training run.

Two kinds of file are read, told apart by their name's ending:

- ``.json``: ``{prompt: [one number for each epoch], ...}``.
- ``.csv``, long: a row for each prompt and epoch, in any order, with the columns ``prompt``,
  ``epoch`` and ``successes`` or ``rate``, and ``trials`` if wanted. Epochs are whole numbers and
  begin with the same one for every prompt.
- ``.csv``, wide: a row for each prompt; the header says ``prompt`` and then the epochs, whole
  numbers one after the other. An empty cell: the prompt has no more epochs.

Numbers are successes of k rollouts or rates, multiples of 1/k. Prompts may stop at different epochs
but miss none before that. Epochs are counted from 0, whatever the file calls the first one.

Decision: one file has one k; a ``trials`` column whose rows differ is refused.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
from jaxtyping import Bool, Int
from pydantic import Field

from cvpo.metrics import Interval, paired_t_interval
from sim.study import Row, Settings, SimError

Values = Literal["rates", "counts"]
History = list[float]
"""A prompt's numbers as the file holds them, by epoch."""

ROUNDING = 0.01
"""A rate is a multiple of 1/k if k times it is this near a whole number: files print few digits."""
MOST_TRIALS = 1_000_000
"""Of k: more are a mistake, and far more could not be counted."""


@dataclass(frozen=True)
class Replay:
    """Counts of a real run; N prompts, E epochs of the longest history."""

    source_ids: tuple[str, ...]
    """The file's name of each prompt, in its order."""
    counts: Int[np.ndarray, "N E"]
    """Successes, 0..trials; 0 where the prompt has no such epoch."""
    lengths: Int[np.ndarray, " N"]
    """Epochs of each prompt, at least 1."""
    trials: int
    """k, rollouts of a prompt in an epoch."""

    @property
    def mask(self) -> Bool[np.ndarray, "N E"]:
        """True where the prompt has that epoch."""
        return np.arange(self.counts.shape[1]) < self.lengths[:, None]

    @property
    def common(self) -> Int[np.ndarray, "N epochs"]:
        """Counts of the epochs that every prompt has."""
        return self.counts[:, : self.lengths.min()]


REAL_RUN = Path(__file__).parents[2] / "shared/data/runs/one_shot_rlvr_acc_step_500.json"
"""One-Shot-RLVR's accuracy history: 1209 prompts, 44-57 epochs, rates of 8 rollouts."""


class ReplaySettings(Settings):
    """Keys of the studies that also measure a real run."""

    replay: Path | None = Field(default_factory=lambda: REAL_RUN if REAL_RUN.exists() else None)
    """History of a real run, see `sim.replay`; null: only synthetic drift."""
    replay_trials: int | None = Field(default=8, ge=1, le=MOST_TRIALS)
    """Rollouts of a prompt in an epoch of it; null where the file has a column for them."""
    replay_values: Values | None = None
    """``rates`` or ``counts``; null where the file leaves no doubt."""

    def read_replay(self) -> Replay | None:
        """The real run, or None without a file."""
        if self.replay is None:
            return None
        return read_replay(self.replay, trials=self.replay_trials, values=self.replay_values)


def not_measured(claim: int) -> Row:
    """What stands in place of the real run's rows when there is no file."""
    where = f"not measured: no file; set replay, or provide {REAL_RUN.name}"
    return Row("real run", where, math.nan, n=0, claim=claim)


def rise(replay: Replay) -> Interval:
    """How much a prompt's success rate rose from the first half of the run to the second.

    Of the epochs that every prompt has. Rates that move both ways by as much are not seen.

    Returns:
        Mean over prompts with its t interval; NaN if a prompt has a single epoch.
    """
    rates = replay.common / replay.trials
    half = rates.shape[1] // 2
    if not half:
        return Interval(math.nan, math.nan, math.nan, math.nan, 0.95, ("problems",), (0,))
    return paired_t_interval(rates[:, half:].mean(axis=1), rates[:, :half].mean(axis=1))


def rise_row(found: Interval) -> Row:
    """The row of a run's `rise`."""
    return Row(
        "rise of the success rate from the first half to the second",
        "real run",
        found.estimate,
        found.low,
        found.high,
        n=found.sizes[0],
        unit="success rate",
    )


def read_replay(file: Path, *, trials: int | None = None, values: Values | None = None) -> Replay:
    """Reads a run's history in one of the module's formats.

    Args:
        file: JSON or CSV.
        trials: k. May be None where a ``trials`` column says it.
        values: What the numbers are. May be None where the file leaves no doubt: a column
            ``successes`` or ``rate``, a number above 1 (then all are counts), a number strictly
            between 0 and 1 (then all are rates), or k = 1.

    Raises:
        SimError: The file cannot be read as described, or holds an impossible number; names the
            file, the row or prompt, the epoch, and what to do.
    """
    readers = {".json": _read_json, ".csv": _read_csv}
    if file.suffix.lower() not in readers:
        _refuse(file, f"unknown kind {file.suffix!r}; give a .json or a .csv file")
    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise SimError(f"{file}: cannot be read ({error.strerror}); check the path") from error
    except UnicodeDecodeError as error:
        raise SimError(f"{file}: is not UTF-8 text ({error}); save it as UTF-8") from error
    if not text.strip():
        _refuse(file, "is empty; it must hold the history of at least one prompt")
    table = readers[file.suffix.lower()](file, text)
    trials = _agree(file, "trials", table.trials, trials)
    values = _agree(file, "values", table.values, values)
    if trials is None:
        _refuse(file, "does not say how many rollouts an epoch has; set trials to k")
    if not 1 <= trials <= MOST_TRIALS:
        _refuse(file, f"trials must be 1 to {MOST_TRIALS}, got {trials}; set the k of the run")
    counts = _counts(file, table, trials, values or _kind(file, table, trials))
    lengths = np.array([len(history) for history in counts])
    padded = np.zeros((len(counts), lengths.max()), dtype=np.int64)
    padded[np.arange(lengths.max()) < lengths[:, None]] = np.concatenate(counts)
    return Replay(tuple(table.histories), padded, lengths, trials)


@dataclass(frozen=True)
class _Table:
    """What stands in a file, numbers not yet checked."""

    histories: Mapping[str, History]
    first: int = 0
    """What the file calls its first epoch."""
    trials: int | None = None
    values: Values | None = None


def _refuse(file: Path, what: str) -> NoReturn:
    raise SimError(f"{file}: {what}")


def _agree(file: Path, name: str, found: Any, given: Any) -> Any:
    """What the file says or the caller says; both may speak if they say the same."""
    if found is not None and given is not None and found != given:
        _refuse(file, f"{name} is {found} by its columns but set to {given}; leave {name} unset")
    return given if found is None else found


# --------------------------------------------------------------------------------------- numbers


def _kind(file: Path, table: _Table, trials: int) -> Values:
    numbers = [number for history in table.histories.values() for number in history]
    if any(number > 1 for number in numbers):
        return "counts"
    if trials == 1 or any(0 < number < 1 for number in numbers):
        return "rates"
    _refuse(file, "leaves open what its numbers are; set values to rates or counts")


def _counts(
    file: Path, table: _Table, trials: int, values: Values
) -> list[Int[np.ndarray, " epochs"]]:
    """Every prompt's successes, each checked."""
    unit = trials if values == "rates" else 1
    tolerance = ROUNDING if values == "rates" else 0.0
    found = []
    for prompt, history in table.histories.items():
        numbers = np.array(history, dtype=np.float64) * unit
        whole = np.rint(numbers)
        near = np.isclose(numbers, whole, rtol=0, atol=tolerance)  # not for NaN
        possible = near & (whole >= 0) & (whole <= trials)
        if not possible.all():
            epoch = int(np.argmin(possible))
            allowed = (
                f"rates are multiples of 1/{trials} in 0..1"
                if values == "rates"
                else f"counts are whole numbers in 0..{trials}"
            )
            _refuse(
                file,
                f"prompt {prompt!r}, epoch {table.first + epoch}: {history[epoch]:g} cannot be, "
                f"{allowed}; correct it, or set trials or values as the file was written",
            )
        found.append(whole.astype(np.int64))
    return found


# ------------------------------------------------------------------------------------------ JSON


def _read_json(file: Path, text: str) -> _Table:
    def unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for prompt, count in Counter(prompt for prompt, _ in pairs).items():
            if count > 1:
                _refuse(file, f"prompt {prompt!r} stands there {count} times; keep one of them")
        return dict(pairs)

    try:
        # Python reads no integer of more than some thousand digits, but every one as a float.
        content = json.loads(text, object_pairs_hook=unrepeated, parse_int=float)
    except json.JSONDecodeError as error:
        raise SimError(f"{file}: is not JSON ({error}); correct it there") from error
    except RecursionError as error:
        raise SimError(f"{file}: is nested too deeply; {_JSON_SHAPE}") from error
    if not isinstance(content, dict) or not content:
        _refuse(file, f"{_JSON_SHAPE}, with at least one prompt")
    return _Table({prompt: _json_history(file, prompt, given) for prompt, given in content.items()})


_JSON_SHAPE = "it must be {prompt: [one number for each epoch], ...}"


def _json_history(file: Path, prompt: str, given: Any) -> History:
    if not isinstance(given, list) or not given:
        _refuse(file, f"prompt {prompt!r}: {_JSON_SHAPE}, with at least one epoch")
    for epoch, number in enumerate(given):
        if not isinstance(number, float):
            said = "is missing" if number is None else f"is {number!r}, no number"
            _refuse(
                file, f"prompt {prompt!r}, epoch {epoch}: {said}; fill it in, or drop the prompt"
            )
    return given


# ------------------------------------------------------------------------------------------- CSV


def _read_csv(file: Path, text: str) -> _Table:
    try:
        numbered = list(_numbered(text))
    except csv.Error as error:
        raise SimError(f"{file}: is not CSV ({error}); save it as comma-separated text") from error
    if len(numbered) < 2:
        _refuse(file, "must hold a header and the row of at least one prompt")
    (_, header), *body = numbered
    for name, count in Counter(header).items():
        if count > 1:
            _refuse(file, f"header: column {name!r} stands there {count} times; keep one of them")
    for number, row in body:
        if len(row) != len(header):
            _refuse(
                file,
                f"row {number}: {len(row)} cells, the header has {len(header)}; add or remove some",
            )
    return (_read_long if "epoch" in header else _read_wide)(file, header, body)


def _numbered(text: str) -> Iterator[tuple[int, list[str]]]:
    """Rows with the line on which each begins, as an editor numbers them; blank ones are none."""
    reader, line = csv.reader(io.StringIO(text, newline=""), strict=True), 1
    for row in reader:
        cells = [cell.strip() for cell in row]
        if any(cells):
            yield line, cells
        line = reader.line_num + 1  # a quoted cell may hold line breaks


def _read_long(file: Path, header: list[str], rows: Sequence[tuple[int, list[str]]]) -> _Table:
    names = set(header) - {"trials"}
    if names not in ({"prompt", "epoch", "successes"}, {"prompt", "epoch", "rate"}):
        _refuse(
            file,
            f"header: columns {', '.join(header)}; the long form has prompt, epoch, successes or "
            "rate, and trials if wanted, and no others",
        )
    values: Values = "counts" if "successes" in names else "rates"
    value_column = "successes" if "successes" in names else "rate"
    by_prompt: dict[str, dict[int, float]] = {}
    trials: int | None = None
    for number, row in rows:
        cells = dict(zip(header, row, strict=True))
        where = f"row {number} (prompt {cells['prompt']!r}, epoch {cells['epoch'] or '?'})"
        if not cells["prompt"]:
            _refuse(file, f"row {number}: has no prompt; name it")
        epoch = _whole(file, f"{where}: epoch", cells["epoch"])
        history = by_prompt.setdefault(cells["prompt"], {})
        if epoch in history:
            _refuse(file, f"{where}: stands there twice; keep one of the rows")
        history[epoch] = _number(file, f"{where}: {value_column}", cells[value_column])
        if "trials" in cells:
            k = _whole(file, f"{where}: trials", cells["trials"])
            trials = k if trials is None else trials
            if k != trials:
                _refuse(file, f"{where}: {k} trials, rows before {trials}; one file has one k")
    first = min(min(history) for history in by_prompt.values())
    return _Table(
        {prompt: _in_order(file, prompt, given, first) for prompt, given in by_prompt.items()},
        first=first,
        trials=trials,
        values=values,
    )


def _in_order(file: Path, prompt: str, by_epoch: Mapping[int, float], first: int) -> History:
    epochs = range(first, first + len(by_epoch))
    for epoch in epochs:
        if epoch not in by_epoch:
            _refuse(
                file,
                f"prompt {prompt!r}, epoch {epoch}: is missing, though later ones are there; add "
                "its row, or drop the prompt",
            )
    return [by_epoch[epoch] for epoch in epochs]


def _read_wide(file: Path, header: list[str], rows: Sequence[tuple[int, list[str]]]) -> _Table:
    epochs = [int(name) if re.fullmatch("[0-9]{1,9}", name) else -1 for name in header[1:]]
    whole = bool(epochs) and epochs == list(range(epochs[0], epochs[0] + len(epochs)))
    if header[0] != "prompt" or not whole or epochs[0] < 0:
        _refuse(
            file,
            f"header: columns {', '.join(header)}; the wide form has prompt and then the epochs, "
            "whole numbers one after the other, the long form a column epoch",
        )
    histories: dict[str, History] = {}
    for number, (prompt, *cells) in rows:
        if not prompt:
            _refuse(file, f"row {number}: has no prompt; name it")
        if prompt in histories:
            _refuse(file, f"row {number}: prompt {prompt!r} stands there twice; keep one row")
        length = max((place for place, cell in enumerate(cells, start=1) if cell), default=0)
        if not length:
            _refuse(file, f"row {number} (prompt {prompt!r}): has no epoch; drop the row")
        histories[prompt] = [
            _number(file, f"row {number} (prompt {prompt!r}, epoch {epoch})", cell)
            for epoch, cell in zip(header[1 : length + 1], cells, strict=False)
        ]
    return _Table(histories, first=epochs[0])


def _number(file: Path, where: str, cell: str) -> float:
    if not cell:
        _refuse(file, f"{where}: is missing; fill it in, or drop the prompt")
    try:
        return float(cell)
    except ValueError:
        _refuse(file, f"{where}: {cell!r} is no number; correct it")


def _whole(file: Path, where: str, cell: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", cell):
        _refuse(file, f"{where} must be a whole number from 0, got {cell!r}; correct it")
    return int(cell)
