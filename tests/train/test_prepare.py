import json
import resource
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.config import Dataset
from train.data import (
    DAPO_AFTER,
    DAPO_BEFORE,
    DataError,
    Place,
    Problem,
    Refusal,
    prompt_key,
    read_problems,
    rounded,
    sentinels,
)
from train.prepare import NEAR, Audit, clean, collect, overlaps, prepare, words_of

CONTESTS = ("aime24", "aime25", "amc23", "amc24")
PUBLISHED = Path(__file__).parents[3] / "shared" / "data" / "problems"

ROUNDED = "105263157894736848"
IMPOSSIBLE = "For relatively prime positive integers $p$ and $q$ with $p/q = 0.75$, find $p+q$."

QUESTION = (
    "A gardener plants tulips in nine rows of eleven and roses in seven rows of thirteen. "
    "What part of all her flowers are tulips?"
)
FORM = " The final answer can be written as $m/n$ in lowest terms. What is $m+n$?"


def problem(text: str, gold: str = "1", prompt_id: int = 0) -> Problem:
    return Problem(prompt_id, f"p-{prompt_id}", "d", text, gold, None, None)


def problems_of(*texts: str) -> list[Problem]:
    return [problem(text, prompt_id=i) for i, text in enumerate(texts)]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Dataset:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return Dataset(source=str(path))


def content(problems: list[Problem]) -> list[tuple[Any, ...]]:
    return [(p.source_id, p.text, p.gold, p.level, p.difficulty) for p in problems]


def audited(rows: list[Problem | Refusal], *, keep_doubtful: bool = False) -> Audit:
    """The audit of rows that stand in every second line, without files."""
    found = ((Place("line", 2 * i + 1), row) for i, row in enumerate(rows))
    reading = collect("x.jsonl", found, merge_equal=True)
    cleaned = clean(reading.problems, keep_doubtful=keep_doubtful)
    return Audit(reading, cleaned, [], NEAR, keep_doubtful)


# --- Cleaning

ROWS = st.lists(
    st.one_of(
        st.just(Refusal("answer", "field 'answer' is null")),
        st.builds(
            problem,
            st.sampled_from(["a b", "a  b", "A b.", "c", IMPOSSIBLE, f" {IMPOSSIBLE}"]),
            st.sampled_from(["-1", "7", "1,000", "1000", ROUNDED]),
        ),
    ),
    max_size=25,
)


@given(ROWS, st.booleans())
def test_every_row_ends_in_one_place_and_the_counts_add_up(
    rows: list[Problem | Refusal], keep_doubtful: bool
) -> None:
    audit = audited(rows, keep_doubtful=keep_doubtful)
    assert len(rows) == audit.reading.total
    assert len(rows) == len(audit.cleaned.kept) + sum(audit.left_out.values())

    report = audit.as_json()
    doubtful = [] if keep_doubtful else report["rounded_answers"] + report["sentinel_answers"]
    kept = [audit.reading.at(p)["row"] for p in audit.cleaned.kept]
    ended = [
        *kept,
        *(entry["row"] for entry in report["unusable"]),
        *(row for entry in report["repeated_rows"] for row in entry["repeats"]),
        *(entry["row"] for entry in doubtful),
        *(entry["row"] for group in report["conflicting_answers"] for entry in group),
        *(entry["row"] for entry in report["repeated_prompts"]),
    ]
    assert sorted(ended) == [2 * i + 1 for i in range(len(rows))]
    assert all(entry["first"]["row"] in kept for entry in report["repeated_prompts"])
    assert all(entry["row"] < min(entry["repeats"]) for entry in report["repeated_rows"])


@given(ROWS, st.booleans())
def test_cleaning_agrees_with_a_plain_loop(
    rows: list[Problem | Refusal], keep_doubtful: bool
) -> None:
    audit = audited(rows, keep_doubtful=keep_doubtful)
    problems = audit.reading.problems
    seen: dict[str, str] = {}
    for p in problems:
        doubtful = bool(rounded([p]) or sentinels([p]))
        if doubtful and not keep_doubtful:
            continue
        key = prompt_key(p.text)
        seen[key] = p.gold if seen.get(key, p.gold) == p.gold else "several"
    expected = []
    for p in problems:
        if seen.get(prompt_key(p.text)) == p.gold:
            expected.append(p)
            del seen[prompt_key(p.text)]
    assert audit.cleaned.kept == expected


def test_a_sentinel_does_not_cost_the_row_with_the_right_answer() -> None:
    rows = [problem(IMPOSSIBLE, "-1"), problem(f"{IMPOSSIBLE} ", "7"), problem("c", "-1")]
    audit = audited([*rows])
    assert [(p.text, p.gold) for p in audit.cleaned.kept] == [(f"{IMPOSSIBLE} ", "7"), ("c", "-1")]
    assert audit.left_out["sentinel answer"] == 1
    assert audit.left_out["conflicting answers"] == 0
    assert [p.text for p in audit.cleaned.uncertain] == ["c"]
    kept = audited([*rows], keep_doubtful=True)
    assert [p.text for p in kept.cleaned.kept] == ["c"]
    assert kept.left_out["conflicting answers"] == 2


def test_prompts_that_differ_in_layout_only_are_kept_and_reported() -> None:
    audit = audited([problem(r"Find \(x^{12}\)."), problem("Find $x^{12}$", "2"), problem("x^1")])
    assert len(audit.cleaned.kept) == 3
    assert [[p.gold for p in group] for group in audit.cleaned.restated] == [["1", "2"]]
    assert "1 prompts restate another one" in audit.text()
    assert "1 of these 1 groups have different answers" in audit.text()


def test_texts_with_an_escape_read_twice_are_kept_and_reported() -> None:
    audit = audited([problem("Write it as \frac{m}{n}."), problem("a\tb\r\nc")])
    assert [p.text for p in audit.cleaned.damaged] == ["Write it as \frac{m}{n}."]
    assert len(audit.cleaned.kept) == 2


# --- Words and overlap


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r"Let \( x^{2} \) be.", "let $x^2$ be"),
        (r"\left(\dfrac{a}{b}\right)", r"(\frac a b)"),
        (r"$x \leq 3,\, y\ge 4$", r"\[x\le 3, y\geq4\]"),
        (r"$1, 2, \ldots, n$", r"$1,2,\cdots,n$"),
        (r"costs 40\% less", "costs 40 % less!"[:-1]),
        ("“Ist es so?”", '"ist es so"'),
    ],
)
def test_layout_makes_no_difference(one: str, other: str) -> None:
    assert words_of(one) == words_of(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x^8 - 98", "x^8 + 98"),
        ("2.2 and 3", "2, 2 and 3"),
        ("x^{12}", "x^{1} 2"),
        ("n!", "n"),
        ("|x|", "x"),
        ("求最小值", "求最大值"),
        ("???", "!?"),
        ("$$", "{}"),
    ],
)
def test_what_means_something_makes_a_difference(one: str, other: str) -> None:
    assert words_of(one) != words_of(other)


@given(st.text())
def test_every_text_has_words_and_white_space_is_none_of_them(text: str) -> None:
    words = words_of(text)
    assert words
    assert words_of(f"\n {text}\t") == words
    assert words_of(prompt_key(text)) == words


PIECES = st.lists(st.sampled_from(["a", "b", "c", "$", ".", " "]), max_size=14).map(" ".join)


@given(st.lists(PIECES, max_size=5), st.lists(PIECES, max_size=5), st.sampled_from([0.3, 0.5, 1.0]))
def test_overlaps_agree_with_every_pair_compared(
    trained: list[str], evaluated: list[str], near: float
) -> None:
    def sequences(text: str) -> set[tuple[str, ...]]:
        words = words_of(text)
        return {words[i : i + 5] for i in range(len(words)) if i == 0 or i + 5 <= len(words)}

    expected = set()
    for i, asked in enumerate(evaluated):
        for j, text in enumerate(trained):
            share = len(sequences(asked) & sequences(text)) / len(sequences(asked))
            if prompt_key(asked) == prompt_key(text):
                expected.add((i, j, "exact", 1.0))
            elif words_of(asked) == words_of(text):
                expected.add((i, j, "normalized", 1.0))
            elif share >= near:
                expected.add((i, j, "near", share))
    found = overlaps(problems_of(*trained), problems_of(*evaluated), near=near)
    pairs = [(o.evaluated.prompt_id, o.trained.prompt_id, o.kind, o.share) for o in found]
    assert set(pairs) == expected
    assert len(pairs) == len(expected)
    rank = {"exact": 0, "normalized": 1, "near": 2}
    assert pairs == sorted(pairs, key=lambda p: (p[0], rank[p[2]], -p[3]))


def test_the_kinds_of_a_match_and_whether_answers_agree() -> None:
    other = QUESTION.replace("What part of all her flowers are", "Which share of them all are")
    trained = [
        problem(QUESTION.replace(" ", "\n"), "99", 0),
        problem(QUESTION.upper().replace("NINE", "$NINE$"), "99.0", 1),
        problem(other, "289", 2),
        problem("How many tulips are there in nine rows of eleven?", "99", 3),
    ]
    found = overlaps(trained, [problem(QUESTION, "99")])
    assert [(o.trained.prompt_id, o.kind, o.same_answer) for o in found] == [
        (0, "exact", True),
        (1, "normalized", True),
        (2, "near", False),
    ]
    assert NEAR <= found[2].share < 1


def test_the_sentence_on_the_answer_s_form_does_not_hide_a_match() -> None:
    trained = problems_of(QUESTION + " Give k + l for the fraction k/l.")
    long_form = FORM + " As usual, $m$ and $n$ are whole numbers, and $n$ is more than zero here."
    [found] = overlaps(trained, problems_of(QUESTION + long_form))
    assert (found.kind, found.share) == ("near", 1.0)
    # Nor is it a match of its own.
    assert (
        overlaps(problems_of("How high is the tower?" + FORM), problems_of(QUESTION + FORM)) == []
    )
    # Where hardly more than it is left, it counts like the rest.
    assert (
        overlaps(problems_of("What is x?" + FORM), problems_of("What is y?" + FORM), near=0.99)
        == []
    )


# --- Files


def test_files_of_an_audit(tmp_path: Path) -> None:
    train = write_jsonl(
        tmp_path / "train.jsonl",
        [
            {"problem": QUESTION, "answer": "99", "id": "t1", "level": 3, "difficulty": 0.25},
            {"problem": QUESTION, "answer": 99.0, "id": "t2", "level": 3, "difficulty": 0.25},
            {"problem": f"{QUESTION}\n", "answer": "099", "id": "t3"},
            {"problem": "Q", "answer": ""},
            {"problem": "R", "answer": "1"},
            {"problem": "R", "answer": "2"},
            {"problem": "S", "answer": r"\frac{1}{2}"},
        ],
    )
    asked = write_jsonl(
        tmp_path / "bench.jsonl",
        [
            {"problem": "Something else entirely?", "answer": 27.0, "id": "e1"},
            {"problem": QUESTION, "answer": 99.0, "id": "e2", "level": 5},
            {"problem": "And one more, of its own.", "answer": r"10,\!080", "id": "e3"},
        ],
    )
    output = tmp_path / "a" / "b"
    audit = prepare(train, output=output, evaluation=[asked], unseen=True)
    assert audit.left_out == {
        "unusable": 1,
        "repeated row": 1,
        "rounded answer": 0,
        "sentinel answer": 0,
        "conflicting answers": 2,
        "repeated prompt": 1,
    }
    assert sorted(path.name for path in output.iterdir()) == [
        "bench-unseen.jsonl", "problems.jsonl", "report.json", "report.md"
    ]  # fmt: skip
    assert content(read_problems(str(output / "problems.jsonl"))) == [
        ("t1", QUESTION, "99", 3, 0.25),
        ("train-6", "S", r"\frac{1}{2}", None, None),
    ]
    unseen = read_problems(str(output / "bench-unseen.jsonl"))
    assert [(p.source_id, p.gold) for p in unseen] == [("e1", "27"), ("e3", r"10,\!080")]
    assert (output / "report.md").read_text() == audit.text()
    assert "| bench | 3 | 1 | 1 | 0 | 0 | 1 | 2 |" in audit.text()

    report = json.loads((output / "report.json").read_text())
    assert report["rows"] == {"read": 7, "left_out": audit.left_out, "kept": 2}
    assert report["unusable"] == [
        {"file": train.source, "row": 4, "field": "answer", "reason": "field 'answer' is empty"}
    ]
    assert report["repeated_rows"] == [{"row": 1, "id": "t1", "repeats": [2]}]
    assert report["repeated_prompts"] == [
        {"row": 3, "id": "t3", "first": {"row": 1, "id": "t1"}}
    ]  # fmt: skip
    assert report["conflicting_answers"] == [
        [
            {"row": 5, "id": "train-4", "answer": "1"},
            {"row": 6, "id": "train-5", "answer": "2"},
        ]
    ]
    [bench] = report["evaluation_sets"]
    assert bench["seen"] == [{"row": 2, "id": "e2", "problem_id": "1:e2"}]
    assert bench["unseen"] == 2
    assert bench["overlaps"] == [
        {
            "kind": "exact",
            "share": 1.0,
            "same_answer": True,
            "evaluated": {"row": 2, "id": "e2", "answer": "99"},
            "trained": {"row": 1, "id": "t1", "answer": "99"},
        }
    ]


def test_the_original_dapo_layout_is_held_once_for_each_content(tmp_path: Path) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{DAPO_BEFORE}{text}{DAPO_AFTER}"}],
            "reward_model": {"ground_truth": str(n), "style": "rule"},
            "extra_info": {"index": f"u{n}"},
        }
        for n, text in enumerate(("What is $0+0$?", "What is $0+1$?"))
    ]
    path = tmp_path / "dapo-math-17k.parquet"
    pq.write_table(pa.Table.from_pylist(rows * 100), path)
    audit = prepare(Dataset(source=str(path)), output=tmp_path / "out")
    assert audit.reading.unit == "row"
    assert audit.left_out["repeated row"] == 198
    assert audit.reading.repeats == {1: [*range(3, 200, 2)], 2: [*range(4, 201, 2)]}
    assert content(read_problems(str(tmp_path / "out" / "problems.jsonl"))) == [
        ("u0", "What is $0+0$?", "0", None, None),
        ("u1", "What is $0+1$?", "1", None, None),
    ]


TEXTS = st.text(max_size=12).map(lambda text: f"P {text}") | st.just(f"P \ud800 {DAPO_AFTER}")
GOLDS = st.one_of(
    st.sampled_from(
        ["1,234", "12", "-0.0", r"\boxed{1}", r"\frac12", "#### 3", "x#### 3", ROUNDED]
    ),
    st.text(max_size=6),
    st.floats(),
    st.none(),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(TEXTS, GOLDS, st.none() | st.floats(0, 1)), min_size=1, max_size=6))
def test_what_is_written_reads_as_what_was_audited_or_is_refused_by_name(
    rows: list[tuple[str, Any, float | None]],
) -> None:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        named = [dict(zip(("problem", "answer", "difficulty"), row, strict=True)) for row in rows]
        train = write_jsonl(Path(folder) / "x.jsonl", named)
        output = Path(folder) / "out"
        complaint = None
        try:
            audit = prepare(train, output=output)
        except DataError as error:
            complaint = str(error)
        if complaint is not None:
            assert complaint.startswith(train.source)
            assert not (output / "problems.jsonl").exists()
            return
        again = read_problems(str(output / "problems.jsonl"))
        assert content(again) == content(audit.cleaned.kept)
        json.loads((output / "report.json").read_text(encoding="utf-8"))
        assert not [path for path in output.iterdir() if path.name.startswith(".")]


def test_a_gold_that_would_change_among_fewer_rows_is_refused(tmp_path: Path) -> None:
    # Beside LaTeX, 1,234 may be a list; alone it would be read as a number.
    rows = [{"problem": "P", "answer": "1,234"}, {"problem": QUESTION, "answer": "x"}]
    asked = write_jsonl(tmp_path / "bench.jsonl", rows)
    train = write_jsonl(tmp_path / "train.jsonl", rows[1:])
    with pytest.raises(DataError, match=r"bench.jsonl, line 1: would read differently from bench-"):
        prepare(train, output=tmp_path / "out", evaluation=[asked], unseen=True)
    assert list((tmp_path / "out").iterdir()) == []


def test_no_unseen_file_is_left_where_every_problem_is_seen(tmp_path: Path) -> None:
    asked = write_jsonl(tmp_path / "bench.jsonl", [{"problem": QUESTION, "answer": "1"}])
    other = write_jsonl(tmp_path / "other.jsonl", [{"problem": "P", "answer": "1"}])
    output = tmp_path / "out"
    prepare(other, output=output, evaluation=[asked], unseen=True)
    assert (output / "bench-unseen.jsonl").exists()
    audit = prepare(
        asked.model_copy(update={"name": "t"}), output=output, evaluation=[asked], unseen=True
    )
    assert audit.evaluations[0].unseen == []
    assert not (output / "bench-unseen.jsonl").exists()


def test_unusable_rows_of_an_evaluation_set_are_reported(tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "train.jsonl", [{"problem": "P", "answer": "1"}])
    rows = [{"problem": "Q", "answer": "1"}, {"problem": "R", "answer": None}]
    asked = write_jsonl(tmp_path / "bench.jsonl", rows)
    audit = prepare(train, output=tmp_path / "out", evaluation=[asked])
    assert "1 rows of these sets are unusable, the first in bench, line 2: field" in audit.text()
    [bench] = audit.as_json()["evaluation_sets"]
    assert [(entry["row"], entry["field"]) for entry in bench["unusable"]] == [(2, "answer")]


# --- What is refused


def test_sources_without_problems_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    bad = write_jsonl(tmp_path / "bad.jsonl", [{"problem": "P", "answer": None}] * 2)
    clash = [{"problem": "P", "answer": "1"}, {"problem": "P", "answer": "2"}]
    write_jsonl(tmp_path / "clash.jsonl", clash)
    (tmp_path / "folder").mkdir()
    for name, complaint in {
        "empty.jsonl": "empty.jsonl has no rows",
        "bad.jsonl": "bad.jsonl has no usable row; line 1: field 'answer' is null",
        "clash.jsonl": r"clash.jsonl: no problem is left of 2 rows \(.*2 conflicting answers",
        "folder": "folder cannot be read as a data set with split 'train'",
        "gone.jsonl": "gone.jsonl does not exist",
    }.items():
        with pytest.raises(DataError, match=complaint):
            prepare(Dataset(source=str(tmp_path / name)), output=tmp_path / "out")
    good = write_jsonl(tmp_path / "good.jsonl", clash[:1])
    with pytest.raises(DataError, match=r"bad.jsonl has no usable row") as caught:
        prepare(good, output=tmp_path / "out", evaluation=[bad])
    assert caught.value.field == "answer"
    assert list((tmp_path / "out").iterdir()) == []


def test_an_output_that_is_a_file_or_a_source_is_refused(tmp_path: Path) -> None:
    row = {"problem": "P", "answer": "1"}
    train = write_jsonl(tmp_path / "problems.jsonl", [row])
    unseen = write_jsonl(tmp_path / "x-unseen.jsonl", [row])
    file = tmp_path / "file"
    file.write_text("")
    for output in (file, file / "below"):
        with pytest.raises(DataError, match=f"{output} is no folder: a file stands in its place"):
            prepare(train, output=output)
    with pytest.raises(DataError, match=r"would change the source .*problems.jsonl"):
        prepare(train, output=tmp_path)
    with pytest.raises(DataError, match="would change the source"):
        prepare(Dataset(source=str(tmp_path)), output=tmp_path / "out")
    named = [Dataset(source=unseen.source, name="x")]
    with pytest.raises(DataError, match=r"would change the source .*x-unseen.jsonl"):
        prepare(unseen, output=tmp_path, evaluation=named)
    assert read_problems(train.source)
    (tmp_path / "out" / "problems.jsonl").mkdir(parents=True)
    with pytest.raises(DataError, match=r"out/problems.jsonl cannot be written \(Is a directory\)"):
        prepare(train, output=tmp_path / "out")


def test_evaluation_sets_of_one_name_and_shares_out_of_range_are_refused(tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "train.jsonl", [{"problem": "P", "answer": "1"}])
    with pytest.raises(DataError, match="must have different names without a slash, got train, tr"):
        prepare(train, output=tmp_path / "out", evaluation=[train, train])
    named = [Dataset(source=train.source, name="a/b")]
    with pytest.raises(DataError, match="without a slash, got a/b"):
        prepare(train, output=tmp_path / "out", evaluation=named)
    for near in (0.0, 1.1, float("nan")):
        with pytest.raises(DataError, match="near must be a share above 0 and up to 1"):
            prepare(train, output=tmp_path / "out", near=near)


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """As on a full disk, a write beyond the size fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_the_files_of_before(tmp_path: Path) -> None:
    small = write_jsonl(tmp_path / "small.jsonl", [{"problem": "P", "answer": "1"}])
    rows = [{"problem": f"P {n}", "answer": "1"} for n in range(2000)]
    large = write_jsonl(tmp_path / "large.jsonl", rows)
    output = tmp_path / "out"
    prepare(small, output=output)
    before = {path: path.read_bytes() for path in output.iterdir()}
    with (
        no_file_above(20_000),
        pytest.raises(DataError, match=r"out/problems.jsonl cannot be written \(File too large\)"),
    ):
        prepare(large, output=output)
    assert (output / "problems.jsonl").read_bytes() == before[output / "problems.jsonl"]
    assert {path.name for path in output.iterdir()} == {path.name for path in before}


def test_who_reads_the_file_of_before_reads_it_to_its_end(tmp_path: Path) -> None:
    one = write_jsonl(tmp_path / "one.jsonl", [{"problem": "P", "answer": "1"}])
    two = write_jsonl(tmp_path / "two.jsonl", [{"problem": QUESTION, "answer": "2"}])
    prepare(one, output=tmp_path / "out")
    with (tmp_path / "out" / "problems.jsonl").open() as before:
        prepare(two, output=tmp_path / "out")
        assert json.loads(before.read())["problem"] == "P"
    assert read_problems(str(tmp_path / "out" / "problems.jsonl"))[0].text == QUESTION


# --- The published files themselves


def published(name: str) -> Dataset:
    path = PUBLISHED / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"needs ../shared/data/problems/{name}.jsonl")
    return Dataset(source=str(path))


@pytest.fixture(scope="module")
def dapo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Audit, Path]:
    output = tmp_path_factory.mktemp("dapo")
    asked = [published(name) for name in ("amc23", "math500")]
    train = published("dapo_math_17k")
    return prepare(train, output=output, evaluation=asked, unseen=True), output


def test_published_dapo_is_cleaned_of_its_known_faults(dapo: tuple[Audit, Path]) -> None:
    audit, output = dapo
    assert audit.left_out == {
        "unusable": 0,
        "repeated row": 650,
        "rounded answer": 5,
        "sentinel answer": 4,
        "conflicting answers": 16,
        "repeated prompt": 67,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = read_problems(str(output / "problems.jsonl"))
    # Of 17,917 rows 729 repeat a prompt; 8 prompts have two answers, 5 a rounded one only.
    assert len(kept) == 17_917 - 729 - 8 - 5
    golds = {p.source_id: p.gold for p in kept}
    sentinel_ids = [p.source_id for p in audit.cleaned.sentinels]
    assert sentinel_ids == ["dapo-5785", "dapo-5885", "dapo-5915", "dapo-5937"]
    right = ("dapo-10267", "dapo-9921", "dapo-10714", "dapo-8582")
    assert [golds[source_id] for source_id in right] == ["554", "230", "683", "913"]
    known = json.loads((PUBLISHED / "dapo_conflicts.json").read_text("utf-8"))
    assert {frozenset(p.source_id for p in group) for group in audit.cleaned.conflicts} == {
        frozenset(source_id for source_id, _ in group)
        for _, group in known
        if not {source_id for source_id, _ in group} & {*sentinel_ids}
    }
    assert not any("<final_answer>" in p.text for p in kept)
    assert len(audit.cleaned.damaged) == 643
    assert len(audit.cleaned.uncertain) == 67


def test_published_overlaps_are_found_and_some_that_were_not_known(
    dapo: tuple[Audit, Path],
) -> None:
    audit, _ = dapo
    known = json.loads((PUBLISHED / "contamination.json").read_text("utf-8"))
    new = {}
    for evaluation in audit.evaluations:
        found = {overlap.evaluated.source_id for overlap in evaluation.closest.values()}
        listed = {entry["eval_id"] for entry in known[f"dapo_math_17k vs {evaluation.name}"]}
        assert listed <= found
        new[evaluation.name] = found - listed
    # Three more of AMC 2023's 25, whose long sentences on the answer's form had hidden them.
    assert new["amc23"] == {"2023_AMC_12A-5", "2023_AMC_12B-11", "2023_AMC_12B-17"}
    assert len(new["math500"]) == 29 - 23
    same = {o.evaluated.source_id for o in audit.evaluations[0].overlaps if o.same_answer}
    assert len(same) == 24


def test_published_aime_and_amc_overlaps_do_not_hang_on_the_threshold(
    dapo: tuple[Audit, Path],
) -> None:
    audit, _ = dapo
    sets = {name: read_problems(published(name).source) for name in CONTESTS}
    found = overlaps(audit.cleaned.kept, [p for asked in sets.values() for p in asked], near=0.42)
    shares: dict[tuple[str, str], float] = {}
    for overlap in found:
        asked = (overlap.evaluated.dataset, overlap.evaluated.source_id)
        shares[asked] = max(shares.get(asked, 0.0), overlap.share)
    assert Counter(dataset for dataset, _ in shares) == {"amc23": 28}
    assert min(shares.values()) > 0.67


def test_published_sets_are_written_without_the_overlaps(dapo: tuple[Audit, Path]) -> None:
    audit, output = dapo
    for evaluation in audit.evaluations:
        unseen = read_problems(str(output / f"{evaluation.name}-unseen.jsonl"))
        whole = read_problems(evaluation.reading.source)
        seen = {overlap.evaluated.source_id for overlap in evaluation.overlaps}
        assert content(unseen) == content([p for p in whole if p.source_id not in seen])
        assert len(unseen) + len(seen) == len(whole)
    amc23 = read_problems(str(output / "amc23-unseen.jsonl"))
    assert len(amc23) == 12
    assert all(p.gold == str(int(p.gold)) for p in amc23)


def test_published_math_train_has_four_rows_without_an_answer(tmp_path: Path) -> None:
    audit = prepare(published("math_train"), output=tmp_path)
    refused = audit.as_json()["unusable"]
    assert [entry["field"] for entry in refused] == ["answer"] * 4
    assert Counter(entry["reason"].split()[-1] for entry in refused) == {"null": 2, "empty": 2}
    assert refused[0]["row"] == 887
    assert audit.reading.total == 7474


def test_published_difficulties_survive_cleaning(tmp_path: Path) -> None:
    audit = prepare(published("deepscaler_difficulty_10k"), output=tmp_path)
    left = audit.left_out
    assert left["repeated row"] + left["repeated prompt"] > 2300
    kept = read_problems(str(tmp_path / "problems.jsonl"))
    assert content(kept) == content(audit.cleaned.kept)
    assert all(p.difficulty is not None and 0 <= p.difficulty < 1 for p in kept)
