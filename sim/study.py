"""What every study is made of: settings, a desk to work at, and rows with verdicts.

A study is a function ``run(settings, desk) -> rows``. It measures worlds whose truth is known and
compares each number with what the paper says of it. Its run log holds the rows as the table
``study``, whatever other tables it makes, and below ``runs/`` the logs of simulated trainings.
"""

from __future__ import annotations

import difflib
import importlib
import math
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import joblib
import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError, field_validator
from tqdm import tqdm

from cvpo import RunLog, read_run
from cvpo.runlog import RunLogError
from sim.claims import CLAIMS

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")
Verdict = Literal["holds", "fails", "undecided", ""]


class SimError(ValueError):
    """Settings or data that no study can run with; the message names the key and what to do."""


class Settings(BaseModel):
    """Keys that every study has. Each study adds its own."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    seeds: tuple[Annotated[StrictInt, Field(ge=0, lt=2**31)], ...] = Field(
        default=(0, 1, 2, 3, 4), min_length=1
    )
    """Worlds to draw; every interval is over these. Their order says nothing."""
    output: Path = Path("runs/sim")
    """The study's run log goes to the folder of its name in here."""
    overwrite: bool = False
    """Replace the log of an earlier run of the same study."""
    trajectories: bool = False
    """Whether run logs of simulated trainings, where a study leaves some, have a row for each
    response at every reading."""
    jobs: int = -1
    """Processes at once; -1: one for each core."""
    backend: Literal["loky", "sequential", "dask", "ray"] = "loky"
    """joblib's: ``loky`` (processes) or ``sequential`` on this machine; ``dask`` or ``ray`` on a
    cluster, where those packages are installed and know their cluster."""

    @field_validator("*")
    @classmethod
    def _once(cls, value: Any) -> Any:
        if isinstance(value, tuple) and len(set(value)) < len(value):
            raise ValueError("holds something twice, which would count it as two measurements")
        return value

    @field_validator("seeds")
    @classmethod
    def _in_order(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(seeds))

    @field_validator("jobs")
    @classmethod
    def _some(cls, jobs: int) -> int:
        if jobs < 1 and jobs != -1:
            raise ValueError("jobs must be -1 (every core) or at least 1")
        return jobs


@dataclass(frozen=True)
class Row:
    """One line of what a study says."""

    quantity: str
    """What was measured."""
    setting: str
    """Where: world, method, constants."""
    value: float
    low: float = math.nan
    """95 % interval over seeds or worlds; NaN where the number is exact or has none."""
    high: float = math.nan
    n: int = 1
    """Seeds or worlds behind the number."""
    unit: str = ""
    paper: str = ""
    """What the paper says of it."""
    claim: int | None = None
    """Number in `CLAIMS`."""
    verdict: Verdict = ""
    """On the paper's claim; empty where it claims nothing."""


@dataclass(frozen=True)
class Study:
    """A study as the command line finds it."""

    name: str
    about: str
    settings: type[Settings]
    run: Callable[[Any, Desk], list[Row]]


class Desk:
    """What a study works with: its run log, all cores, and a place for tables.

    The log grows in a folder ``<name>.partial`` and takes its place when the study is finished, so
    that an earlier log is there until then.
    """

    def __init__(self, name: str, settings: Settings) -> None:
        """Opens the study's log.

        Raises:
            SimError: The folder holds something already and may not be replaced, or the backend is
                not installed.
        """
        self.name, self.settings = name, settings
        check_room(name, settings)
        _prepare(settings.backend)
        self.folder = _partial(name, settings)
        """Where the log is until the study is finished."""
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self.log = RunLog.create(
            self.folder,
            config={"study": name, **settings.model_dump(mode="json")},
            seed=settings.seeds[0],
            method=f"sim-{name}",
            verifier="exact",
            study=name,
        )

    def map(
        self, function: Callable[..., T], arguments: Iterable[tuple[Any, ...]], desc: str
    ) -> list[T]:
        """``[function(*a) for a in arguments]`` on all cores, in order, with a progress bar.

        Args:
            function: At a module's top level, so that another process finds it.
            arguments: One tuple for each call.
            desc: What the bar says.
        """
        work = list(arguments)
        # A name that joblib knows by its configuration only, such as dask, is none to `Parallel`.
        with joblib.parallel_config(self.settings.backend, n_jobs=self.settings.jobs):
            parallel = joblib.Parallel(return_as="generator")
            found = parallel(joblib.delayed(_one_thread)(function, a) for a in work)
            title = f"{self.name}: {desc}"
            return list(tqdm(found, total=len(work), desc=title, unit="job"))

    def table(
        self,
        name: str,
        rows: Sequence[dict[str, Any]] | pd.DataFrame,
        units: dict[str, str] | None = None,
    ) -> None:
        """Writes a further table of the study's log; a column's unit stands in its metadata."""
        import pandas as pd

        self.log.table(name, pd.DataFrame(rows), units)

    def finish(self) -> None:
        """Puts the log into its place."""
        target = self.settings.output / self.name
        if target.exists():
            shutil.rmtree(target)
        self.folder.rename(target)


def run_study(study: Study, settings: Settings) -> list[Row]:
    """Runs a study and writes its rows into its log, as the table ``study``.

    Raises:
        SimError: What the study was told makes no sense; nothing is left of it then, nor after an
            interruption.
    """
    desk = Desk(study.name, settings)
    try:
        rows = study.run(settings, desk)
    except (SimError, KeyboardInterrupt):
        shutil.rmtree(desk.folder)
        raise
    desk.table(
        "study",
        [
            {**asdict(row), "claim_text": CLAIMS.get(row.claim, "") if row.claim else ""}
            for row in rows
        ],
    )
    desk.finish()
    return rows


def check_room(name: str, settings: Settings) -> None:
    """Refuses to put a study's log where something else lies.

    Args:
        name: The study's.
        settings: Say where, and whether an earlier log of the same study may be replaced.

    Raises:
        SimError: The folder holds no log of this study, or one that may not be replaced.
    """
    for folder, what in (
        (settings.output / name, "an earlier run"),
        (_partial(name, settings), "an unfinished run (killed, or still going on)"),
    ):
        if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
            continue
        try:
            ours = not folder.is_symlink() and read_run(folder).get("study") == name
        except (OSError, RunLogError):
            ours = False
        if not ours:
            raise SimError(
                f"output: {folder} holds something that is no log of this study; choose another"
            )
        if not settings.overwrite:
            raise SimError(
                f"output: {folder} holds {what} of this study; set overwrite=true to replace it, "
                "or output=FOLDER to keep both"
            )


def _partial(name: str, settings: Settings) -> Path:
    return settings.output / f"{name}.partial"


def format_rows(rows: Sequence[Row]) -> str:
    """The rows as text, for a terminal."""
    import pandas as pd

    # What is short comes first: in a narrow terminal only the words wrap.
    columns: dict[str, list[str]] = {
        "verdict": [row.verdict for row in rows],
        "claim": ["" if row.claim is None else str(row.claim) for row in rows],
        "value": [_short(row.value) for row in rows],
        "unit": [row.unit for row in rows],
        "95 % interval": [
            "" if math.isnan(row.low) else f"[{_short(row.low)}, {_short(row.high)}]"
            for row in rows
        ],
        "n": [str(row.n) for row in rows],
        "what": [row.quantity for row in rows],
        "where": [row.setting for row in rows],
        "the paper says": [row.paper for row in rows],
    }
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    widths = {name: max(map(len, [name, *cells])) for name, cells in shown.items()}
    frame = pd.DataFrame({name: [c.ljust(widths[name]) for c in shown[name]] for name in shown})
    return frame.to_string(index=False, justify="left")


def read_settings(study: Study, overrides: Sequence[str]) -> Settings:
    """A study's settings from ``key=value`` arguments; values are YAML.

    Raises:
        SimError: Unknown key, impossible value, or no ``key=value``.
    """
    given: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise SimError(f"{override!r}: settings are written key=value")
        if key not in study.settings.model_fields:
            raise SimError(f"{study.name}: {unknown(key, study.settings.model_fields)}")
        if key in given:
            raise SimError(f"{key}: given twice")
        given[key] = _value(key, text)
    try:
        return study.settings.model_validate(given)
    except ValidationError as error:
        places = [problem["loc"] for problem in error.errors()]
        lines = [
            _explain(problem["loc"], problem["msg"], problem["input"])
            for problem in error.errors()
            # A list that is too short only without its bad entries is none.
            if problem["type"] != "too_short"
            or places.count(problem["loc"])
            == len([place for place in places if place[: len(problem["loc"])] == problem["loc"]])
        ]
        raise SimError(f"{study.name}: " + "\n  ".join(lines)) from None


def unknown(name: str, known: Iterable[str]) -> str:
    """'x is unknown; did you mean y?', or the list of what is known."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
    return f"{name!r} is unknown; {hint}"


def _value(key: str, text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SimError(f"{key}: {text!r} is not a YAML value: {error}") from error
    if isinstance(value, str):  # YAML 1.1 reads 3e-4 as text, since it lacks a dot
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _explain(place: Sequence[str | int], message: str, given: Any) -> str:
    message = message.removeprefix("Value error, ")
    return f"{'.'.join(map(str, place))}: {message} (got {given!r})" if place else message


def _short(number: float) -> str:
    return "-" if math.isnan(number) else f"{number:.4g}"


def _prepare(backend: str) -> None:
    """Makes a cluster's backend known to joblib."""
    try:
        if backend == "ray":
            importlib.import_module("ray.util.joblib").register_ray()
        elif backend == "dask":
            client = importlib.import_module("distributed")
            try:
                client.get_client()
            except ValueError:
                client.Client()  # a scheduler that dask's configuration names, or one of its own
    except ImportError as error:
        raise SimError(f"backend: {backend} is not installed here ({error})") from error


def _one_thread(function: Callable[..., T], arguments: tuple[Any, ...]) -> T:
    # The processes fill the cores: more threads than cores would crawl.
    torch.set_num_threads(1)
    return function(*arguments)
