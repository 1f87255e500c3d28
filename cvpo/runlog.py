"""The run log: the one file format that the simulator and the trainer write and the analysis reads.

A run is a directory, schema version 1. `COLUMNS` says what each Parquet part holds and `METRICS`
what each fixed scalar means; both are the reference, not a copy. What a kill can leave behind:

- A Parquet file is written under a temporary name beside its place and renamed when it is on disk,
  so it is whole or absent. Readers never look at temporary names.
- `metrics.jsonl` and `events.jsonl` grow by one line in one write, then fsync. A kill can tear only
  the last line; readers drop it and `RunLog.open` cuts it off. A torn line anywhere else is damage
  and is reported with file and line.
- `rewind(step)` takes back everything after a step, so that a run can go on from its checkpoint.
  A rewind that is itself killed is completed by calling it again.

One process writes a log; any number may read it meanwhile. pandas, pyarrow and PyYAML (the extra
`log`) are imported on first use.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import platform
import re
import socket
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeGuard

import numpy as np
import torch

from cvpo.reward import VERIFIERS

if TYPE_CHECKING:
    import pandas as pd

    Rows = Mapping[str, Any] | pd.DataFrame
    """A part's rows: column name -> sequence, array or tensor of equal lengths, or a frame."""

SCHEMA_VERSION = 1

EVENT_KINDS = ("phase_switch", "skipped_step", "resume", "checkpoint", "warning")


class RunLogError(ValueError):
    """A log that cannot be read as it stands, or rows that do not fit it."""


class MissingPartError(RunLogError, FileNotFoundError):
    """The folder is no run log, or the log has no such part."""


@dataclass(frozen=True)
class Column:
    """One column of a Parquet part.

    Attributes:
        name: as written in the file.
        dtype: int64, float64, bool, string or list<int32>.
        about: what it holds.
        unit: what it is counted in; empty for names and pure numbers.
        presence: "value": must be given, no row may lack it (NaN counts as lacking). "nullable":
            always a column, null where there is nothing to say (no critic, not computed), so it may
            be left out of the rows. "extra": a column of the file only when it was given.
    """

    name: str
    dtype: str
    about: str
    unit: str = ""
    presence: Literal["value", "nullable", "extra"] = "value"


_STEP = Column("step", "int64", "training step the row belongs to", "steps")
_PROMPT = Column("prompt_id", "int64", "row of the run's problem table")
_SAMPLE = Column("sample", "int64", "which of the prompt's responses in this step, from 0")
_LENGTH = Column("length", "int64", "response tokens, end-of-sequence token included", "tokens")
_TRUNCATED = Column("truncated", "bool", "cut off at the length limit")
_SIGMA = Column("sigma", "float64", "standard deviation of V, eq. (16)", "reward", "nullable")
_VALUE_FIRST = Column("value_first", "float64", "V of the prompt alone", "reward", "nullable")
_VALUE_MEAN = Column("value_mean", "float64", "mean V over the response", "reward", "nullable")

COLUMNS: dict[str, tuple[Column, ...]] = {
    "problems": (
        Column("prompt_id", "int64", "dense: 0 to N-1, each once"),
        Column("source_id", "string", "id in the data set it comes from", "", "nullable"),
        Column("dataset", "string", "name of that data set"),
        Column("text", "string", "the problem, before any template", "", "nullable"),
        Column("gold", "string", "reference answer", "", "nullable"),
        Column("level", "string", "the source's own difficulty label", "", "nullable"),
        Column("difficulty", "float64", "failure rate of the starting policy", "", "nullable"),
    ),
    "trajectories": (
        _STEP,
        _PROMPT,
        _SAMPLE,
        _LENGTH,
        _TRUNCATED,
        Column("reward", "float64", "training reward of the response", "reward"),
        Column("correct", "float64", "R from the verifier, 0 to 1"),
        Column("answer", "string", "extracted final answer, null without one", "", "nullable"),
        _SIGMA,
        Column("mu", "float64", "mean sigma of the prompt's group", "reward", "nullable"),
        Column("w_s", "float64", "stochasticity weight (15)-(16)", "", "nullable"),
        Column("w_d", "float64", "difficulty weight (25)-(26)", "", "nullable"),
        Column("rho", "float64", "tracked success rate after this step's update", "", "nullable"),
        Column("round", "int64", "curriculum round, from 0", "rounds", "nullable"),
        _VALUE_FIRST,
        _VALUE_MEAN,
        Column("advantage_mean", "float64", "mean unweighted advantage", "reward", "nullable"),
        Column("entropy_mean", "float64", "mean token entropy of the policy", "nats", "nullable"),
        Column("logprob_gap", "float64", "mean |log p rollout - trainer|", "nats", "nullable"),
        Column("response", "string", "response text, null where not kept", "", "extra"),
        Column("token_ids", "list<int32>", "response tokens, null where not kept", "", "extra"),
    ),
    "prompts": (
        Column("step", "int64", "step in which the round was completed", "steps"),
        Column("round", "int64", "curriculum round, from 0", "rounds"),
        _PROMPT,
        Column("visits", "int64", "observations of the prompt so far"),
        Column("trials", "int64", "rollouts of the prompt in this round"),
        Column("successes", "float64", "their summed correctness"),
        Column("alpha", "float64", "Beta posterior after the round"),
        Column("beta", "float64", "Beta posterior after the round"),
        Column("rho", "float64", "alpha / (alpha + beta)"),
        Column("delta", "float64", "relative change of rho at the last visit", "", "nullable"),
        Column("w_d", "float64", "difficulty weight (25)-(26)", "", "nullable"),
        Column("phase", "string", "early or bottleneck"),
        Column("true_rho", "float64", "true success rate, in a simulation only", "", "extra"),
    ),
    "evals": (
        _STEP,
        Column("benchmark", "string", "name of the benchmark"),
        Column("problem_id", "string", "the benchmark's own id of the problem"),
        Column("sample", "int64", "which of the problem's responses, from 0"),
        Column("exact", "float64", "verdict, 0 to 1; null if not computed", "", "nullable"),
        Column("normalized", "float64", "verdict, 0 to 1; null if not computed", "", "nullable"),
        Column("symbolic", "float64", "verdict, 0 to 1; null if not computed", "", "nullable"),
        _LENGTH,
        _TRUNCATED,
    ),
    "tokens": (
        _STEP,
        Column("token_id", "int64", "vocabulary entry"),
        Column("token", "string", "its text"),
        Column("count", "int64", "states in which it was chosen", "tokens"),
        Column("value_sum", "float64", "sum of V over them", "reward", "nullable"),
        Column("value_sq_sum", "float64", "sum of V^2 over them", "reward^2", "nullable"),
    ),
    "calibration": (
        _STEP,
        Column("position_bin", "int64", "part of the response the token lies in, from 0"),
        Column("value_bin", "int64", "bin of V, from 0"),
        Column("correct", "bool", "R >= .5"),
        Column("n", "int64", "tokens in the cell", "tokens"),
        Column("value_sum", "float64", "sum of V", "reward"),
        Column("return_sum", "float64", "sum of Monte-Carlo returns", "reward"),
        Column("return_sq_sum", "float64", "sum of their squares", "reward^2"),
    ),
    "scores": (_STEP, _PROMPT, _SAMPLE, _SIGMA, _VALUE_FIRST, _VALUE_MEAN),
}

METRICS: dict[str, str] = {
    "reward/mean": "mean training reward of the step's trajectories",
    "accuracy/mean": "mean correctness R, 0 to 1",
    "length/mean": "mean response length in tokens",
    "length/correct": "the same over correct responses (R >= .5), tokens",
    "length/incorrect": "the same over incorrect responses, tokens",
    "truncated/rate": "share of responses cut off at the length limit",
    "format/rate": "share of responses with an extractable answer",
    "groups/all_correct": "share of prompts whose responses are all correct",
    "groups/observed": "groups rolled out in the step, discarded ones included",
    "groups/all_wrong": "share of prompts whose responses are all wrong",
    "critic/explained_variance": "1 - Var(G - V) / Var(G) against Monte-Carlo returns G",
    "critic/loss": "value loss, half the squared error in reward^2",
    "critic/lr": "learning rate of the critic",
    "critic/skipped_updates": "critic updates skipped because their gradient was not finite",
    "critic/grad_norm": "global gradient norm of the critic before clipping",
    "policy/loss": "clipped surrogate loss",
    "policy/entropy": "mean token entropy in nats",
    "policy/kl": "k3 estimate of the KL divergence to the reference, nats per token",
    "policy/clip_low": "share of tokens clipped at the lower bound of the ratio",
    "policy/clip_high": "share of tokens clipped at the upper bound of the ratio",
    "policy/ratio_ess": "effective sample size of the ratios as a share of the tokens",
    "policy/lr": "learning rate of the actor",
    "policy/skipped_updates": "actor updates skipped because their gradient was not finite",
    "policy/update_kl": "k3 estimate of the KL divergence within the step, nats per token",
    "policy/grad_norm": "global gradient norm of the actor before clipping",
    "lm/loss": "mean negative log-likelihood of correct responses, nats per token",
    "advantage/sd": "standard deviation of A over tokens, before the weights",
    "advantage/mean_correct": "mean A over tokens of correct responses, before the weights",
    "advantage/mean_incorrect": "mean A over tokens of incorrect responses, before the weights",
    "advantage/mean_correct_weighted": "mean A' = W_S W_D A over tokens of correct responses",
    "advantage/mean_incorrect_weighted": "mean A' = W_S W_D A over tokens of incorrect responses",
    "weights/w_s_mean_correct": "mean W_S over correct trajectories",
    "weights/w_s_mean_incorrect": "mean W_S over incorrect trajectories",
    "weights/w_s_cv_correct": "standard deviation of W_S over its mean, correct trajectories",
    "weights/w_s_cv_incorrect": "the same over incorrect trajectories",
    "weights/advantage_ratio": "sum of W_S W_D A over sum of A",
    "weights/w_s_cv": "standard deviation of W_S over its mean",
    "weights/w_d_mean": "mean W_D over trajectories",
    "weights/w_d_cv": "standard deviation of W_D over its mean",
    "sampler/epoch": "passes over the prompts drawn so far (shuffled-epochs)",
    "sampler/distance": "mean |success rate - 1/2| of the prompts chosen last, as the sampler took "
    "it to be (mopps and its trackers, pcl, oracle)",
    "sampler/bin": "mean difficulty bin under the sampler's odds, 0 the easiest (e2h, sec)",
    "sampler/progress": "share of the schedule that has passed (e2h)",
    "sampler/target": "target difficulty, 0 to 100 (adarft)",
    "sampler/kappa": "smallest share of the largest reward variance that is kept (vcrl)",
    "sampler/bank": "prompts that may be replayed (vcrl)",
    "sampler/phase": "phase of the sampler's own curriculum: 0 early, 1 bottleneck (w-d)",
    "sigma/mean": "mean sigma over trajectories, in reward",
    "sigma/corr_entropy": "correlation of sigma with mean token entropy",
    "sigma/corr_length": "correlation of sigma with response length",
    "sigma/corr_surprise": "correlation of sigma with |r - V_0|",
    "curriculum/phase": "0 early, 1 bottleneck",
    "curriculum/low_delta": "what the stall test saw of the low set (rho <= .3)",
    "curriculum/high_delta": "what the stall test saw of the high set (rho >= .8)",
    "curriculum/low_count": "prompts in the low set",
    "curriculum/high_count": "prompts in the high set",
    "rollout/logprob_gap": "mean |log-probability of rollout engine - of trainer|, nats per token",
    "rollout/sync_gap": "the same over the few responses that each weight sync is checked with",
    "rollout/tokens": "response tokens generated in the step, discarded groups included",
    "rollout/lag": "updates between the weights that generated the batch and those it updates",
    "seconds/rollout": "seconds generating responses",
    "seconds/score": "seconds verifying answers",
    "seconds/values": "seconds of the critic's and the policy's forward passes before the update",
    "seconds/weights": "seconds computing W_S",
    "seconds/tracker": "seconds in the difficulty tracker and W_D",
    "seconds/actor": "seconds updating the actor",
    "seconds/critic": "seconds updating the critic",
    "seconds/sync": "seconds handing weights to the rollout engine",
    "seconds/eval": "seconds evaluating",
    "seconds/save": "seconds saving checkpoints",
    "pretraining/steps": "rollout batches that the critic was fitted to before the first update",
    "pretraining/explained_variance": "of the last such batch before it was fitted",
    "pretraining/squared_error": "of the same batch, in reward^2",
    "pretraining/device_seconds": "value pretraining's share of device_seconds, seconds",
    "pretraining/tokens": "value pretraining's share of tokens",
    "eval/<benchmark>": "avg@k under the headline verifier; `eval/all` over all problems",
}
"""Fixed scalars. Any other name may be logged too; describe it here when it is there to stay."""

_METRIC_KEYS = {
    "step": int,
    "time": float,  # seconds since 1970, UTC
    "device_seconds": float,  # cumulative over rollouts, updates and value pretraining
    "tokens": int,  # likewise
}
_EVENT_KEYS = {"step": int, "kind": str, "message": str}

_FOLDERS = ("trajectories", "prompts", "evals", "tokens", "calibration", "scores", "tables")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PACKAGES = """
torch numpy pandas pyarrow scipy transformers tokenizers safetensors datasets pydantic math-verify
vllm deepspeed flash-attn
"""


# ------------------------------------------------------------------------------------ writing


@dataclass
class RunLog:
    """A log open for appending. Make one with `create` or `open`, not with the constructor.

    Attributes:
        path: the run's folder.
        last_step: step of the last line of `metrics.jsonl`, None before the first.
    """

    path: Path
    last_step: int | None = None

    @classmethod
    def create(
        cls,
        path: str | Path,
        *,
        config: Mapping[str, Any],
        seed: int,
        method: str,
        verifier: str,
        hosts: Sequence[str] | None = None,
        devices: Sequence[str] | None = None,
        **extra: Any,
    ) -> RunLog:
        """Start a log and write its `run.yaml`.

        Args:
            path: the run's folder; made if need be, other files in it are left alone.
            config: the resolved configuration, plain data (numbers, text, lists, mappings).
            seed: the run's seed.
            method: the method's name.
            verifier: the headline verifier, one of `VERIFIERS`.
            hosts: machines of the run; default: this one.
            devices: accelerators of the run; default: this machine's, or its CPU.
            **extra: further plain entries of `run.yaml`.

        Raises:
            FileExistsError: the folder already holds a run.
            RunLogError: an entry is not plain data, or the verifier is unknown.
        """
        yaml = _require("yaml")
        path = Path(path)
        held = [
            name
            for name in ("run.yaml", "metrics.jsonl", "events.jsonl", "problems.parquet", *_FOLDERS)
            if (path / name).exists()
        ]
        if held:
            raise FileExistsError(
                f"{path} already holds a run ({held[0]}): choose another folder, move that one "
                "away, or resume it with RunLog.open"
            )
        if verifier not in VERIFIERS:
            raise RunLogError(f"verifier must be one of {', '.join(VERIFIERS)}, got {verifier!r}")
        run: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "method": method,
            "seed": seed,
            "verifier": verifier,
            "start": datetime.now(UTC).isoformat(timespec="seconds"),
            "code_version": _code_version(),
            "packages": _package_versions(),
            "hosts": list(hosts) if hosts is not None else [socket.gethostname()],
            "devices": list(devices) if devices is not None else _devices(),
            "config": config,
        }
        clash = sorted(run.keys() & extra.keys())
        if clash:
            raise RunLogError(f"run.yaml has an entry {clash[0]!r} of its own; rename yours")
        plain = {key: _plain(value, key) for key, value in (run | extra).items()}
        text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
        path.mkdir(parents=True, exist_ok=True)
        with _whole(path / "run.yaml") as file:
            file.write(text.encode())
        log = cls(path)
        log._mend()
        return log

    @classmethod
    def open(cls, path: str | Path) -> RunLog:
        """Open an existing log for appending; what a kill left torn or half-written is removed.

        Raises:
            MissingPartError: the folder holds no run.
            RunLogError: another schema version, or a damaged file.
        """
        read_run(path)
        log = cls(Path(path))
        log._mend()
        return log

    def rewind(self, step: int) -> None:
        """Remove every row of a later step from every part, and whatever a kill left torn.

        Call it on resume with the checkpoint's step; -1 removes all rows. Rows without a step
        (problems, tables without a `step` column) stay.

        Raises:
            RunLogError: a file that has to be read is damaged; it is named and nothing in it is
                lost.
        """
        if not _is_int(step) or step < -1:
            raise RunLogError(f"rewind needs the step to go back to, -1 or more, got {step!r}")
        for folder in _numbered_folders(self.path):
            for number, file in _numbered_files(folder).items():
                if folder == self.path / "prompts":  # named by round
                    _drop_rows_after(file, step)
                elif number > step:
                    file.unlink()
            _fsync_folder(folder)
        for file in sorted((self.path / "tables").glob("*.parquet")):
            _drop_rows_after(file, step)
        self._mend(step)

    def _mend(self, upto: float = math.inf) -> None:
        """Remove temporary files, leave whole lines up to a step, and find the last step."""
        for folder in (self.path, self.path / "tables", *_numbered_folders(self.path)):
            for leftover in folder.glob(".*.tmp"):
                leftover.unlink()
        rows = _mend_lines(self.path / "metrics.jsonl", _METRIC_KEYS, upto)
        self.last_step = rows[-1]["step"] if rows else None
        _mend_lines(self.path / "events.jsonl", _EVENT_KEYS, upto)

    def metrics(
        self,
        step: int,
        *,
        time: float,
        device_seconds: float,
        tokens: int,
        scalars: Mapping[str, Any],
    ) -> None:
        """Append one step's scalars.

        A scalar that is None, NaN or infinite is written as null, the only "no number" of strict
        JSON, and read back as NaN.

        Args:
            step: later than every step logged so far.
            time: seconds since 1970, UTC.
            device_seconds: cumulative; finite.
            tokens: cumulative.
            scalars: name -> number (0-d arrays and tensors too). `METRICS` has the fixed names.

        Raises:
            RunLogError: a step that is not later, a name that is no text or stands for one of the
                four arguments, or a value that is no number.
        """
        _check_step(step, "metrics")
        if self.last_step is not None and step <= self.last_step:
            raise RunLogError(
                f"metrics: step {step} does not follow step {self.last_step}, the last of "
                f"{self.path / 'metrics.jsonl'}; to go back, rewind({step - 1}) first"
            )
        row: dict[str, Any] = {
            "step": int(step),
            "time": _number("time", time),
            "device_seconds": _number("device_seconds", device_seconds),
            "tokens": _number("tokens", tokens),
        }
        for name in ("time", "device_seconds", "tokens"):
            if row[name] is None:
                raise RunLogError(f"metrics: {name} of step {step} must be a finite number")
        if not row["tokens"].is_integer():
            raise RunLogError(f"metrics: tokens of step {step} must be whole, got {tokens!r}")
        row["tokens"] = int(row["tokens"])
        for name, value in scalars.items():
            if not isinstance(name, str) or not name or name in _METRIC_KEYS:
                raise RunLogError(f"metrics: {name!r} cannot name a scalar")
            row[_clean(name)] = _number(name, value)
        _append_line(self.path / "metrics.jsonl", row)
        self.last_step = int(step)

    def event(self, step: int, kind: str, message: str) -> None:
        """Append an event of one of the `EVENT_KINDS`."""
        _check_step(step, "events")
        if kind not in EVENT_KINDS:
            raise RunLogError(f"events: kind must be one of {', '.join(EVENT_KINDS)}, got {kind!r}")
        row = {"step": int(step), "kind": kind, "message": _clean(message)}
        _append_line(self.path / "events.jsonl", row)

    def problems(self, rows: Rows) -> None:
        """Write the problem table, once; on resume the same table may be handed in again.

        Raises:
            RunLogError: rows that do not fit, or ids that are not 0 to N-1, each once.
            FileExistsError: another problem table is there already.
        """
        table = _table("problems", rows)
        ids = np.sort(table["prompt_id"].to_numpy())
        if not np.array_equal(ids, np.arange(len(ids))):
            raise RunLogError("problems: column 'prompt_id' must hold 0 to N-1, each once")
        file = self.path / "problems.parquet"
        if file.exists() and not _read_parquet(file, "problems", None).equals(table):
            raise FileExistsError(f"{file} holds another problem table; start a new run for these")
        _write_parquet(file, table)

    def trajectories(self, step: int, rows: Rows) -> None:
        """Write a step's trajectories, all in one call. Raises as `evals`."""
        self._write("trajectories", step, rows)

    def prompts(self, round: int, rows: Rows) -> None:
        """Write a round's tracker, all in one call; `step` is a column. Raises as `evals`."""
        self._write("prompts", round, rows, filled="round")

    def evals(self, step: int, rows: Rows) -> None:
        """Write a step's evaluation, all benchmarks in one call.

        Args:
            step: fills the column `step`.
            rows: the other columns of `COLUMNS["evals"]`.

        Raises:
            RunLogError: an unknown, missing or unequally long column, or an entry of another type;
                part and column are named.
            FileExistsError: the step has its file already.
        """
        self._write("evals", step, rows)

    def tokens(self, step: int, rows: Rows) -> None:
        """Write a step's values by vocabulary entry, all in one call. Raises as `evals`."""
        self._write("tokens", step, rows)

    def calibration(self, step: int, rows: Rows) -> None:
        """Write a step's calibration cells, all in one call. Raises as `evals`."""
        self._write("calibration", step, rows)

    def scores(self, critic: str, step: int, rows: Rows) -> None:
        """Write a step's trajectories as a named frozen critic scores them. Raises as `evals`."""
        self._write("scores", step, rows, folder=f"scores/{_safe_name(critic)}")

    def table(self, name: str, rows: Rows, units: Mapping[str, str] | None = None) -> None:
        """Write a study's table with free columns; an earlier table of that name is replaced.

        Args:
            name: letters, digits, dots, dashes and underscores.
            rows: column -> entries; numbers, booleans or text.
            units: column -> unit.

        Raises:
            RunLogError: unequally long columns, entries of mixed type, or a unit for no column.
        """
        part = f"tables/{_safe_name(name)}"
        columns = _given(part, rows)
        for column in units or {}:
            if column not in columns:
                raise RunLogError(f"{part}: a unit is given for {column!r}, which is no column")
        arrays = {}
        for column, entries in columns.items():
            try:
                arrays[column] = _arrow_array(entries)
            except _unfit() as error:
                raise RunLogError(f"{part}: column {column!r}: {error}") from error
        _write_parquet(self.path / f"{part}.parquet", _assemble(arrays, units or {}))

    def _write(
        self, part: str, number: int, rows: Rows, *, filled: str = "step", folder: str | None = None
    ) -> None:
        """Write one file of a part, named by a step or round that also fills a column."""
        _check_step(number, part, filled)
        file = self.path / (folder or part) / f"{number:08d}.parquet"
        if int(number) in _numbered_files(file.parent):
            raise FileExistsError(
                f"{file}: {part} has {filled} {number} already; hand in all its rows at once, or "
                "rewind before writing it again"
            )
        _write_parquet(file, _table(part, rows, filled={filled: int(number)}))


# ------------------------------------------------------------------------------------ reading


def read_run(path: str | Path) -> dict[str, Any]:
    """Read `run.yaml`.

    Raises:
        MissingPartError: the folder holds no run.
        RunLogError: the file is damaged, or its schema version is not the one of this code.
    """
    yaml = _require("yaml")
    file = Path(path) / "run.yaml"
    if not file.is_file():
        raise MissingPartError(f"{path} is not a run log: there is no {file}")
    try:
        run = yaml.safe_load(file.read_bytes())
    except yaml.YAMLError as error:
        raise RunLogError(f"{file} is not YAML: {error}") from error
    version = run.get("schema_version") if isinstance(run, dict) else None
    if not _is_int(version):
        raise RunLogError(f"{file} names no schema_version; it was not written as a run log")
    if version != SCHEMA_VERSION:
        remedy = "update cvpo" if version > SCHEMA_VERSION else "read it with the cvpo it names"
        raise RunLogError(
            f"{file} has schema version {version}, this cvpo reads {SCHEMA_VERSION}: {remedy}"
        )
    missing = {"method", "seed", "verifier", "config"} - run.keys()
    if missing:
        raise RunLogError(f"{file} lacks {', '.join(sorted(missing))}")
    for key, kind in (("method", str), ("seed", int), ("verifier", str)):
        if not isinstance(run[key], kind):
            raise RunLogError(f"{file}: {key} must be of type {kind.__name__}, got {run[key]!r}")
    return dict(run)


def read_metrics(path: str | Path) -> pd.DataFrame:
    """One row per step: step, time, device_seconds, tokens and a float column per scalar.

    A scalar is NaN where its value is missing or the step did not log it.

    Raises:
        MissingPartError: no such file.
        RunLogError: a damaged line, or steps out of order; file and line are named.
    """
    return _read_lines(path, "metrics.jsonl", _METRIC_KEYS)


def read_events(path: str | Path) -> pd.DataFrame:
    """One row per event: step, kind, message. Raises as `read_metrics`."""
    return _read_lines(path, "events.jsonl", _EVENT_KEYS)


def read_problems(path: str | Path, columns: Sequence[str] | None = None) -> pd.DataFrame:
    """The run's problem table. Raises as `scan`."""
    read_run(path)
    return _frame(_read_parquet(Path(path) / "problems.parquet", "problems", columns))


def read_trajectories(
    path: str | Path,
    columns: Sequence[str] | None = None,
    steps: Collection[int] | None = None,
) -> pd.DataFrame:
    """Trajectories of all steps in one frame; for a long run name columns, or use `scan`.

    Args:
        path: the run's folder.
        columns: names from `COLUMNS["trajectories"]`; default: all that the files hold.
        steps: which steps; default: all. Steps that were not kept are passed over.

    Raises:
        As `scan`.
    """
    return _read_all(path, "trajectories", columns, steps)


def read_prompts(
    path: str | Path, columns: Sequence[str] | None = None, rounds: Collection[int] | None = None
) -> pd.DataFrame:
    """The tracker, one row per prompt and round. Arguments as `read_trajectories`."""
    return _read_all(path, "prompts", columns, rounds)


def read_evals(
    path: str | Path, columns: Sequence[str] | None = None, steps: Collection[int] | None = None
) -> pd.DataFrame:
    """Evaluations, one row per benchmark, problem and sample. Arguments as `read_trajectories`."""
    return _read_all(path, "evals", columns, steps)


def read_tokens(
    path: str | Path, columns: Sequence[str] | None = None, steps: Collection[int] | None = None
) -> pd.DataFrame:
    """Values by vocabulary entry. Arguments as `read_trajectories`."""
    return _read_all(path, "tokens", columns, steps)


def read_calibration(
    path: str | Path, columns: Sequence[str] | None = None, steps: Collection[int] | None = None
) -> pd.DataFrame:
    """Calibration cells. Arguments as `read_trajectories`."""
    return _read_all(path, "calibration", columns, steps)


def read_scores(
    path: str | Path,
    critic: str,
    columns: Sequence[str] | None = None,
    steps: Collection[int] | None = None,
) -> pd.DataFrame:
    """Trajectories as a named frozen critic scores them. Arguments as `read_trajectories`."""
    return _read_all(path, f"scores/{_safe_name(critic)}", columns, steps)


def read_table(path: str | Path, name: str) -> pd.DataFrame:
    """A study's table; `frame.attrs["units"]` maps columns to units. Raises as `scan`."""
    read_run(path)
    part = f"tables/{_safe_name(name)}"
    table = _read_parquet(Path(path) / f"{part}.parquet", part, None)
    frame = _frame(table)
    frame.attrs["units"] = {
        field.name: field.metadata[b"unit"].decode()
        for field in table.schema
        if field.metadata and b"unit" in field.metadata
    }
    return frame


def list_steps(path: str | Path, part: str) -> list[int]:
    """Steps (rounds, for prompts) that a part has a file of, ascending. Raises as `scan`."""
    return list(_part_files(Path(path), part))


def scan(
    path: str | Path,
    part: str,
    columns: Sequence[str] | None = None,
    steps: Collection[int] | None = None,
) -> Iterator[pd.DataFrame]:
    """Read a part file by file, in order of steps, holding one at a time.

    Args:
        path: the run's folder.
        part: trajectories, prompts, evals, tokens, calibration or scores/<critic>.
        columns: names from `COLUMNS`; default: all that a file holds. One that a file may lack is
            null there.
        steps: which steps (rounds, for prompts); default: all. Absent ones are passed over.

    Yields:
        A frame per file; null numbers are NaN.

    Raises:
        MissingPartError: no run, no such part, or none of the steps asked for.
        RunLogError: an unknown part or column, a damaged file, or one that does not fit the schema.
    """
    return map(_frame, _scan_tables(Path(path), part, columns, steps))


def _scan_tables(
    path: Path, part: str, columns: Sequence[str] | None, steps: Collection[int] | None
) -> Iterator[Any]:
    files = _part_files(path, part)
    kept = [file for number, file in files.items() if steps is None or number in steps]
    if not kept:
        raise MissingPartError(f"{path / part} has none of the steps asked for")
    return (_read_parquet(file, part, columns) for file in kept)


def _read_all(
    path: str | Path, part: str, columns: Sequence[str] | None, steps: Collection[int] | None
) -> pd.DataFrame:
    tables = list(_scan_tables(Path(path), part, columns, steps))
    return _frame(_require("pyarrow").concat_tables(tables, promote_options="default"))


def _frame(table: Any) -> pd.DataFrame:
    _require("pandas")
    frame: pd.DataFrame = table.to_pandas()
    return frame


def _read_lines(path: str | Path, name: str, keys: Mapping[str, type]) -> pd.DataFrame:
    pandas = _require("pandas")
    read_run(path)
    file = Path(path) / name
    if not file.is_file():
        raise MissingPartError(f"the run log {path} has no part {name}: {file} does not exist")
    rows = [row for _, row, _ in _json_lines(file, keys)]
    frame: pd.DataFrame = pandas.DataFrame(rows, columns=None if rows else list(keys))
    dtypes = {int: "int64", float: "float64", str: "str"}
    try:
        # null, and a scalar that only other steps have, both come out as NaN
        return frame.astype({key: dtypes[keys.get(key, float)] for key in frame.columns})
    except (TypeError, ValueError, OverflowError) as error:
        raise RunLogError(f"{file} holds a scalar that is no number: {error}") from error


# --------------------------------------------------------------------------------- JSON lines


def _json_lines(
    file: Path, keys: Mapping[str, type]
) -> Iterator[tuple[int, dict[str, Any], bytes]]:
    """Line number, row and the line itself; a torn last line is passed over."""
    last_step = -1
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            whole = line.endswith(b"\n")
            try:
                row = json.loads(line)
            except ValueError as error:
                if not whole:  # no beginning of a JSON object is one, so this is a kill's doing
                    return
                raise RunLogError(f"{file}, line {number} is no JSON ({error}); mend it") from error
            for key, kind in keys.items():
                value = row.get(key) if isinstance(row, dict) else None
                fits = isinstance(value, (int, float) if kind is float else kind)
                if not fits or isinstance(value, bool):
                    raise RunLogError(
                        f"{file}, line {number}: {key!r} must be of type {kind.__name__}, "
                        f"got {value!r}"
                    )
            if keys is _METRIC_KEYS and row["step"] <= last_step:
                raise RunLogError(
                    f"{file}, line {number}: step {row['step']} does not follow step {last_step}; "
                    "did two processes write this log? Remove the lines that are wrong"
                )
            last_step = row["step"]
            yield number, row, line if whole else line + b"\n"


def _mend_lines(file: Path, keys: Mapping[str, type], upto: float) -> list[dict[str, Any]]:
    """Leave whole lines of steps up to `upto`, each with its line feed, and return their rows."""
    found = list(_json_lines(file, keys)) if file.exists() else []
    kept = [(row, line) for _, row, line in found if row["step"] <= upto]
    content = b"".join(line for _, line in kept)
    if not file.exists() or len(content) != file.stat().st_size:
        with _whole(file) as out:
            out.write(content)
    return [row for row, _ in kept]


def _append_line(file: Path, row: Mapping[str, Any]) -> None:
    """Append in one write; after a failed one (a full disk) the file is as it was."""
    line = json.dumps(row, allow_nan=False).encode() + b"\n"
    with file.open("ab", buffering=0) as out:
        size = os.fstat(out.fileno()).st_size
        try:
            written = out.write(line)
            if written != len(line):
                raise OSError(f"{file}: {written} of {len(line)} bytes written; is the disk full?")
            os.fsync(out.fileno())
        except OSError:
            os.ftruncate(out.fileno(), size)
            raise


def _number(name: str, value: Any) -> float | None:
    """A finite float, or None for "no number"."""
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        # OverflowError: a larger whole number than floats hold; RuntimeError: a tensor of several
        raise RunLogError(f"metrics: {name!r} must be a number, got {value!r}") from error
    return number if math.isfinite(number) else None


# ------------------------------------------------------------------------------------ Parquet


def _table(part: str, rows: Rows, filled: Mapping[str, int] | None = None) -> Any:
    """Rows as the Arrow table that `COLUMNS` declares; `filled` columns have one value each."""
    declared = {column.name: column for column in COLUMNS[part]}
    given = _given(part, rows)
    length = len(next(iter(given.values())))
    for name, value in (filled or {}).items():
        if any(entry != value for entry in given.get(name, ())):
            raise RunLogError(f"{part}: column {name!r} must be {value} in every row")
        given[name] = [value] * length
    for name in given:
        if name not in declared:
            raise RunLogError(
                f"{part}: unknown column {name!r}; its columns are {', '.join(declared)}"
            )
    arrays = {}
    for name, column in declared.items():
        if name not in given and column.presence == "value":
            raise RunLogError(f"{part}: column {name!r} is missing ({column.about})")
        if name in given or column.presence == "nullable":
            arrays[name] = _typed_array(part, column, given.get(name, [None] * length))
    units = {name: declared[name].unit for name in arrays if declared[name].unit}
    return _assemble(arrays, units)


def _given(part: str, rows: Rows) -> dict[str, Any]:
    """Columns by name, equally long, as something that Arrow takes; tensors leave the device."""
    given: dict[str, Any] = {}
    for name, values in rows.items():
        if not isinstance(name, str):
            raise RunLogError(f"{part}: column names must be text, got {name!r}")
        if isinstance(values, torch.Tensor):
            values = values.detach().cpu()
            values = (values.double() if values.is_floating_point() else values).numpy()
        one_entry = not hasattr(values, "__len__") or getattr(values, "ndim", 1) == 0
        if one_entry or isinstance(values, (str, bytes, Mapping)):
            raise RunLogError(f"{part}: column {name!r} must be a sequence, got {values!r}")
        given[name] = values
        first, expected = next(iter(given)), len(next(iter(given.values())))
        if len(values) != expected:
            raise RunLogError(
                f"{part}: column {name!r} has {len(values)} rows, column {first!r} has {expected}"
            )
    if not given:
        raise RunLogError(f"{part}: there is no column")
    return given


def _typed_array(part: str, column: Column, values: Any) -> Any:
    """Entries as the column's type without loss; NaN and None are null."""
    pa = _require("pyarrow")
    try:
        if column.dtype == "string":  # ids are often whole numbers
            values = [str(x) if _is_int(x) else x for x in values]
        elif column.dtype == "list<int32>":
            values = [x.tolist() if isinstance(x, torch.Tensor) else x for x in values]
        array = _arrow_array(values)
        is_text = pa.types.is_string(array.type) or pa.types.is_large_string(array.type)
        if is_text != (column.dtype == "string") and not pa.types.is_null(array.type):
            raise TypeError(f"entries are {array.type}")  # Arrow would parse or print them
        if column.dtype == "bool" and not set(array.unique().to_pylist()) <= {0, 1, None}:
            raise ValueError("entries must be true or false")
        array = array.cast(_arrow_type(column))
    except _unfit() as error:
        raise RunLogError(
            f"{part}: column {column.name!r} does not fit {column.dtype}: {error}"
        ) from error
    if column.presence == "value" and array.null_count:
        row = array.is_null().to_pylist().index(True)
        raise RunLogError(f"{part}: column {column.name!r} has no value in row {row}")
    return array


def _arrow_array(values: Any) -> Any:
    """Arrow's own choice of type. Text that is no Unicode (lone surrogates) is mended and kept."""
    pa = _require("pyarrow")
    try:
        array = pa.array(values, from_pandas=True)
    except UnicodeEncodeError:
        values = [_clean(x) if isinstance(x, str) else x for x in values]
        array = pa.array(values, from_pandas=True)
    if pa.types.is_dictionary(array.type):  # a categorical column of a frame
        array = array.dictionary_decode()
    return array


def _arrow_type(column: Column) -> Any:
    pa = _require("pyarrow")
    types = {"bool": pa.bool_(), "list<int32>": pa.list_(pa.int32())}
    return types.get(column.dtype) or pa.type_for_alias(column.dtype)


def _unfit() -> tuple[type[Exception], ...]:
    """What Arrow raises for entries that do not fit a type."""
    return (_require("pyarrow").ArrowException, TypeError, ValueError, OverflowError)


def _assemble(arrays: Mapping[str, Any], units: Mapping[str, str]) -> Any:
    """An Arrow table with each column's unit in its field's metadata."""
    pa = _require("pyarrow")
    fields = [
        pa.field(name, array.type, metadata={"unit": units[name]} if name in units else None)
        for name, array in arrays.items()
    ]
    schema = pa.schema(fields, metadata={"cvpo_schema_version": str(SCHEMA_VERSION)})
    return pa.Table.from_arrays(list(arrays.values()), schema=schema)


def _write_parquet(file: Path, table: Any) -> None:
    parquet = _require("pyarrow.parquet")
    if not file.parent.exists():
        file.parent.mkdir(parents=True)
        _fsync_folder(file.parent.parent)
    with _whole(file) as out:
        parquet.write_table(table, out, compression="zstd", write_page_checksum=True)


def _read_parquet(file: Path, part: str, columns: Sequence[str] | None) -> Any:
    """A file as an Arrow table whose declared columns have their declared types."""
    pa, parquet = _require("pyarrow"), _require("pyarrow.parquet")
    if not file.is_file():
        raise MissingPartError(f"there is no part {part}: {file} does not exist")
    declared = {column.name: column for column in COLUMNS.get(part.split("/")[0], ())}
    for name in columns or ():
        if name not in declared:
            raise RunLogError(f"{part}: unknown column {name!r}; it has {', '.join(declared)}")
    try:
        with parquet.ParquetFile(file, page_checksum_verification=True) as source:
            held = source.schema_arrow.names
            wanted = held if columns is None else [name for name in columns if name in held]
            table = source.read(columns=wanted)
    except (pa.ArrowException, OSError) as error:
        raise RunLogError(
            f"{file} is not a whole Parquet file ({error}); remove it, or rewind the run before it"
        ) from error
    for name, column in declared.items():
        if columns is not None and name not in columns:
            continue
        if name in held:
            index = table.schema.get_field_index(name)
            try:
                cast = table[name].cast(_arrow_type(column))
            except pa.ArrowException as error:
                raise RunLogError(
                    f"{file}: column {name!r} is {table[name].type}, the schema says {column.dtype}"
                ) from error
            table = table.set_column(index, table.schema.field(name).with_type(cast.type), cast)
        elif column.presence == "value":
            raise RunLogError(f"{file}: column {name!r} is missing; the schema requires it")
        elif columns is not None or column.presence == "nullable":
            nulls = pa.nulls(len(table), _arrow_type(column))
            table = table.append_column(name, nulls)
    return table if columns is None else table.select(list(columns))


def _drop_rows_after(file: Path, step: int) -> None:
    """Drop a file's rows of later steps, and the file with its last row; no step, no change."""
    part = "prompts" if file.parent.name == "prompts" else f"tables/{file.stem}"
    table = _read_parquet(file, part, None)
    if "step" not in table.column_names or not len(table):
        return
    keep = [
        not isinstance(entry, (int, float)) or entry <= step for entry in table["step"].to_pylist()
    ]
    if not any(keep):
        file.unlink()
        _fsync_folder(file.parent)
    elif not all(keep):
        _write_parquet(file, table.filter(keep))


# ------------------------------------------------------------------------- folders and files


def _numbered_folders(path: Path) -> list[Path]:
    """The folders that exist and hold one file per step or round."""
    plain = [path / name for name in _FOLDERS[:-2]]
    scores = sorted((path / "scores").glob("*"))
    return [folder for folder in (*plain, *scores) if folder.is_dir()]


def _numbered_files(folder: Path) -> dict[int, Path]:
    """Number -> Parquet file, ascending; padded and unpadded names alike."""
    files: dict[int, Path] = {}
    for file in folder.glob("[!.]*.parquet"):
        if not re.fullmatch(r"[0-9]+", file.stem):
            raise RunLogError(f"{file} is not named by a step, like 00000012.parquet; move it away")
        number = int(file.stem)
        if number in files:
            raise RunLogError(f"{files[number]} and {file} are the same step; remove one")
        files[number] = file
    return dict(sorted(files.items()))


def _part_files(path: Path, part: str) -> dict[int, Path]:
    read_run(path)
    name, _, critic = part.partition("/")
    if name not in _FOLDERS[:-1] or (name == "scores") != bool(critic):
        raise RunLogError(f"unknown part {part!r}: {', '.join(_FOLDERS[:-2])} or scores/<critic>")
    files = _numbered_files(path / part)
    if not files:
        raise MissingPartError(f"the run log {path} has no part {part}: {path / part} is empty")
    return files


@contextlib.contextmanager
def _whole(file: Path) -> Iterator[BinaryIO]:
    """A file that comes into its place whole: written aside, forced to disk, renamed."""
    aside = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with aside.open("wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        aside.replace(file)
    finally:
        aside.unlink(missing_ok=True)
    _fsync_folder(file.parent)


def _fsync_folder(folder: Path) -> None:
    """Force a rename or removal to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _safe_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise RunLogError(f"{name!r} cannot name a file: letters, digits, '.', '-' and '_' only")
    return name


def _check_step(number: object, part: str, what: str = "step") -> None:
    if not _is_int(number) or not 0 <= number < 2**63:  # a reader's int64
        raise RunLogError(f"{part}: {what} must be a whole number from 0, got {number!r}")


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _clean(text: str) -> str:
    """Text as Unicode: surrogate pairs are joined, a lone surrogate becomes U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


# ---------------------------------------------------------------------------------- run.yaml


def _plain(value: Any, key: str) -> Any:
    """Plain data that YAML holds without Python's own tags."""
    if isinstance(value, Enum):
        return _plain(value.value, key)
    if isinstance(value, Mapping):
        return {str(name): _plain(item, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{key}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, np.generic):
        return _plain(value.item(), key)
    if isinstance(value, (str, Path)):
        return _clean(str(value))
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise RunLogError(f"run.yaml: {key} must be plain data, got {type(value).__name__} {value!r}")


def _code_version() -> str:
    """The commit this file stands at, or the package's version outside a checkout."""
    here = Path(__file__)

    def git(*command: str) -> str:
        return subprocess.run(
            ["git", *command],
            cwd=here.parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # not somebody else's repository around us
        return git("describe", "--always", "--dirty", "--abbrev=12")
    except (OSError, subprocess.SubprocessError):
        return _installed("cvpo") or "unknown"


def _package_versions() -> dict[str, str]:
    found = {name: _installed(name) for name in _PACKAGES.split()}
    return {"python": platform.python_version()} | {k: v for k, v in found.items() if v}


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> list[str]:
    if torch.cuda.is_available():
        return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return [f"cpu ({platform.machine()}, {os.cpu_count()} cores)"]


def _require(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"the run log needs {module}: pip install 'cvpo[log]'") from error
