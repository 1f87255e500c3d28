"""The trainer's command line: `python -m train warmstart | run | eval | score | sweep`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from cvpo.runlog import RunLogError
from train.checkpoint import CheckpointError
from train.config import Config, ConfigError, load_config
from train.data import DataError
from train.models import ModelError
from train.world import TrainingError

_CONFIGURED = """
Configuration: --config names a YAML file (default: the laptop's, train/configs/laptop.yaml, with a
comment on every key); arguments of the form section.key=value override it, for example
  method=vapo seed=3 rollout.samples=16 actor.lr=1e-4
An unknown key or an impossible value is refused before anything starts.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m train",
        description="Trains a language model by CVPO, VAPO, GRPO and others (cvpo/estimator.py).",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser(
        "warmstart",
        help="teach a small new model the built-in addition task",
        description="Trains a 0.4M-parameter model on worked column additions, some of them wrong "
        "on purpose so that something is left to learn. About two minutes on two cores; found "
        "again if it has been trained before.",
    )
    commands.add_parser(
        "run",
        help="train by reinforcement learning (goes on where an interrupted run stopped)",
        description="Value pretraining, then the training loop, with evaluations and checkpoints. "
        "All goes to run_dir. The same command again goes on from the last checkpoint.",
    )
    evaluation = commands.add_parser(
        "eval",
        help="evaluate a model or a checkpoint: avg@k and pass@k",
        description="Samples evaluation.samples responses to every problem of "
        "evaluation.benchmarks and grades them under each verifier.",
    )
    evaluation.add_argument(
        "--model", metavar="PATH", help="model or checkpoint folder; default: model.path"
    )
    scoring = commands.add_parser(
        "score",
        help="score runs' logged responses with one frozen critic",
        description="Adds scores/<name> to each run's log: the spread of values that the same "
        "critic sees in the responses of different policies.",
    )
    scoring.add_argument("--critic", type=Path, required=True, help="checkpoint with the critic")
    scoring.add_argument("--name", default="frozen", help="name of the critic in the log")
    scoring.add_argument(
        "--run", type=Path, required=True, action="append", help="run folder; may be repeated"
    )
    scoring.add_argument(
        "--every", type=int, default=1, metavar="STEPS", help="score steps so far apart; default: 1"
    )
    scoring.add_argument(
        "--first", type=int, default=0, metavar="STEP", help="score from this step on; default: 0"
    )
    sweep = commands.add_parser(
        "sweep",
        help="train many runs, a few at a time (passes over those that are done)",
        description="Trains every entry of a sweep file under every seed, each in a process of its "
        "own. The same command again goes on with what is not done.",
    )
    sweep.add_argument(
        "--sweep",
        type=Path,
        metavar="FILE",
        default=Path(__file__).parent / "configs" / "exhibits.yaml",
        help="default: train/configs/exhibits.yaml, the runs that the exhibits are made from",
    )
    sweep.add_argument("--at-once", type=int, default=2, help="runs at a time; default: 2")
    for command in commands.choices.values():
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        command.epilog = _CONFIGURED
        command.add_argument("--config", type=Path, metavar="FILE", help="configuration (YAML)")
        command.add_argument("overrides", nargs="*", metavar="key=value", help="override a key")
    options = parser.parse_args(arguments)
    try:
        config = load_config(options.config, options.overrides)
        return _COMMANDS[options.command](config, options)
    except (CheckpointError, ConfigError, DataError, ModelError, RunLogError) as error:
        return _ended(f"error: {error}", status=2)
    except TrainingError as error:  # a lost process, a failed weight sync
        return _ended(f"error: {error}", status=1)
    except OSError as error:  # a full disk, a folder without permission
        return _ended(f"error: {error}", status=1)
    except KeyboardInterrupt:
        return _ended("interrupted; the same command goes on from the last checkpoint", status=130)


def _ended(message: str, *, status: int) -> int:
    tqdm.write(message, file=sys.stderr)  # on a line of its own, whatever bar was going on
    return status


def _warmstart(config: Config, _: argparse.Namespace) -> int:
    from train.warmstart import warm_start

    print(f"model: {warm_start(config)}")
    return 0


def _run(config: Config, _: argparse.Namespace) -> int:
    from train.loop import train

    train(config)
    print(f"run log: {config.folder}")
    print(f"next: python -m analysis summary {config.folder}")
    return 0


def _eval(config: Config, options: argparse.Namespace) -> int:
    from train.evaluate import evaluate, load_benchmarks, summarize
    from train.grading import Grader
    from train.models import load_tokenizer
    from train.run import load_policy, require_room, require_warm_start

    if not options.model:
        require_warm_start(config)
    path = options.model or config.model.path
    if (Path(path) / "actor").is_dir():
        path = str(Path(path) / "actor")
    tokenizer = load_tokenizer(path)
    benchmarks = load_benchmarks(config, tokenizer)
    if not benchmarks:
        raise ConfigError("evaluation.benchmarks: is empty, nothing to evaluate on")
    backend = load_policy(config, tokenizer, path)
    asked = [prompt for benchmark in benchmarks for prompt in benchmark.prompts]
    limit = config.evaluation.max_tokens
    require_room(backend.model, asked, max_tokens=limit, key="evaluation.max_tokens")
    with Grader() as grader:
        rows = evaluate(
            benchmarks,
            config=config,
            backend=backend,
            tokenizer=tokenizer,
            grader=grader,
            step=0,
        )
    for verifier in config.evaluation.verifiers:
        print(f"verifier: {verifier}")
        for name, score in summarize(rows, verifier=verifier).items():
            k = score.samples
            print(
                f"  {name:16} avg@{k} {score.mean:.3f} +- {score.standard_error:.3f}   "
                f"pass@{k} {score.pass_at_k:.3f}   {score.problems} problems"
            )
    return 0


def _score(config: Config, options: argparse.Namespace) -> int:
    from train.score import score

    if options.every < 1:
        raise ConfigError(f"--every must be at least 1, got {options.every}")
    for run in options.run:
        count = score(
            config,
            run=run,
            critic=options.critic,
            name=options.name,
            every=options.every,
            first=options.first,
        )
        print(f"{run}: {count} trajectories scored as {options.name}")
    return 0


def _sweep(config: Config, options: argparse.Namespace) -> int:
    from train.sweep import plan, run_sweep
    from train.warmstart import warm_start

    if options.at_once < 1:
        raise ConfigError(f"--at-once must be at least 1, got {options.at_once}")
    runs = plan(options.sweep, options.config, options.overrides)
    if any(run.config.model.path == config.warmstart.output for run in runs):
        warm_start(config)
    failed = run_sweep(runs, base=options.config, at_once=options.at_once)
    print(f"{len(runs) - len(failed)} of {len(runs)} runs done, in {runs[0].config.folder.parent}")
    if failed:
        print(f"failed: {', '.join(failed)}; the same command tries them again", file=sys.stderr)
    return 1 if failed else 0


_COMMANDS = {
    "warmstart": _warmstart,
    "run": _run,
    "eval": _eval,
    "score": _score,
    "sweep": _sweep,
}


if __name__ == "__main__":
    raise SystemExit(main())
