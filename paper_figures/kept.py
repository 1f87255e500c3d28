"""The set of logged runs that comes with the repository, packed into one archive.

`make runs` trains, simulates, thins and packs it again. The exhibits are made from it where no
other runs are named.
"""

from __future__ import annotations

import argparse
import hashlib
import lzma
import shutil
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

from analysis import AnalysisError

ARCHIVE = Path(__file__).parent / "runs.tar.xz"
_MARK = ".archive"


def kept_runs(archive: Path = ARCHIVE, folder: Path | None = None) -> list[Path]:
    """The kept runs' folders, unpacked on first use and whenever the archive has changed.

    Args:
        archive: as `pack` writes it.
        folder: where they are unpacked; default: beside the archive, named `runs`.

    Raises:
        AnalysisError: there is no archive, or it is damaged.
    """
    folder = archive.with_name("runs") if folder is None else folder
    try:
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    except FileNotFoundError:
        raise AnalysisError(
            f"{archive}: the kept set of runs is not there; name runs with --runs, or make the "
            "set with `make runs`"
        ) from None
    mark = folder / _MARK
    if not mark.exists() or mark.read_text() != digest:
        _unpack(archive, folder, digest)
    return sorted(path.parent for path in folder.glob("*/run.yaml"))


def _unpack(archive: Path, folder: Path, digest: str) -> None:
    if folder.exists() and not (folder / _MARK).exists():
        raise AnalysisError(f"{folder}: is in the way of the kept runs; move it away")
    aside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        with tarfile.open(archive) as packed:
            packed.extractall(aside, filter="data")
    except (tarfile.TarError, lzma.LZMAError, EOFError, OSError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise AnalysisError(
            f"{archive}: cannot be unpacked ({error}); check it out again"
        ) from error
    (aside / _MARK).write_text(digest)
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)


def pack(runs: Sequence[Path], archive: Path = ARCHIVE) -> Path:
    """Write run folders into one archive; the same runs make the same bytes.

    Raises:
        AnalysisError: a folder holds no run, or two have one name.
    """
    names = [run.resolve().name for run in runs]
    for run, name in zip(runs, names, strict=True):
        if not (run / "run.yaml").is_file():
            raise AnalysisError(f"{run}: is no run log's folder")
        if names.count(name) > 1:
            raise AnalysisError(f"{run}: another run is called {name} too; rename one")
    aside = archive.with_name(f".{archive.name}.partial")
    with tarfile.open(aside, "w:xz", preset=9) as packed:
        for name, run in sorted(zip(names, runs, strict=True)):
            for file in sorted(file for file in run.rglob("*") if file.is_file()):
                packed.add(file, f"{name}/{file.relative_to(run).as_posix()}", filter=_plain)
    return aside.replace(archive)


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without what differs between machines."""
    member.mtime = member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode = 0o644
    return member


def main(arguments: Sequence[str] | None = None) -> int:
    """Packs runs; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m paper_figures.kept", description="Packs thinned run logs into the archive."
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    try:
        written = pack(parser.parse_args(arguments).runs)
    except (AnalysisError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{written} ({written.stat().st_size / 1e6:.1f} MB)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
