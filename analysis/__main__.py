"""Command line: `python -m analysis COMMAND --help`."""

import argparse
import sys
from collections.abc import Sequence

from analysis import AnalysisError, compare, export, ls, report, summary, thin
from cvpo.runlog import RunLogError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 if it went well, 2 after a message about its input."""
    parser = argparse.ArgumentParser(
        prog="python -m analysis", description="Tables and figures from run logs."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    ls.add_command(commands)
    summary.add_command(commands)
    compare.add_command(commands)
    export.add_command(commands)
    report.add_command(commands)
    thin.add_command(commands)
    arguments = parser.parse_args(argv)
    try:
        arguments.act(arguments)
    except (RunLogError, AnalysisError, OSError) as error:
        print(f"analysis {arguments.command}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
