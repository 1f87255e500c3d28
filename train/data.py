r"""Problems as published, read into one form, and turned into prompts.

A source is a file, a folder or a hub id; its layout is recognised by its fields:

| layout | problem | gold answer | source id |
|---|---|---|---|
| DAPO-Math-17k, verl | `prompt`: messages | `reward_model.ground_truth` | `extra_info.index` |
| its processed release | `prompt`: text | the same, or `solution` | the same |
| AIME, AMC, MATH-500 | `problem` or `question` | `answer` | `id` or `unique_id` |
| MATH | `problem` | last `\boxed{}` of `solution` | the row |
| GSM8K | `question` | what follows `####` in `answer` | the row |
| our own | `problem` | `answer` | `id` |

Upper and lower case of field names are one. `level` and `difficulty` are read where they stand.

What reading changes, so that the exact verifier compares like with like:

- A whole number is written plainly: `033` -> `33`, `27.0` -> `27`, JSON's 27.0 -> `27`. `10.5` and
  every other gold (LaTeX, words, lists, `2^{10}`) stay as they are, white space around them aside.
- Thousands commas go where they can be nothing else: after GSM8K's `####`, and in a source whose
  golds are plain numbers throughout. Among LaTeX golds `1,234` may be a list and stays.
- The instructions that some releases wrap around the problem are removed (`INSTRUCTIONS`), since
  the template adds its own.
"""

import gzip
import json
import math
import re
import sys
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeGuard

from cvpo.reward import extract_answer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DAPO_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'

_CHINESE_AFTER = (
    "\n让我们一步一步地思考。请以“Answer: \\boxed{<final_answer>}”的格式输出最终答案。"
    "如果是选择题，请按顺序输出正确的选项，不带任何标点或空格。"
    "对于其他类型的问题，请只输出最终答案的数值。"
)

# (before, after) the problem, as they stand in DAPO-Math-17k, in verl's MATH and GSM8K files (and
# what derives from them), and in the handful of DAPO's Chinese problems that carry another one.
INSTRUCTIONS = (
    (DAPO_BEFORE, DAPO_AFTER),
    ("", " Let's think step by step and output the final answer within \\boxed{}."),
    ("", ' Let\'s think step by step and output the final answer after "####".'),
    ("", _CHINESE_AFTER),
)

TEMPLATES = {
    "none": "{problem}",
    "chat": "{problem}",
    "dapo": DAPO_BEFORE + "{problem}" + DAPO_AFTER,
    "boxed": "{problem}\nPlease reason step by step, and put your final answer within \\boxed{}.",
}

_PARQUET = (".parquet",)
_JSON = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_WHOLE = re.compile(r"(?P<sign>[+-]?)(?P<digits>[0-9]+)(\.0*)?")
_NUMBER = re.compile(r"[+-]?([0-9]+|[0-9]{1,3}(,[0-9]{3})+)(\.[0-9]*)?")
# A null that was once turned into a string.
_NO_ANSWER = {"none", "null", "nan", "n/a"}
_POSITIVE_LETTERS = re.compile(r"relatively prime|coprime|positive integers|square of any prime")
_ASKS_FOR_SUM = re.compile(
    r"(find|compute|determine|what is)[\s$(\\]*[a-z](\s*\+\s*[a-z])+\W*$", re.I
)
# Above this a float skips integers, so a whole number that passed through one may be another.
_EXACT_FLOATS = 2**53


class DataError(ValueError):
    """A source that cannot be read, or a row of it without a usable problem or gold.

    Attributes:
        field: The row's field that is at fault; None where it is not one.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class Place(NamedTuple):
    """Where a row stands in its source: `line 3` of JSON lines, `item 3` of a list, `row 3`."""

    unit: str
    number: int
    """From 1."""

    def __str__(self) -> str:
        return f"{self.unit} {self.number}"


class Refusal(NamedTuple):
    """Why a row has no usable problem and gold."""

    field: str | None
    """Null where the row as a whole is unusable."""
    reason: str
    """Names the field."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One prompt of a run.

    Attributes:
        prompt_id: Its place in the run's problem table, dense from 0.
        source_id: The source's own id (not always unique there), else `<dataset>-<row from 0>`.
        dataset: The name of the data set.
        text: The problem alone, without instructions.
        gold: The right answer, normalised as the module describes.
        level: The source's grade, 1 (easy) to 5 in MATH; None where it has none.
        difficulty: Measured failure rate in [0, 1], 1 the hardest; None where not measured.
    """

    prompt_id: int
    source_id: str
    dataset: str
    text: str
    gold: str
    level: int | None
    difficulty: float | None


def read_problems(
    source: str,
    *,
    name: str | None = None,
    split: str = "train",
    limit: int | None = None,
    deduplicate: bool = False,
    on_bad: Literal["error", "skip"] = "error",
) -> list[Problem]:
    """Read a source of problems and their gold answers.

    A source is always read to its end, so that neither what a row reads as nor which row is
    refused depends on `limit`.

    Args:
        source: A file (.jsonl, .json, either gzipped, .parquet), a folder that `datasets` can load,
            or a hub id `org/name`. A folder or id may be followed by `:config`. What exists on
            disk wins over the hub.
        name: The data set's name in the problem table; by default that of the file, folder or hub
            data set.
        split: The split of a folder or hub data set; a file has none.
        limit: Return at most this many problems, the first ones.
        deduplicate: Keep the first of the prompts that are equal up to white space, and none of
            those whose golds disagree; a warning gives both counts.
        on_bad: What a row without a usable problem and gold does: raise, or be left out and
            counted in a warning.

    Returns:
        The problems in the source's order, `prompt_id` counting from 0.

    Raises:
        DataError: The source does not exist or cannot be read, has no usable row, or (with
            `on_bad="error"`) has a bad row; the message names source, row and field.
    """
    if on_bad not in ("error", "skip"):
        raise ValueError(f"on_bad must be 'error' or 'skip', not {on_bad!r}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, or None for all problems, not {limit}")
    problems: list[Problem] = []
    bad: list[tuple[Place, Refusal]] = []
    for place, found in scan_problems(source, name=name, split=split):
        if isinstance(found, Problem):
            problems.append(found)
        elif on_bad == "skip":
            bad.append((place, found))
        else:
            raise DataError(
                f"{source}, {place}: {found.reason}; correct the row, or leave such rows out "
                "with on_bad='skip'",
                field=found.field,
            )
    if bad:
        _warn(f"{source}: {_skipped(bad, total=len(bad) + len(problems))}")
    if not problems:
        raise DataError(f"{source} has no {'usable row' if bad else 'rows'}")

    problems, note = normalize_source(problems)
    if note:
        _warn(f"{source}: {note}")
    if deduplicate:
        repeats, disagreeing = duplicates(problems), conflicts(problems)
        problems = without_duplicates(problems)
        if repeats:
            _warn(
                f"{source}: {len(repeats)} rows repeat an earlier prompt and are left out, and so "
                f"are all rows of {len(disagreeing)} prompts whose golds disagree; "
                f"{len(problems)} problems remain"
            )
    _warn_of_doubtful_golds(problems, source)
    return [replace(problem, prompt_id=i) for i, problem in enumerate(problems[:limit])]


def scan_problems(
    source: str, *, name: str | None = None, split: str = "train"
) -> Iterator[tuple[Place, Problem | Refusal]]:
    """Read a source row by row, holding none.

    What only the whole source tells is still open: see `normalize_source`.

    Args:
        source: As in `read_problems`, like the other arguments.
        name: The data set's name.
        split: The split of a folder or hub data set.

    Yields:
        Where the row stands, and its problem or why it has none. `prompt_id` counts rows from 0.

    Raises:
        DataError: The source does not exist or cannot be read.
    """
    default_name, rows = _open(source, split)
    dataset = default_name if name is None else name
    for index, (place, row) in enumerate(rows):
        try:
            yield place, _problem(row, index=index, dataset=dataset)
        except DataError as error:
            yield place, Refusal(error.field, str(error))


def normalize_source(problems: Sequence[Problem]) -> tuple[list[Problem], str | None]:
    """Settle what only a whole source tells: thousands commas, and the scale of difficulties.

    Both depend on which values there are, not on how often, so equal rows may be held once.

    Returns:
        The problems, and what was left out of them, for a warning; None where nothing was.
    """
    return _unit_difficulty(_plain_numbers(problems))


def prompt_key(text: str) -> str:
    """What two prompts that differ in white space only have in common."""
    return " ".join(text.split())


def duplicates(problems: Sequence[Problem]) -> list[Problem]:
    """The problems whose prompt, up to white space, stands earlier in the list."""
    seen: set[str] = set()
    repeated = []
    for problem in problems:
        key = prompt_key(problem.text)
        if key in seen:
            repeated.append(problem)
        seen.add(key)
    return repeated


def conflicts(problems: Sequence[Problem]) -> list[list[Problem]]:
    """The groups of problems with one prompt (up to white space) and more than one gold."""
    groups: dict[str, list[Problem]] = {}
    for problem in problems:
        groups.setdefault(prompt_key(problem.text), []).append(problem)
    return [group for group in groups.values() if len({problem.gold for problem in group}) > 1]


def without_duplicates(problems: Sequence[Problem]) -> list[Problem]:
    """The first problem of each prompt, without the prompts whose golds disagree."""
    done = {prompt_key(group[0].text) for group in conflicts(problems)}
    kept = []
    for problem in problems:
        key = prompt_key(problem.text)
        if key not in done:
            kept.append(problem)
            done.add(key)
    return kept


def rounded(problems: Sequence[Problem]) -> list[Problem]:
    """The problems whose gold is a whole number beyond 2^53 that a float holds exactly.

    DAPO-Math-17k went through floats: `105263157894736842` became `105263157894736848`. A gold
    such as `20000000000000000000000` may be right all the same; a look decides.
    """
    return [
        problem
        for problem in problems
        if _WHOLE.fullmatch(problem.gold)
        and abs(Decimal(problem.gold)) > _EXACT_FLOATS
        and Decimal(float(problem.gold)) == Decimal(problem.gold)
    ]


def sentinels(problems: Sequence[Problem]) -> list[Problem]:
    """The problems whose gold -1 cannot be right and must mean "no answer".

    DAPO-Math-17k writes -1 for both. It is impossible where the problem asks for the sum of letters
    that it has called positive, relatively prime or free of squares; other cases need a look.
    """
    return [
        problem
        for problem in problems
        if problem.gold == "-1"
        and _POSITIVE_LETTERS.search(problem.text)
        and _ASKS_FOR_SUM.search(problem.text)
    ]


def normalize_gold(answer: object) -> str:
    """Write a published answer as the string that the verifiers compare with.

    Args:
        answer: Text, or a number as a parser gave it.

    Raises:
        DataError: The answer is missing, is neither text nor a finite number, or is a float too
            large to have kept its digits.
    """
    if answer is None:
        raise DataError("is null")
    if isinstance(answer, float):
        answer = Decimal(repr(answer))  # the shortest decimal that gives this float
    if isinstance(answer, Decimal):
        if not answer.is_finite():
            raise DataError(f"is {answer}, not a finite number")
        if abs(answer) > _EXACT_FLOATS:
            raise DataError(
                f"is the float {answer}, beyond 2^53, where digits are lost; "
                "write the answer as a string"
            )
        answer = format(answer, "f")
    elif _is_number(answer):
        answer = str(answer)
    if not isinstance(answer, str):
        raise DataError(f"is a {type(answer).__name__} ({answer!r:.60}), not text or a number")
    gold = answer.strip()
    if not gold:
        raise DataError("is empty")
    if gold.lower() in _NO_ANSWER:
        raise DataError(f"is {gold!r}, which stands for a missing answer")
    whole = _WHOLE.fullmatch(gold)
    if whole is None:
        return gold
    digits = whole["digits"].lstrip("0") or "0"
    return "-" + digits if whole["sign"] == "-" and digits != "0" else digits


def strip_instructions(text: str) -> str:
    """Remove the instructions that a release wrapped around the problem, and outer white space."""
    for before, after in INSTRUCTIONS:
        text = text.strip().removeprefix(before.strip()).removesuffix(after.strip())
    return text.strip()


def render_prompt(text: str, *, template: str, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    r"""Turn a problem into the token ids that a response continues.

    Args:
        text: The problem alone.
        template: One of
            "none": the text as it is;
            "chat": the text as the user's turn of the tokenizer's chat template;
            "dapo": with DAPO's instruction to end on a line `Answer: ...`;
            "boxed": with the request to reason step by step and to put the answer in `\boxed{}`
            (these two go through the chat template where the tokenizer has one);
            or a text of your own in which every `{problem}` stands for the problem. It is taken
            as it is: no other brace means anything, and no chat template is put around it.
        tokenizer: The model's tokenizer.

    Returns:
        The prompt's token ids. They never end with the end-of-sequence token that some tokenizers
        add, nor begin with two beginning-of-sequence tokens.

    Raises:
        ValueError: An unknown template, or "chat" and the tokenizer has no chat template.
    """
    if template not in TEMPLATES and "{problem}" not in template:
        raise ValueError(
            f"template {template!r} is neither one of {', '.join(TEMPLATES)} nor a text "
            "that contains {problem}"
        )
    content = TEMPLATES.get(template, template).replace("{problem}", text)
    if template == "chat" and not tokenizer.chat_template:
        raise ValueError(
            f"template 'chat' needs a chat template, and the tokenizer "
            f"{tokenizer.name_or_path!r} has none; use 'none', 'dapo', 'boxed' or a text of your "
            "own that contains {problem}"
        )
    if template in ("chat", "dapo", "boxed") and tokenizer.chat_template:
        messages = [{"role": "user", "content": content}]
        # Without return_dict=False transformers returns a mapping with an attention mask.
        ids: Any = tokenizer.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=True, return_dict=False
        )
        return list(ids)
    return _encode(content, tokenizer)


def problem_table(problems: Sequence[Problem]) -> dict[str, list[Any]]:
    """The columns of the run log's `problems.parquet`, where a level is the source's own label."""
    table: dict[str, list[Any]] = {
        field.name: [getattr(problem, field.name) for problem in problems]
        for field in fields(Problem)
    }
    table["level"] = [None if level is None else str(level) for level in table["level"]]
    return table


def _encode(content: str, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    bos, eos = tokenizer.bos_token, tokenizer.eos_token_id
    plain: list[int] = tokenizer.encode(content, add_special_tokens=False)
    if isinstance(bos, str) and content.startswith(bos):
        return plain
    ids: list[int] = tokenizer.encode(content)
    # A prompt is to be continued, so a closing token that the tokenizer added is taken off.
    return ids[:-1] if ids[-len(plain) - 1 :] == [*plain, eos] else ids


# --- Sources: each gives (the row's place, the row), a row being a mapping or a JSON line.


def _open(source: str, split: str) -> tuple[str, Iterator[tuple[Place, Any]]]:
    """The default name of a source, and its rows."""
    place, config = source, None
    if ":" in source and not Path(source).expanduser().exists():
        place, _, config = source.rpartition(":")
    path = Path(place).expanduser()
    if path.is_dir() and config != "":
        return path.resolve().name, _dataset_rows(str(path), config, split, source)
    suffix = next((s for s in (*_PARQUET, *_JSON) if path.name.lower().endswith(s)), None)
    if path.is_file() and config is None:
        if suffix is None:
            raise DataError(
                f"{source} is not a file of a known kind; known are {', '.join(_PARQUET + _JSON)}"
            )
        rows = _parquet_rows(path) if suffix in _PARQUET else _json_rows(path)
        return path.name[: -len(suffix)], rows
    if suffix or config == "" or place.startswith(".") or not _HUB_ID.fullmatch(place):
        raise DataError(
            f"{source} does not exist; give a file ({', '.join(_PARQUET + _JSON)}), or a folder or "
            "hub id (org/name), where needed with its config (org/name:config)"
        )
    return path.name, _dataset_rows(place, config, split, source)


def _json_rows(path: Path) -> Iterator[tuple[Place, Any]]:
    opener = gzip.open if path.name.lower().endswith(".gz") else open
    try:
        with opener(path, "rt", encoding="utf-8-sig") as file:
            lines = ((Place("line", n), line) for n, line in enumerate(file, 1) if line.strip())
            first = next(lines, None)
            if first is None:
                return
            # JSON lines often go by the name .json, so the first character decides.
            if not first[1].lstrip().startswith("["):
                yield first
                yield from lines
                return
            file.seek(0)
            text = file.read()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    try:
        rows = _parse_json(text)
    except ValueError as error:
        raise DataError(f"{path} starts as a JSON list but is not one: {error}") from None
    yield from ((Place("item", n), row) for n, row in enumerate(rows, 1))


def _parse_json(text: str) -> Any:
    """JSON with its fractions as decimals, which keep every digit written."""
    return json.loads(text, parse_float=Decimal)


def _parquet_rows(path: Path) -> Iterator[tuple[Place, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches(1024) for row in batch.to_pylist())
            for number, row in enumerate(rows, 1):
                yield Place("row", number), row
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read as parquet: {error}") from error


def _dataset_rows(
    path: str, config: str | None, split: str, source: str
) -> Iterator[tuple[Place, Any]]:
    import datasets

    try:
        data = datasets.load_dataset(path, name=config, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"{source} cannot be read as a data set with split {split!r}: {reason}; check the "
            "name, the config (org/name:config), the split and the network, or give a file"
        ) from error
    batches = data.with_format("arrow").iter(1024)
    rows = (row for batch in batches for row in batch.to_pylist())
    yield from ((Place("row", number), row) for number, row in enumerate(rows, 1))


# --- Rows


def _problem(row: Any, *, index: int, dataset: str) -> Problem:
    """Read one row. Its difficulty is still in the source's unit, NaN where not a number."""
    if isinstance(row, str):
        try:
            row = _parse_json(row)
        except ValueError as error:
            raise DataError(f"not valid JSON ({error})") from None
    if not isinstance(row, Mapping):
        raise DataError(f"a row must be an object with named fields, not a {type(row).__name__}")
    row = {str(key).lower(): value for key, value in row.items()}
    # The original DAPO file repeats every row a hundred times: equal strings are held once.
    return Problem(
        prompt_id=index,
        source_id=sys.intern(_source_id(row, default=f"{dataset}-{index}")),
        dataset=dataset,
        text=sys.intern(_text(row)),
        gold=sys.intern(_gold(row)),
        level=_level(row.get("level")),
        difficulty=_difficulty(row.get("difficulty")),
    )


def _text(row: Mapping[str, Any]) -> str:
    field = next((name for name in ("problem", "question", "prompt") if name in row), None)
    if field is None:
        raise DataError(
            "no field 'problem', 'question' or 'prompt'; the fields are " + ", ".join(row),
            field="problem",
        )
    text = row[field]
    if isinstance(text, list):
        text = _user_turn(text, field)
    if not isinstance(text, str):
        found = "null" if text is None else f"a {type(text).__name__}"
        raise DataError(f"field {field!r} is {found}, not the text of a problem", field=field)
    text = strip_instructions(text)
    if not text:
        raise DataError(f"field {field!r} has no text", field=field)
    return text


def _user_turn(messages: list[Any], field: str) -> Any:
    # A system turn is an instruction, as what stands around the problem in the user's turn is.
    turns = [m for m in messages if not (isinstance(m, Mapping) and m.get("role") == "system")]
    if len(turns) != 1 or not isinstance(turns[0], Mapping) or turns[0].get("role") != "user":
        raise DataError(f"field {field!r} is not a chat with exactly one user message", field=field)
    return turns[0].get("content")


def _gold(row: Mapping[str, Any]) -> str:
    reward_model = row.get("reward_model")
    if isinstance(reward_model, Mapping) and "ground_truth" in reward_model:
        field, answer = "reward_model.ground_truth", reward_model["ground_truth"]
    elif "answer" in row:
        field, answer = "answer", row["answer"]
    elif "solution" in row:
        field, answer = "solution", row["solution"]
    else:
        raise DataError(
            "no field 'answer', 'solution' or 'reward_model.ground_truth'; the fields are "
            + ", ".join(row),
            field="answer",
        )
    if isinstance(answer, str):
        if field == "answer" and "####" in answer:
            answer = answer.rpartition("####")[2].replace(",", "")
        elif "\\boxed" in answer or (field == "solution" and len(answer.split()) > 1):
            answer = _boxed(answer, field)
    try:
        return normalize_gold(answer)
    except DataError as error:
        raise DataError(f"field {field!r} {error}", field=field) from None


def _boxed(solution: str, field: str) -> str:
    answer = extract_answer(solution) if "\\boxed" in solution or "\\fbox" in solution else None
    if answer is None:
        raise DataError(
            f"field {field!r} is a text without a closing \\boxed{{}} answer", field=field
        )
    return answer


def _source_id(row: Mapping[str, Any], *, default: str) -> str:
    extra = row.get("extra_info")
    candidates = [row.get("id"), row.get("unique_id")]
    if isinstance(extra, Mapping):
        candidates.append(extra.get("index"))
    return next((str(c) for c in candidates if c is not None and str(c)), default)


def _level(value: object) -> int | None:
    """5 from 5, 5.0, "5" or "Level 5"; None from MATH's "Level ?" and other words."""
    if _is_number(value) and math.isfinite(value) and value == int(value):
        return int(value)
    if isinstance(value, str):
        number = value.strip().removeprefix("Level").strip()
        return int(number) if re.fullmatch("[0-9]{1,3}", number) else None
    return None


def _difficulty(value: object) -> float | None:
    if value is None:
        return None
    return float(value) if _is_number(value) else math.nan


def _is_number(value: object) -> TypeGuard[int | float | Decimal]:
    return isinstance(value, (int, float, Decimal)) and not isinstance(value, bool)


# --- What only the whole source tells


def _plain_numbers(problems: Sequence[Problem]) -> Sequence[Problem]:
    if not all(_NUMBER.fullmatch(problem.gold) for problem in problems):
        return problems
    return [
        replace(problem, gold=normalize_gold(problem.gold.replace(",", "")))
        if "," in problem.gold
        else problem
        for problem in problems
    ]


def _unit_difficulty(problems: Sequence[Problem]) -> tuple[list[Problem], str | None]:
    """Bring a source's difficulties to [0, 1].

    Sources use three scales, told apart by the column's range: a rate in [0, 1]; a rate in percent
    (some value above 10); and MATH's levels, whole numbers up to 5 (0 for unknown), which are a
    grade and go to `level`. Any other column is left out with a note.
    """
    values = [problem.difficulty for problem in problems if problem.difficulty is not None]
    largest = max(values, default=0.0)
    if not all(0 <= value <= 100 for value in values) or (
        1 < largest <= 10 and not (largest <= 5 and all(v.is_integer() for v in values))
    ):
        return [replace(problem, difficulty=None) for problem in problems], (
            "the field 'difficulty' is left out, since its scale is unknown; give failure rates in "
            "[0, 1] or in percent"
        )
    if largest <= 1:
        return list(problems), None
    if largest > 10:
        return [
            replace(problem, difficulty=problem.difficulty / 100)
            if problem.difficulty is not None
            else problem
            for problem in problems
        ], None
    return [
        replace(
            problem, difficulty=None, level=problem.level or int(problem.difficulty or 0) or None
        )
        for problem in problems
    ], None


# --- Warnings


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=3)


def _skipped(bad: list[tuple[Place, Refusal]], *, total: int) -> str:
    counts = Counter(refusal.reason for _, refusal in bad).most_common()
    shown = "; ".join(f"{count} x {reason}" for reason, count in counts[:3])
    more = f"; and {len(counts) - 3} other reasons" if len(counts) > 3 else ""
    return f"{len(bad)} of {total} rows left out, the first at {bad[0][0]}: {shown}{more}"


def _warn_of_doubtful_golds(problems: Sequence[Problem], source: str) -> None:
    for doubtful, what in (
        (rounded(problems), "are whole numbers beyond 2^53 that look rounded by a float"),
        (sentinels(problems), "are -1 where only a positive number can be right"),
    ):
        if doubtful:
            ids = ", ".join(problem.source_id for problem in doubtful[:5])
            more = ", ..." if len(doubtful) > 5 else ""
            _warn(f"{source}: {len(doubtful)} golds {what}; have a look ({ids}{more})")
