"""The simulator's command line: `python -m sim STUDY [key=value ...]`, `python -m sim all`."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections import defaultdict
from collections.abc import Sequence

from cvpo.runlog import RunLogError
from sim.claims import CLAIMS
from sim.studies import STUDIES
from sim.study import (
    Row,
    Settings,
    SimError,
    Study,
    check_room,
    format_rows,
    read_settings,
    run_study,
    unknown,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one study, or all of them; returns the exit status."""
    names = "\n".join(f"  {study.name:<16}{study.about}" for study in STUDIES.values())
    parser = argparse.ArgumentParser(
        prog="python -m sim",
        description="Measures what CVPO's weights, tracker and bound do in worlds of known truth.",
        epilog=f"studies:\n{names}\n  {'all':<16}every one of them, then the claims\n\n"
        "`python -m sim STUDY keys` lists a study's keys, their defaults and what they mean.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("study", metavar="STUDY", help="name of a study, or all")
    parser.add_argument(
        "settings", nargs="*", metavar="key=value", help="set a key, values in YAML"
    )
    options = parser.parse_args(arguments)
    try:
        if options.study != "all" and options.study not in STUDIES:
            raise SimError(f"study {unknown(options.study, [*STUDIES, 'all'])}")
        chosen = [*STUDIES.values()] if options.study == "all" else [STUDIES[options.study]]
        if options.settings == ["keys"]:
            print("\n\n".join(_keys(study) for study in chosen))
            return 0
        _run(chosen, options.settings)
    except (SimError, RunLogError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _run(studies: Sequence[Study], overrides: Sequence[str]) -> None:
    if len(studies) > 1:
        for override in overrides:
            key = override.partition("=")[0]
            if key not in Settings.model_fields:
                raise SimError(f"all: {unknown(key, Settings.model_fields)} (keys of every study)")
    # All settings are read, and all folders looked at, before the first study starts.
    work = [(study, read_settings(study, overrides)) for study in studies]
    for study, settings in work:
        check_room(study.name, settings)
    found: list[Row] = []
    for study, settings in work:
        rows = run_study(study, settings)
        print(f"\n{study.name}: {study.about}\n\n{format_rows(rows)}\n")
        print(f"run log: {settings.output / study.name}")
        found += rows
    if len(studies) > 1:
        print(f"\n{_by_claim(found)}")


def _by_claim(rows: Sequence[Row]) -> str:
    said: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        if row.claim is not None and row.verdict:
            said[row.claim].append(row)
    lines = ["What the simulator says of the paper's claims"]
    for number, text in CLAIMS.items():
        verdicts = said.get(number, [])
        lines.append(f"{number:>3}. {text}")
        lines += [
            f"     {row.verdict:<10}{row.quantity} ({row.setting}): {row.value:.4g}"
            for row in verdicts
        ] or ["     not decided here"]
    return "\n".join(lines)


def _keys(study: Study) -> str:
    lines = [f"{study.name}: {study.about}"]
    defaults = study.settings().model_dump(mode="json")
    for name, field in study.settings.model_fields.items():
        about = " ".join((field.description or "").split())
        lines.append(f"  {name}={json.dumps(defaults[name])}")
        lines += textwrap.wrap(about, 92, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
