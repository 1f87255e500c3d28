"""Many runs, a few at a time: every entry of a sweep file under every seed.

Each run is a process of its own, `python -m train run`, with its output in its folder. The same
command again passes over the runs that are done and goes on with the others.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError
from tqdm import tqdm

from train.checkpoint import checkpoints
from train.config import Config, ConfigError, Section, Text, load_config

OUTPUT = "train.log"
"""In a run's folder: what its process printed."""

Value = int | float | bool | str | list[Any] | None


class Sweep(Section):
    """A sweep file."""

    folder: Text
    """Each run goes to ``<folder>/<name>-<seed>``."""
    seeds: Annotated[tuple[int, ...], Field(min_length=1)]
    common: dict[str, Value] = Field(default_factory=dict)
    """Overrides of every run, key -> value."""
    runs: Annotated[dict[str, dict[str, Value]], Field(min_length=1)]
    """Name -> overrides of its own."""


@dataclass(frozen=True)
class Planned:
    """One run of a sweep."""

    name: str
    overrides: list[str]
    config: Config

    @property
    def done(self) -> bool:
        """Whether it has its last checkpoint already."""
        saved = checkpoints(self.config.folder / "checkpoints")
        return bool(saved) and saved[-1][0] >= self.config.steps


def plan(file: Path, base: Path | None, overrides: Sequence[str]) -> list[Planned]:
    """Every run of a sweep file, seed by seed, so that the first whole set is there early.

    Args:
        file: The sweep.
        base: Configuration that the entries override; the laptop's when None.
        overrides: ``key=value`` for every run, over what the file says.

    Raises:
        ConfigError: The file or one of its runs cannot be used; names the entry.
    """
    try:
        sweep = Sweep.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not valid YAML: {error}") from error
    except ValidationError as error:
        problem = error.errors()[0]
        at = ".".join(map(str, problem["loc"])) or "the file"
        raise ConfigError(f"{file}: {at}: {problem['msg']}") from None
    planned = []
    for seed in sweep.seeds:
        for name, own in sweep.runs.items():
            said = [f"{key}={_text(value)}" for key, value in {**sweep.common, **own}.items()]
            place = [f"seed={seed}", f"run_dir={sweep.folder}/{name}-{seed}"]
            try:
                config = load_config(base, [*said, *overrides, *place])
            except ConfigError as error:
                raise ConfigError(f"{file}: run {name}: {error}") from error
            planned.append(Planned(f"{name}-{seed}", [*said, *overrides, *place], config))
    return planned


def run_sweep(runs: Sequence[Planned], *, base: Path | None, at_once: int) -> list[str]:
    """Trains the runs that are not done yet; returns the names of those that failed.

    Args:
        runs: As `plan` gives them.
        base: As there.
        at_once: Processes at a time.
    """
    waiting = [run for run in runs if not run.done]
    crew = _Crew(base)
    failed = []
    bar = tqdm(total=len(runs), initial=len(runs) - len(waiting), desc="sweep", unit="run")
    with ThreadPoolExecutor(at_once) as pool:
        futures = {pool.submit(crew.train, run): run for run in waiting}
        try:
            for future in as_completed(futures):
                run = futures[future]
                if future.result() == 0:
                    bar.update()
                else:
                    failed.append(run.name)
                    tqdm.write(f"{run.name}: {_last_line(run.config.folder / OUTPUT)}")
        except KeyboardInterrupt:
            crew.stop()
            pool.shutdown(cancel_futures=True)
            raise
    bar.close()
    return sorted(failed)


class _Crew:
    """The processes that are training now."""

    def __init__(self, base: Path | None) -> None:
        self._command = [sys.executable, "-m", "train", "run"]
        if base is not None:
            self._command += ["--config", str(base)]
        self._lock = threading.Lock()
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._stopped = False

    def train(self, run: Planned) -> int:
        """Trains one run to its end; returns the process's exit status."""
        run.config.folder.mkdir(parents=True, exist_ok=True)
        with (run.config.folder / OUTPUT).open("ab") as output:
            with self._lock:
                if self._stopped:
                    return 1
                process = subprocess.Popen(
                    [*self._command, *run.overrides], stdout=output, stderr=subprocess.STDOUT
                )
                self._processes.add(process)
            status = process.wait()
        with self._lock:
            self._processes.discard(process)
        return status

    def stop(self) -> None:
        """Ends what is running; nothing else starts."""
        with self._lock:
            self._stopped = True
            for process in self._processes:
                process.terminate()


def _text(value: Value) -> str:
    """A value as an override says it."""
    return (
        yaml.safe_dump(value, default_flow_style=True, width=float("inf")).split("\n...")[0].strip()
    )


def _last_line(file: Path) -> str:
    lines = file.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "ended without a word")
