import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cvpo import read_evals, read_metrics
from train.__main__ import main
from train.addition import problems
from train.config import Config, ConfigError
from train.evaluate import evaluate, load_benchmarks, summarize
from train.grading import Grader
from train.loop import train
from train.models import load_tokenizer
from train.run import load_policy

MakeConfig = Callable[..., Config]
Rows = dict[str, list[Any]]


def rows_of(config: Config, *, step: int = 0) -> Rows:
    tokenizer = load_tokenizer(config.model.path)
    with Grader() as grader:
        return evaluate(
            load_benchmarks(config, tokenizer),
            config=config,
            backend=load_policy(config, tokenizer, config.model.path),
            tokenizer=tokenizer,
            grader=grader,
            step=step,
        )


def by_address(rows: Rows) -> dict[tuple[str, str, int], tuple[float, int, bool]]:
    keys = zip(rows["benchmark"], rows["problem_id"], rows["sample"], strict=True)
    found = zip(rows["exact"], rows["length"], rows["truncated"], strict=True)
    return dict(zip(keys, found, strict=True))


# ---------------------------------------------------------------------------------------- the rows


def test_every_problem_is_answered_k_times(tiny_config: MakeConfig) -> None:
    rows = rows_of(tiny_config())
    expected = [
        (f"add-{level}", f"{problem.prompt_id}:{problem.source_id}", sample)
        for level, count in ((1, 3), (2, 2))
        for problem in problems("test", count=count, levels=[level])
        for sample in range(2)
    ]
    assert list(by_address(rows)) == expected
    assert all(len(column) == 10 for column in rows.values())
    assert all(0 < length <= 16 for length in rows["length"])


def test_each_verdict_is_its_own_verifier_s(tiny_config: MakeConfig, tmp_path: Path) -> None:
    def graded_against(gold: Callable[[int], str]) -> Rows:
        file = tmp_path / "sums.jsonl"
        sums = [{"problem": f"{a}+{a + 1}=", "answer": gold(2 * a + 1)} for a in range(9)]
        file.write_text("\n".join(map(json.dumps, sums)))
        return rows_of(tiny_config(f"evaluation.benchmarks=[{{source: {file}}}]"))

    plain = graded_against(str)
    assert 0 < sum(plain["exact"]) < 18
    assert plain["exact"] == plain["normalized"] == plain["symbolic"]
    # The same responses against the same numbers written as \frac{2n}{2}: only algebra sees it.
    fraction = graded_against(lambda n: rf"\frac{{{2 * n}}}{{2}}")
    assert sum(fraction["exact"]) == 0
    assert fraction["symbolic"] == plain["exact"]


def test_a_response_does_not_depend_on_the_other_benchmarks(tiny_config: MakeConfig) -> None:
    together = by_address(rows_of(tiny_config("evaluation.samples=3")))
    alone = by_address(
        rows_of(
            tiny_config(
                "evaluation.benchmarks=[{name: add-2, source: addition, split: test, "
                "levels: [2], limit: 4}]",
                "rollout.batch_size=3",
            )
        )
    )
    shared = alone.keys() & together.keys()
    assert len(shared) == 4
    assert {key: alone[key] for key in shared} == {key: together[key] for key in shared}


@pytest.mark.parametrize("other", [{"step": 5}, {"seed": 2}])
def test_another_step_or_seed_draws_other_responses(
    tiny_config: MakeConfig, other: dict[str, int]
) -> None:
    many = "evaluation.samples=12"
    first = rows_of(tiny_config(many))
    again = rows_of(tiny_config(many))
    second = rows_of(tiny_config(many, f"seed={other.get('seed', 1)}"), step=other.get("step", 0))
    assert first == again
    assert first["length"] != second["length"]


def test_evaluation_samples_in_its_own_way(tiny_config: MakeConfig) -> None:
    greedy = rows_of(tiny_config("evaluation.temperature=1e-4", "evaluation.samples=3"))
    for first in range(0, len(greedy["exact"]), 3):
        assert len({greedy["length"][first + sample] for sample in range(3)}) == 1
    cut = rows_of(tiny_config("evaluation.max_tokens=2"))
    assert max(cut["length"]) == 2
    assert sum(cut["truncated"]) > 5


def test_verifiers_that_are_not_asked_for_are_missing(tiny_config: MakeConfig) -> None:
    rows = rows_of(tiny_config("evaluation.verifiers=[exact]"))
    assert set(rows["normalized"]) == set(rows["symbolic"]) == {None}
    assert set(rows["exact"]) <= {0.0, 1.0}


def test_no_benchmarks_make_no_rows(tiny_config: MakeConfig) -> None:
    config = tiny_config("evaluation.benchmarks=[]", "method=grpo", "steps=1")
    assert not any(rows_of(config).values())
    train(config)
    assert not (config.folder / "evals").exists()


def test_a_prompt_that_is_too_long_is_refused(tiny_config: MakeConfig) -> None:
    config = tiny_config("data.max_prompt_tokens=5")
    with pytest.raises(ConfigError, match=r"data\.max_prompt_tokens: the prompt of problem .* 6 "):
        load_benchmarks(config, load_tokenizer(config.model.path))


# ------------------------------------------------------------------------------------- the numbers


def graded(verdicts: dict[str, list[list[float]]]) -> Rows:
    rows: Rows = {"benchmark": [], "problem_id": [], "sample": [], "exact": [], "symbolic": []}
    for name, table in verdicts.items():
        for problem, samples in enumerate(table):
            for sample, verdict in enumerate(samples):
                rows["benchmark"].append(name)
                rows["problem_id"].append(f"{problem}")
                rows["sample"].append(sample)
                rows["exact"].append(verdict)
                rows["symbolic"].append(1.0)
    return rows


def test_summary_is_the_one_by_hand() -> None:
    rows = graded({"a": [[1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]], "b": [[1, 1, 1, 1], [0] * 4]})
    scores = summarize(rows, verifier="exact")
    assert list(scores) == ["a", "b", "all"]
    a, b, both = scores["a"], scores["b"], scores["all"]
    # Means of the problems: .5 0 .25 and 1 0.
    assert (a.problems, a.samples) == (3, 4)
    assert a.mean == pytest.approx(0.25)
    assert a.standard_error == pytest.approx(0.25 / math.sqrt(3))
    assert a.pass_at_k == pytest.approx(2 / 3)
    assert b.mean == pytest.approx(0.5)
    assert b.standard_error == pytest.approx(math.sqrt(0.5) / math.sqrt(2))
    assert b.pass_at_k == pytest.approx(0.5)
    # Problem 0 of a is not problem 0 of b.
    assert both.problems == 5
    assert both.mean == pytest.approx(0.35)
    assert both.pass_at_k == pytest.approx(0.6)
    assert summarize(rows, verifier="symbolic")["all"].mean == 1.0


def test_summary_does_not_depend_on_the_order_of_the_rows() -> None:
    rows = graded({"a": [[1, 0, 1], [0, 0, 0]], "b": [[1, 1, 1], [0, 1, 0]]})
    order = [7, 2, 11, 0, 5, 9, 1, 10, 3, 8, 4, 6]
    mixed = {name: [column[i] for i in order] for name, column in rows.items()}
    found, expected = summarize(mixed, verifier="exact"), summarize(rows, verifier="exact")
    assert {name: vars(score) for name, score in found.items()} == {
        name: vars(score) for name, score in expected.items()
    }


def test_one_problem_has_no_standard_error() -> None:
    scores = summarize(graded({"a": [[1, 0, 0]]}), verifier="exact")
    assert math.isnan(scores["a"].standard_error)


def test_the_log_holds_the_scores_of_its_rows(tiny_config: MakeConfig) -> None:
    config = tiny_config("method=grpo", "steps=2", "evaluation.every=1", "evaluation.samples=8")
    train(config)
    metrics = read_metrics(config.folder).set_index("step")
    evals = read_evals(config.folder)
    assert metrics["eval/all"].notna().all()
    for (step, name), rows in evals.groupby(["step", "benchmark"]):
        assert metrics.loc[step, f"eval/{name}"] == pytest.approx(rows["exact"].mean())
    assert metrics["eval/add-1"].gt(0).all()


# ------------------------------------------------------------------------------------- the command


def printed(text: str) -> dict[str, dict[str, float]]:
    """verifier -> benchmark -> avg@k, as printed."""
    found: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        words = line.split()
        if line.startswith("verifier: "):
            found[words[1]] = {}
        elif line.startswith("  "):
            found[list(found)[-1]][words[0]] = float(words[2])
    return found


def test_the_command_repeats_what_a_run_has_logged(
    tiny_config: MakeConfig, tiny_arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["method=grpo", "evaluation.samples=8", "steps=2"]
    config = tiny_config(*overrides)
    train(config)
    logged = read_metrics(config.folder).set_index("step").loc[0]
    capsys.readouterr()
    assert main(["eval", *tiny_arguments, *overrides]) == 0
    found = printed(capsys.readouterr().out)
    assert list(found) == ["exact", "normalized", "symbolic"]
    for name in ("add-1", "add-2", "all"):
        assert found["exact"][name] == pytest.approx(logged[f"eval/{name}"], abs=5e-4)
    # Of a checkpoint the policy is taken: at step 0 it is the model that the run began with.
    for path in ("step-00000000", "step-00000000/actor"):
        model = str(config.folder / "checkpoints" / path)
        assert main(["eval", "--model", model, *tiny_arguments, *overrides]) == 0
        assert printed(capsys.readouterr().out) == found


def test_the_command_without_benchmarks_says_so(
    tiny_arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *tiny_arguments, "evaluation.benchmarks=[]"]) == 2
    assert "error: evaluation.benchmarks: is empty" in capsys.readouterr().err


def test_benchmarks_may_come_from_files(tiny_config: MakeConfig, tmp_path: Path) -> None:
    file = tmp_path / "held_out.jsonl"
    file.write_text('{"problem": "1+1=", "answer": "2"}\n{"problem": "2+2=", "answer": "4"}\n')
    rows = rows_of(tiny_config(f"evaluation.benchmarks=[{{source: {file}}}]"))
    assert rows["benchmark"] == ["held_out"] * 4
    assert [name.split(":")[0] for name in rows["problem_id"]] == ["0", "0", "1", "1"]
