import gzip
import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from train.data import (
    DAPO_AFTER,
    DAPO_BEFORE,
    INSTRUCTIONS,
    DataError,
    Place,
    Problem,
    Refusal,
    conflicts,
    duplicates,
    normalize_gold,
    problem_table,
    prompt_key,
    read_problems,
    render_prompt,
    rounded,
    scan_problems,
    sentinels,
    strip_instructions,
    without_duplicates,
)

REPO = Path(__file__).parents[2]
PUBLISHED = REPO.parent / "shared" / "data" / "problems"


def published(name: str) -> str:
    path = PUBLISHED / name
    if not path.exists():
        pytest.skip(f"needs ../shared/data/problems/{name}")
    return str(path)


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def pairs(problems: list[Problem]) -> list[tuple[str, str, str]]:
    return [(p.source_id, p.text, p.gold) for p in problems]


def problem(text: str, gold: str, prompt_id: int = 0) -> Problem:
    return Problem(prompt_id, f"p-{prompt_id}", "d", text, gold, None, None)


@pytest.fixture(autouse=True)
def _unexpected_warnings_are_errors() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=UserWarning, message=".*(golds|rows|difficulty)")
        yield


# --- Published layouts, written here


def test_original_dapo_loses_its_instructions_and_keeps_its_ids(tmp_path: Path) -> None:
    row = {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": f"{DAPO_BEFORE}What is $1+1$?{DAPO_AFTER}"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": "2", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a9b6eb4"},
    }
    path = write_parquet(tmp_path / "dapo-math-17k.parquet", [row, row])
    problems = read_problems(path)
    assert pairs(problems) == [("9a9b6eb4", "What is $1+1$?", "2")] * 2
    assert [p.prompt_id for p in problems] == [0, 1]
    assert {p.dataset for p in problems} == {"dapo-math-17k"}


def test_processed_dapo_takes_its_bare_solution_as_the_gold(tmp_path: Path) -> None:
    full = {
        "prompt": "What is $1+1$?",
        "solution": "2",
        "data_source": "math_dapo",
        "source_prompt": [{"role": "user", "content": f"{DAPO_BEFORE}...{DAPO_AFTER}"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": "2", "style": "rule"},
        "extra_info": {"index": "x1"},
    }
    slim = {"prompt": f"{DAPO_BEFORE}What is $1+2$?{DAPO_AFTER}", "solution": "3"}
    assert pairs(read_problems(write_parquet(tmp_path / "full.parquet", [full]))) == [
        ("x1", "What is $1+1$?", "2")
    ]
    assert pairs(read_problems(write_parquet(tmp_path / "slim.parquet", [slim]))) == [
        ("slim-0", "What is $1+2$?", "3")
    ]


@pytest.mark.parametrize(
    "row",
    [
        {"id": 60, "problem": "P", "solution": "so \\boxed{33}", "answer": "033", "year": "2024"},
        {"ID": "60", "Problem": "P", "Solution": "long", "Answer": 33},
        {"id": "60", "question": "P", "answer": "33"},
        {"problem": "P", "answer": 33.0, "id": 60, "url": "u"},
        {"problem": "P", "answer": "33", "unique_id": "60", "level": 5, "subject": "Algebra"},
        {"problem": "P", "solution": "\\boxed{1} so \\boxed{33}.", "level": "Level 5", "id": 60},
        {"question": "P", "answer": "3 * 11 = <<3*11=33>>33\n#### 33", "id": 60},
        {"problem": "P", "answer": "33", "source": "s", "id": "60"},
        {"prompt": [{"role": "user", "content": "P"}], "answer": "\\boxed{33}", "id": 60},
        {
            "prompt": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "P Let's think step by step and output the final "
                 "answer within \\boxed{}."},
            ],
            "reward_model": {"ground_truth": "33"},
            "extra_info": {"index": 60, "split": "test"},
        },
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "jsonl.gz"])
def test_every_layout_in_every_file_kind_gives_the_same_problem(
    tmp_path: Path, row: dict[str, Any], kind: str
) -> None:
    path = tmp_path / f"bench.v1.{kind}"
    if kind == "parquet":
        write_parquet(path, [row])
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(json.dumps(row).encode()))
    elif kind == "json":
        path.write_text(json.dumps([row], indent=1))
    else:
        write_jsonl(path, [row])
    [read] = read_problems(str(path))
    assert (read.source_id, read.text, read.gold, read.dataset) == ("60", "P", "33", "bench.v1")
    assert read.level == (5 if "level" in row else None)


def test_gsm8k_golds_lose_their_thousands_commas(tmp_path: Path) -> None:
    rows = [
        {"question": "Q", "answer": "She pays 2,000.\n#### 1,234"},
        {"question": "R", "answer": "\\frac{1}{2}"},
    ]
    assert read_problems(write_jsonl(tmp_path / "g.jsonl", rows))[0].gold == "1234"


def test_commas_go_only_where_all_golds_are_plain_numbers(tmp_path: Path) -> None:
    numbers = [{"problem": "a", "answer": "1,080"}, {"problem": "b", "answer": "-2.50"}]
    latex = [{"problem": "a", "answer": "1,080"}, {"problem": "b", "answer": "\\frac{1}{2}"}]
    lists = [{"problem": "a", "answer": "1,080"}, {"problem": "b", "answer": "1,2"}]
    golds = {
        name: [p.gold for p in read_problems(write_jsonl(tmp_path / f"{name}.jsonl", rows))]
        for name, rows in (("numbers", numbers), ("latex", latex), ("lists", lists))
    }
    assert golds == {
        "numbers": ["1080", "-2.50"],
        "latex": ["1,080", "\\frac{1}{2}"],
        "lists": ["1,080", "1,2"],
    }


def test_json_lines_may_be_called_json_and_start_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(
        '\ufeff{"problem": "一", "answer": 1}\n\n{"problem": "二", "answer": 2}\n', "utf-8"
    )
    assert [(p.text, p.gold) for p in read_problems(str(path))] == [("一", "1"), ("二", "2")]


def test_name_replaces_the_name_of_the_file(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"problem": "P", "answer": "1"}])
    [read] = read_problems(path, name="mine")
    assert (read.dataset, read.source_id) == ("mine", "mine-0")


# --- Golds


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("27.0", "27"),
        (27.0, "27"),
        (Decimal("27.0"), "27"),
        ("48.00", "48"),
        ("5.", "5"),
        (10.5, "10.5"),
        ("10.5", "10.5"),
        ("033", "33"),
        ("-007", "-7"),
        ("+5", "5"),
        ("000", "0"),
        ("-0.0", "0"),
        (-0.0, "0"),
        (7, "7"),
        (1e-7, "0.0000001"),
        (105263157894736842, "105263157894736842"),
        ("9" * 5000, "9" * 5000),
        ("  \\frac{1}{2}\n", "\\frac{1}{2}"),
        ("10,\\!080", "10,\\!080"),
        ("\\$32,\\!348", "\\$32,\\!348"),
        ("1010_2", "1010_2"),
        ("0.50", "0.50"),
        ("٣", "٣"),
        ("\\text{None}", "\\text{None}"),
    ],
)
def test_golds_are_normalised(answer: object, gold: str) -> None:
    assert normalize_gold(answer) == gold


@given(st.integers(), st.integers(0, 4), st.integers(0, 3))
def test_a_whole_number_has_one_form_however_it_is_padded(n: int, zeros: int, noughts: int) -> None:
    padded = (
        ("-" if n < 0 else "") + "0" * zeros + str(abs(n)) + ("." + "0" * noughts) * (noughts > 0)
    )
    assert normalize_gold(padded) == normalize_gold(n) == str(n)


@given(st.one_of(st.text(), st.floats(-(2.0**53), 2.0**53), st.integers()))
def test_normalising_twice_changes_nothing(answer: object) -> None:
    try:
        gold = normalize_gold(answer)
    except DataError:
        return
    assert normalize_gold(gold) == gold
    if isinstance(answer, float):
        assert float(gold) == answer


def test_fractions_in_json_keep_every_digit(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"problem": "pi", "answer": 3.14159265358979323846}\n')
    assert read_problems(str(path))[0].gold == "3.14159265358979323846"


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (None, "field 'answer' is null"),
        ("", "field 'answer' is empty"),
        (" \n", "field 'answer' is empty"),
        ("None", "field 'answer' is 'None', which stands for a missing answer"),
        (float("nan"), "field 'answer' is NaN, not a finite number"),
        (float("inf"), "field 'answer' is Infinity, not a finite number"),
        (105263157894736848.0, "beyond 2^53, where digits are lost; write the answer as a string"),
        (True, r"field 'answer' is a bool \(True\), not text or a number"),
        (["1", "2"], "field 'answer' is a list"),
        ("see \\boxed{1", "field 'answer' is a text without a closing"),
    ],
)
def test_bad_answers_are_refused_by_file_line_and_field(
    tmp_path: Path, answer: object, complaint: str
) -> None:
    rows = [{"problem": "P", "answer": "1"}, {"problem": "Q", "answer": answer}]
    path = write_jsonl(tmp_path / "bad.jsonl", rows)
    with pytest.raises(DataError, match=complaint.replace("^", r"\^")) as caught:
        read_problems(path)
    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert str(caught.value).endswith("on_bad='skip'")
    with pytest.warns(UserWarning, match="1 of 2 rows left out, the first at line 2: 1 x field"):
        assert [p.text for p in read_problems(path, on_bad="skip")] == ["P"]


def test_a_damaged_float_in_parquet_is_refused(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", [{"problem": "P", "answer": 105263157894736842.0}])
    with pytest.raises(DataError, match=r"x.parquet, row 1: field 'answer' is the float 1.05"):
        read_problems(path)


def test_rounded_finds_golds_that_went_through_a_float() -> None:
    golds = [
        "105263157894736848",
        "105263157894736842",
        "9007199254740992",
        "2" + "0" * 22,
        "9" * 400,
    ]
    found = rounded([problem("P", gold, i) for i, gold in enumerate(golds)])
    assert [p.gold for p in found] == ["105263157894736848", "2" + "0" * 22]


def test_sentinels_are_the_impossible_minus_ones_only() -> None:
    positive = "where $p$ and $q$ are relatively prime positive integers. "
    found = sentinels(
        [
            problem(positive + "Find $p+q$.", "-1", 0),
            problem(positive + "Find $p + q.$", "25", 1),
            problem(positive + "Find $p-q$.", "-1", 2),
            problem("If $x^2+x+1=0$, find $x+y$.", "-1", 3),
        ]
    )
    assert [p.prompt_id for p in found] == [0]


# --- Bad rows and files


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"answer": "1"}', "no field 'problem', 'question' or 'prompt'; the fields are answer"),
        ('{"problem": null, "answer": "1"}', "field 'problem' is null, not the text"),
        ('{"problem": " ", "answer": "1"}', "field 'problem' has no text"),
        ('{"problem": 3, "answer": "1"}', "field 'problem' is a int, not the text"),
        ('{"prompt": [], "answer": "1"}', "'prompt' is not a chat with exactly one user message"),
        (
            '{"prompt": [{"role": "user", "content": "a"}, {"role": "user"}], "answer": "1"}',
            "field 'prompt' is not a chat with exactly one user message",
        ),
        ('{"problem": "P"}', "no field 'answer', 'solution' or 'reward_model.ground_truth'"),
        ('{"problem": "P", "solution": "It is plainly 3."}', "'solution' is a text without a clos"),
        (
            '{"prompt": "P", "reward_model": {"ground_truth": null}, "answer": "1"}',
            "field 'reward_model.ground_truth' is null",
        ),
        ('{"problem": "P", "answ', "not valid JSON"),
        ('{"problem": "P", "answer": ' + "9" * 5000 + "}", "not valid JSON"),
        ('["P", "1"]', "a row must be an object with named fields, not a list"),
    ],
)
def test_bad_rows_are_refused_by_name_and_can_be_skipped(
    tmp_path: Path, line: str, complaint: str
) -> None:
    path = tmp_path / "bad.jsonl"
    good = '{"problem": "P", "answer": "1"}\n'
    path.write_text(good + "\n" + line + "\n" + good)
    with pytest.raises(DataError) as caught:
        read_problems(str(path))
    assert str(caught.value).startswith(f"{path}, line 3: ")
    assert complaint in str(caught.value)
    with pytest.warns(UserWarning, match="1 of 3 rows left out, the first at line 3"):
        problems = read_problems(str(path), on_bad="skip")
    assert [p.prompt_id for p in problems] == [0, 1]
    assert [p.source_id for p in problems] == ["bad-0", "bad-2"]  # the row's place, not the count


def test_scanning_gives_every_row_its_problem_or_the_field_at_fault(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(
        '{"problem": "P", "answer": "1"}\n\n{"problem": "Q"}\n{"problem": " ", "answer": 1}\n'
        '{"prompt": "Q", "reward_model": {"ground_truth": ""}}\n{"a\n'
    )
    (place, read), *refused = scan_problems(str(path), name="mine")
    assert str(place) == "line 1"
    assert isinstance(read, Problem)
    assert (read.text, read.gold, read.dataset) == ("P", "1", "mine")
    assert [place for place, _ in refused] == [Place("line", n) for n in (3, 4, 5, 6)]
    refusals = [refusal for _, refusal in refused if isinstance(refusal, Refusal)]
    assert [r.field for r in refusals] == ["answer", "problem", "reward_model.ground_truth", None]
    assert refusals[1].reason == "field 'problem' has no text"
    with pytest.raises(DataError, match=r"x.jsonl, line 3: no field 'answer'") as caught:
        read_problems(str(path))
    assert caught.value.field == "answer"


def test_limit_does_not_hide_a_bad_row(tmp_path: Path) -> None:
    rows = [{"problem": "P", "answer": "1"}, {"problem": "Q", "answer": None}]
    with pytest.raises(DataError, match="line 2"):
        read_problems(write_jsonl(tmp_path / "x.jsonl", rows), limit=1)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("x.parquet", b"not parquet", "cannot be read as parquet"),
        ("x.jsonl.gz", b"not gzip", "cannot be read"),
        (
            "x.jsonl.gz",
            gzip.compress(b'{"problem": "P", "answer": "1"}\n' * 99)[:-9],
            "cannot be r",
        ),
        ("x.jsonl", b'{"problem": "\xff"}', "cannot be read"),
        ("x.json", b'[{"problem": "P"', "starts as a JSON list but is not one"),
        ("x.jsonl", b"\n", "has no rows"),
        ("x.json", b"[]", "has no rows"),
        ("x.csv", b"problem,answer", "is not a file of a known kind; known are .parquet, .jsonl"),
    ],
)
def test_unreadable_files_are_refused_by_name(
    tmp_path: Path, name: str, content: bytes, complaint: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_problems(str(path))
    assert str(path) in str(caught.value)
    assert complaint in str(caught.value)


def test_a_source_with_bad_rows_only_is_refused_even_when_skipping(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": "P"}])
    with (
        pytest.raises(DataError, match="has no usable row"),
        pytest.warns(UserWarning, match="1 of 1 rows left out"),
    ):
        read_problems(path, on_bad="skip")


@pytest.mark.parametrize(
    "source", ["missing.jsonl", "./org/name", "a/b/c", "gone", "org/x.parquet", "a/b:"]
)
def test_what_is_neither_on_disk_nor_a_hub_id_is_refused(source: str) -> None:
    with pytest.raises(DataError, match=f"{source} does not exist; give a file"):
        read_problems(source)


def test_a_file_has_no_config(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"problem": "P", "answer": "1"}])
    with pytest.raises(DataError, match=r"x.jsonl:main does not exist"):
        read_problems(f"{path}:main")


def test_arguments_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="limit must be at least 1"):
        read_problems("org/name", limit=0)
    with pytest.raises(ValueError, match="on_bad must be 'error' or 'skip', not 'ignore'"):
        read_problems("org/name", on_bad="ignore")  # type: ignore[arg-type]


# --- Folders and the hub


@pytest.fixture
def _own_datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.usefixtures("_own_datasets_cache")
def test_a_folder_is_read_by_split_like_a_hub_data_set(tmp_path: Path) -> None:
    folder = tmp_path / "AIME"
    rows = [{"ID": f"a{i}", "Problem": f"P{i}", "Answer": i} for i in range(3)]
    write_parquet(folder / "data" / "train-00000-of-00002.parquet", rows[:1])
    write_parquet(folder / "data" / "train-00001-of-00002.parquet", rows[1:2])
    write_parquet(folder / "data" / "test-00000-of-00001.parquet", rows[2:])
    train = read_problems(str(folder))
    assert pairs(train) == [("a0", "P0", "0"), ("a1", "P1", "1")]
    assert {p.dataset for p in train} == {"AIME"}
    assert pairs(read_problems(str(folder), split="test")) == [("a2", "P2", "2")]
    with pytest.raises(DataError, match=r"AIME cannot be read .* split 'validation': .*test"):
        read_problems(str(folder), split="validation")


@pytest.mark.usefixtures("_own_datasets_cache")
def test_a_config_of_a_folder_is_chosen_after_a_colon(tmp_path: Path) -> None:
    folder = tmp_path / "Processed"
    for config in ("en", "cn"):
        row = {"prompt": f"P in {config}", "solution": "3", "extra_info": {"index": config}}
        write_parquet(folder / config / "train-00000-of-00001.parquet", [row])
    configs = [
        {"config_name": config, "data_files": f"{config}/train-*"} for config in ("en", "cn")
    ]
    (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    [read] = read_problems(f"{folder}:cn")
    assert (read.source_id, read.text, read.dataset) == ("cn", "P in cn", "Processed")
    with pytest.raises(DataError, match=r"Processed cannot be read .*en.*cn"):
        read_problems(str(folder))


@pytest.mark.usefixtures("_own_datasets_cache")
def test_a_folder_of_json_floats_gives_whole_golds(tmp_path: Path) -> None:
    (tmp_path / "amc").mkdir()
    rows = [{"question": "P", "answer": 27.0, "id": 0}, {"question": "Q", "answer": 1.5, "id": 1}]
    write_jsonl(tmp_path / "amc" / "test.jsonl", rows)
    assert [p.gold for p in read_problems(str(tmp_path / "amc"), split="test")] == ["27", "1.5"]


@pytest.mark.usefixtures("_own_datasets_cache")
def test_an_empty_folder_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty cannot be read as a data set with split 'train'"):
        read_problems(str(tmp_path / "empty"))


def test_a_hub_id_out_of_reach_is_one_error_that_names_it(tmp_path: Path) -> None:
    # A process of its own, since the hub client reads its settings once.
    code = "from train.data import read_problems; read_problems('nobody/no-such-set:main')"
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, env=env, capture_output=True, text=True
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("train.data.DataError: nobody/no-such-set:main cannot be read")
    assert "split 'train'" in last


# --- Level and difficulty


@pytest.mark.parametrize(
    ("level", "expected"),
    [("Level 5", 5), ("Level ?", None), (3, 3), (4.0, 4), ("2", 2), ("hard", None), (True, None)],
)
def test_levels(tmp_path: Path, level: object, expected: int | None) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"problem": "P", "answer": "1", "level": level}])
    assert read_problems(path)[0].level == expected


@pytest.mark.parametrize(
    ("column", "difficulties", "levels"),
    [
        ([0.25, 1, None], [0.25, 1.0, None], [None, None, None]),
        ([0.78125, 99.21875, None], [0.0078125, 0.9921875, None], [None, None, None]),
        ([5.0, 0.0, None], [None, None, None], [5, None, None]),
    ],
)
def test_the_scale_of_difficulty_is_told_from_the_whole_column(
    tmp_path: Path, column: list[float | None], difficulties: list[Any], levels: list[Any]
) -> None:
    rows = [{"problem": f"P{i}", "answer": "1", "difficulty": d} for i, d in enumerate(column)]
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    problems = read_problems(path)
    assert [p.difficulty for p in problems] == difficulties
    assert [p.level for p in problems] == levels
    assert read_problems(path, limit=1) == problems[:1]


@pytest.mark.parametrize("column", [[1.5, 9.0], ["hard", 0.5], [-1, 0.5], [0.5, 101], [True, 0.5]])
def test_difficulties_of_unknown_scale_are_left_out_with_a_warning(
    tmp_path: Path, column: list[Any]
) -> None:
    rows = [{"problem": f"P{i}", "answer": "1", "difficulty": d} for i, d in enumerate(column)]
    with pytest.warns(UserWarning, match="'difficulty' is left out, since its scale is unknown"):
        problems = read_problems(write_jsonl(tmp_path / "x.jsonl", rows))
    assert [p.difficulty for p in problems] == [None, None]


# --- Duplicates


def test_deduplicate_keeps_the_first_and_drops_prompts_whose_golds_disagree(tmp_path: Path) -> None:
    rows = [
        {"problem": "a  b", "answer": "07", "id": 1},
        {"problem": "c", "answer": "1", "id": 2},
        {"problem": " a\nb", "answer": 7.0, "id": 3},
        {"problem": "c", "answer": "2", "id": 4},
        {"problem": "d", "answer": "3", "id": 5},
    ]
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    assert len(read_problems(path)) == 5
    with pytest.warns(
        UserWarning, match="2 rows repeat .* 1 prompts whose golds .* 2 problems rem"
    ):
        problems = read_problems(path, deduplicate=True)
    assert [(p.prompt_id, p.source_id) for p in problems] == [(0, "1"), (1, "5")]


@given(st.lists(st.tuples(st.sampled_from(["a", "a ", "b", "b\tc", "b c"]), st.sampled_from("12"))))
def test_deduplication_agrees_with_its_definition(rows: list[tuple[str, str]]) -> None:
    problems = [problem(text, gold, i) for i, (text, gold) in enumerate(rows)]
    golds: dict[str, set[str]] = {}
    for p in problems:
        golds.setdefault(prompt_key(p.text), set()).add(p.gold)
    kept = without_duplicates(problems)
    assert duplicates(kept) == conflicts(kept) == []
    assert {prompt_key(p.text) for p in kept} == {k for k, g in golds.items() if len(g) == 1}
    assert len(conflicts(problems)) == sum(len(g) > 1 for g in golds.values())
    assert len(duplicates(problems)) == len(problems) - len(golds)
    for p in kept:
        assert all(prompt_key(q.text) != prompt_key(p.text) for q in problems[: p.prompt_id])


def test_problem_table_has_the_run_logs_columns() -> None:
    table = problem_table([problem("P", "1", 0), problem("Q", "2", 1)])
    assert list(table) == [
        "prompt_id", "source_id", "dataset", "text", "gold", "level", "difficulty"
    ]  # fmt: skip
    assert table["prompt_id"] == [0, 1]
    assert table["gold"] == ["1", "2"]
    graded = replace(problem("P", "1", 0), level=5)
    assert problem_table([graded, replace(graded, level=None)])["level"] == ["5", None]
    assert list(problem_table([])) == list(table)


# --- Prompts

CHAT = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def character_tokenizer(*, chat: bool = True, closes: bool = False) -> PreTrainedTokenizerFast:
    """One token a character, `^` before every text and, if asked, `~` after it."""
    vocabulary = {chr(code): code - 31 for code in range(32, 127)} | {"[unk]": 0, "\n": 96}
    inner = Tokenizer(WordLevel(vocabulary, unk_token="[unk]"))
    inner.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    inner.post_processor = TemplateProcessing(
        single="^ $A ~" if closes else "^ $A",
        special_tokens=[("^", vocabulary["^"]), ("~", vocabulary["~"])],
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="^", eos_token="~", unk_token="[unk]"
    )
    tokenizer.chat_template = CHAT if chat else None
    return tokenizer


def rendered(text: str, template: str, **tokenizer: bool) -> str:
    made = character_tokenizer(**tokenizer)
    ids = render_prompt(text, template=template, tokenizer=made)
    assert isinstance(ids, list)
    assert all(type(token) is int for token in ids)
    return "".join(made.convert_ids_to_tokens(ids))


LATEX = r"Find $\frac{a}{b}$ in {x} {0} {problem}"
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@pytest.mark.parametrize(
    ("template", "with_chat", "without_chat"),
    [
        ("none", f"^{LATEX}", f"^{LATEX}"),
        ("chat", f"^[user]{LATEX}[end][assistant]", None),
        (
            "dapo",
            f"^[user]{DAPO_BEFORE}{LATEX}{DAPO_AFTER}[end][assistant]",
            f"^{DAPO_BEFORE}{LATEX}{DAPO_AFTER}",
        ),
        ("boxed", f"^[user]{LATEX}{BOXED}[end][assistant]", f"^{LATEX}{BOXED}"),
        ("Q: {problem} {A}: \\boxed{", *[f"^Q: {LATEX} {{A}}: \\boxed{{"] * 2),
    ],
)
def test_templates_take_braces_literally(
    template: str, with_chat: str, without_chat: str | None
) -> None:
    assert rendered(LATEX, template) == with_chat
    if without_chat is not None:
        assert rendered(LATEX, template, chat=False) == without_chat


def test_dapo_applied_to_dapos_own_file_repeats_no_instruction(tmp_path: Path) -> None:
    published_prompt = f"{DAPO_BEFORE}What is $1+1$?{DAPO_AFTER}"
    path = write_jsonl(tmp_path / "x.jsonl", [{"prompt": published_prompt, "solution": "2"}])
    [read] = read_problems(path)
    assert rendered(read.text, "dapo", chat=False) == "^" + published_prompt


@pytest.mark.parametrize(("before", "after"), INSTRUCTIONS)
def test_known_instructions_are_stripped_and_nothing_else(before: str, after: str) -> None:
    assert strip_instructions(f"{before} Let $x=1$.\n{after}\n") == "Let $x=1$."
    assert (
        strip_instructions(f"See {before} below {after} here") == f"See {before} below {after} here"
    )


def test_a_text_of_ones_own_that_begins_with_the_first_token_does_not_get_two() -> None:
    assert rendered("P", "^[Q]{problem}[A]") == "^[Q]P[A]"


def test_a_prompt_is_left_open_by_tokenizers_that_close_every_text() -> None:
    assert rendered("P", "none", closes=True) == "^P"
    assert rendered("P", "{problem}~", closes=True) == "^P~"


def test_chat_without_a_chat_template_is_refused() -> None:
    with pytest.raises(ValueError, match="template 'chat' needs a chat template"):
        rendered("P", "chat", chat=False)


def test_an_unknown_template_is_refused() -> None:
    with pytest.raises(ValueError, match="'boxd' is neither one of none, chat, dapo, boxed nor"):
        rendered("P", "boxd")


# --- The published files themselves


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("aime24", 30),
        ("aime25", 30),
        ("amc23", 40),
        ("amc24", 45),
        ("math500", 500),
        ("gsm8k_train", 7473),
        ("gsm8k_test", 1319),
    ],
)
def test_published_benchmarks_are_read_whole_and_without_warning(name: str, rows: int) -> None:
    problems = read_problems(published(f"{name}.jsonl"))
    assert [p.prompt_id for p in problems] == list(range(rows))
    assert duplicates(problems) == []
    if name[:4] in ("aime", "gsm8") or name == "amc23":
        assert all(p.gold == str(int(p.gold)) for p in problems)


def test_published_aime24_has_seven_golds_with_leading_zeros() -> None:
    path = Path(published("aime24.jsonl"))
    answers = [json.loads(line)["answer"] for line in path.read_text("utf-8").splitlines()]
    golds = [p.gold for p in read_problems(str(path))]
    changed = [(a, g) for a, g in zip(answers, golds, strict=True) if a != g]
    assert len(changed) == 7
    assert ("033", "33") in changed


def test_published_gsm8k_loses_its_commas() -> None:
    path = Path(published("gsm8k_test.jsonl"))
    answers = [json.loads(line)["answer"] for line in path.read_text("utf-8").splitlines()]
    golds = [p.gold for p in read_problems(str(path))]
    assert golds == [answer.replace(",", "") for answer in answers]
    assert golds != answers


def test_published_math500_keeps_every_gold_as_it_is() -> None:
    path = Path(published("math500.jsonl"))
    answers = [json.loads(line)["answer"] for line in path.read_text("utf-8").splitlines()]
    problems = read_problems(str(path))
    assert [p.gold for p in problems] == answers
    assert {p.level for p in problems} == {1, 2, 3, 4, 5}


def test_published_dapo_counts() -> None:
    path = published("dapo_math_17k.jsonl")
    with pytest.warns(UserWarning, match="golds") as caught:
        problems = read_problems(path)
    messages = [str(w.message) for w in caught]
    assert "5 golds are whole numbers beyond 2^53" in messages[0]
    assert "4 golds are -1 where only a positive number can be right" in messages[1]
    assert len(problems) == 17_917
    assert len(duplicates(problems)) == 729
    assert {p.source_id for p in sentinels(problems)} == {
        "dapo-5785", "dapo-5885", "dapo-5915", "dapo-5937"
    }  # fmt: skip
    known = json.loads((PUBLISHED / "dapo_conflicts.json").read_text("utf-8"))
    groups = conflicts(problems)
    assert len(groups) == len(known) == 12
    assert {frozenset((p.source_id, p.gold) for p in group) for group in groups} == {
        frozenset((source_id, gold) for source_id, gold in group) for _, group in known
    }
    assert not any("Answer: \\boxed{<final_answer>}" in p.text for p in problems)
    with pytest.warns(UserWarning, match="golds") as caught:
        kept = read_problems(path, deduplicate=True)
    assert "729 rows repeat an earlier prompt" in str(caught[0].message)
    assert "all rows of 12 prompts whose golds disagree" in str(caught[0].message)
    assert [p.prompt_id for p in kept] == list(range(17_917 - 729 - 12))


def test_published_math_train_has_four_missing_answers() -> None:
    path = published("math_train.jsonl")
    with pytest.raises(DataError, match=r"math_train.jsonl, line 887: field 'answer' is null"):
        read_problems(path)
    with pytest.warns(UserWarning, match="4 of 7474 rows left out, .*: 2 x .* null; 2 x .* empty"):
        problems = read_problems(path, on_bad="skip")
    assert len(problems) == 7470
    assert {p.level for p in problems} == {1, 2, 3, 4, 5, None}


def test_published_difficulties_are_failure_rates() -> None:
    path = published("deepscaler_difficulty_10k.jsonl")
    with pytest.warns(UserWarning, match="1 golds are whole numbers beyond"):
        problems = read_problems(path)
    rates = [p.difficulty for p in problems if p.difficulty is not None]
    assert len(rates) == len(problems) == 10_000
    assert (min(rates), max(rates)) == (0.0, 0.9921875)
    assert all((rate * 128).is_integer() for rate in rates)
    assert len(duplicates(problems)) == 2402
    assert not any("Let's think step by step and output" in p.text for p in problems)
