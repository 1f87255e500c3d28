r"""Problems audited and cleaned before money is spent on them: `python -m train data`.

Every row that is read ends in one place, so that the counts add up. It is kept, or left out for
the first of these reasons that holds:

| reason | the row |
|---|---|
| unusable | has no problem or no answer that can be read: null, empty, not JSON, two user turns |
| repeated row | equals an earlier one in text, answer, level and difficulty, whatever its id |
| rounded answer | has a whole number beyond 2^53 that a float holds exactly (`data.rounded`) |
| sentinel answer | has the answer -1 where only a positive number can be right (`data.sentinels`) |
| conflicting answers | has a prompt, up to white space, for which several answers remain |
| repeated prompt | has a prompt that was kept before, up to white space, with the same answer |

Decision: doubtful answers go first, since a prompt that cannot be solved as it is graded costs
rollouts in every epoch, while a lost one is one of thousands. So a conflict between -1 and the
right answer is settled for the latter. What may be as it should be is kept, and reported.

A problem of an evaluation set stands in the training set if one of the kept problems matches it:

- `exact`: the same text up to white space.
- `normalized`: the same words: without case, punctuation, `$`, braces and LaTeX's layout commands.
- `near`: at least `near` (0.6) of its sequences of five words stand in that one training problem.
  The sentence on the answer's form ("The final answer can be written as m/n, ... what is m + n?")
  does not count: every release has its own, and AMC 2023 as published got one for each fraction.

DAPO-Math-17k as published has 1.79 million rows. They are read one by one and held once for each
content; of a repetition only its row number stays (0.8 GB in all, 0.3 of them imports; 40 s).
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TextIO

from tqdm import tqdm

from cvpo.reward import answers_match
from train.config import Dataset, benchmark_name
from train.data import (
    DataError,
    Place,
    Problem,
    Refusal,
    conflicts,
    normalize_source,
    prompt_key,
    rounded,
    scan_problems,
    sentinels,
    without_duplicates,
)

NEAR = 0.6
"""Between DAPO-Math-17k and AIME or AMC, a same problem shares 0.68 of its sequences or more, any
other 0.40 at most. MATH asks many problems twice, with other numbers: these may share 0.9."""

_NGRAM = 5

_WORD = re.compile(r"\\[a-z]+|\\.|[a-z]+|[0-9]+(?:\.[0-9]+)?|[^\W_]|[-+*/^_=<>|!()\[\]]", re.DOTALL)
# LaTeX commands that mean nothing, or the same as another.
_LAYOUT = (
    r"\left", r"\right", r"\quad", r"\qquad", r"\displaystyle", r"\limits",
    r"\text", r"\textrm", r"\textbf", r"\mathrm", r"\operatorname",
)  # fmt: skip
_WORDS_ALIKE = {
    **dict.fromkeys(_LAYOUT, ""),
    **dict.fromkeys((r"\dfrac", r"\tfrac"), r"\frac"),
    **dict.fromkeys((r"\ldots", r"\cdots", r"\dotsc"), r"\dots"),
    r"\leq": r"\le",
    r"\geq": r"\ge",
}
_ANSWER_FORM = re.compile(
    r"(the (final |original )?answer (can|may|should|is)|"
    r"(express|enter|give|write) (your|the) (final )?answer)\b.*",
    re.DOTALL | re.IGNORECASE,
)
# Left by escapes that were read twice: the \f of \frac has become a form feed.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f]")

Words = tuple[str, ...]
Kind = Literal["exact", "normalized", "near"]
KINDS: tuple[Kind, ...] = ("exact", "normalized", "near")


# --- The core: problems in, what to keep and what was found out


@dataclass(frozen=True)
class Reading:
    """A source read to its end."""

    source: str
    unit: str
    """What row numbers count, from 1: `line`, `item` (of a JSON list) or `row`."""
    total: int
    """Rows read."""
    problems: list[Problem]
    """`prompt_id` is the place in this list."""
    numbers: list[int]
    """The row number of each problem."""
    refused: list[tuple[int, Refusal]]
    """Row numbers, and why they are unusable."""
    repeats: dict[int, list[int]]
    """A problem's row number -> those of the equal rows after it, which are not in `problems`."""
    note: str | None
    """What was left out of every problem; None where nothing was."""

    def at(self, problem: Problem) -> dict[str, Any]:
        """Where one of its problems stands, for a report."""
        return {"row": self.numbers[problem.prompt_id], "id": problem.source_id}


def collect(
    source: str, found: Iterable[tuple[Place, Problem | Refusal]], *, merge_equal: bool
) -> Reading:
    """Gathers what `scan_problems` finds in a source.

    Args:
        source: Its name, for reports.
        found: In the source's order.
        merge_equal: Hold rows of equal text, answer, level and difficulty once.
    """
    unit, total = "row", 0
    problems: list[Problem] = []
    numbers: list[int] = []
    refused: list[tuple[int, Refusal]] = []
    repeats: defaultdict[int, list[int]] = defaultdict(list)
    first: dict[tuple[object, ...], int] = {}
    for place, outcome in found:
        unit, total = place.unit, total + 1
        if isinstance(outcome, Refusal):
            refused.append((place.number, outcome))
            continue
        content = (outcome.text, outcome.gold, outcome.level, outcome.difficulty)
        if merge_equal and first.setdefault(content, place.number) != place.number:
            repeats[first[content]].append(place.number)
            continue
        problems.append(replace(outcome, prompt_id=len(problems)))
        numbers.append(place.number)
    problems, note = normalize_source(problems)
    return Reading(source, unit, total, problems, numbers, refused, dict(repeats), note)


@dataclass(frozen=True)
class Cleaned:
    """What is kept of distinct problems, and what is not; see the module's table."""

    kept: list[Problem]
    rounded: list[Problem]
    sentinels: list[Problem]
    conflicts: list[list[Problem]]
    repeated: list[tuple[Problem, Problem]]
    """A problem left out, and the kept one whose prompt it repeats."""
    restated: list[list[Problem]]
    """Kept problems whose prompts differ in case, punctuation and LaTeX layout only."""
    uncertain: list[Problem]
    """Kept problems with the answer -1, in a source that also writes it for "no answer"."""
    damaged: list[Problem]
    """Kept problems with control characters in their text."""


def clean(problems: Sequence[Problem], *, keep_doubtful: bool = False) -> Cleaned:
    """Divides problems into those to train on and the others.

    Args:
        problems: With distinct `prompt_id`s.
        keep_doubtful: Keep rounded and sentinel answers, as far as they conflict with no other.
            They are then only in `rounded` and `sentinels` as well.
    """
    rounded_off, impossible = rounded(problems), sentinels(problems)
    doubtful = set() if keep_doubtful else {p.prompt_id for p in (*rounded_off, *impossible)}
    sure = [problem for problem in problems if problem.prompt_id not in doubtful]
    kept = without_duplicates(sure)
    first = {prompt_key(problem.text): problem for problem in kept}
    repeated = []
    for problem in sure:
        earlier = first.get(prompt_key(problem.text), problem)
        if earlier is not problem:
            repeated.append((problem, earlier))
    same_words: defaultdict[Words, list[Problem]] = defaultdict(list)
    for problem in kept:
        same_words[words_of(problem.text)].append(problem)
    return Cleaned(
        kept=kept,
        rounded=rounded_off,
        sentinels=impossible,
        conflicts=conflicts(sure),
        repeated=repeated,
        restated=[group for group in same_words.values() if len(group) > 1],
        uncertain=[p for p in kept if p.gold == "-1"] if impossible else [],
        damaged=[p for p in kept if _CONTROL.search(p.text)],
    )


@dataclass(frozen=True)
class Overlap:
    """A problem of an evaluation set, and one of the training set that matches it."""

    evaluated: Problem
    trained: Problem
    kind: Kind
    share: float
    """Of the evaluated problem's word sequences, in (0, 1]; 1 unless the match is near."""
    same_answer: bool
    """Under the verifier `normalized`. Releases often ask for the same in another form."""


def overlaps(
    trained: Iterable[Problem], evaluated: Sequence[Problem], *, near: float = NEAR
) -> list[Overlap]:
    """Finds the problems of an evaluation set in a training set.

    Args:
        trained: The training set.
        evaluated: The evaluation set.
        near: The share, in (0, 1], of a problem's sequences of five words that makes a match.

    Returns:
        Every matching pair, by the evaluated problem, the closest match first.
    """
    keys = [prompt_key(problem.text) for problem in evaluated]
    words = [words_of(problem.text) for problem in evaluated]
    grams = [_ngrams(_question(problem.text)) for problem in evaluated]
    with_words: defaultdict[Words, list[int]] = defaultdict(list)
    with_gram: defaultdict[Words, list[int]] = defaultdict(list)
    for index in range(len(evaluated)):
        with_words[words[index]].append(index)
        for gram in grams[index]:
            with_gram[gram].append(index)

    pairs: list[tuple[int, Overlap]] = []
    for problem in trained:
        own_key, own_words = prompt_key(problem.text), words_of(problem.text)
        shared = Counter(i for gram in _ngrams(own_words) for i in with_gram.get(gram, ()))
        shares = {i: count / len(grams[i]) for i, count in shared.items()}
        shares |= dict.fromkeys(with_words.get(own_words, ()), 1.0)
        for index, share in shares.items():
            if share < near:
                continue
            kind: Kind = "near"
            if own_words == words[index]:
                kind = "exact" if own_key == keys[index] else "normalized"
            gold = evaluated[index].gold
            same = answers_match(problem.gold, gold, verifier="normalized")
            pairs.append((index, Overlap(evaluated[index], problem, kind, share, same)))
    pairs.sort(key=lambda pair: (pair[0], KINDS.index(pair[1].kind), -pair[1].share))
    return [overlap for _, overlap in pairs]


def words_of(text: str) -> Words:
    r"""A text's words: letters in lower case, numbers, LaTeX commands and operators, each its own.

    Layout is left out: white space, punctuation, `$`, braces, `\left`, `\,`. A text of nothing but
    layout is one word.
    """
    key = prompt_key(text)
    found = (_WORDS_ALIKE.get(word, word) for word in _WORD.findall(key.lower()))
    return tuple(word for word in found if word and not _is_escape(word)) or (key,)


def _is_escape(word: str) -> bool:
    return word[0] == "\\" and not word[1:].isalpha()


def _question(text: str) -> Words:
    """The words without those on the answer's form, unless too few remain to tell a problem."""
    question = words_of(_ANSWER_FORM.sub("", prompt_key(text)))
    return question if len(question) >= 2 * _NGRAM else words_of(text)


def _ngrams(words: Words) -> set[Words]:
    return {words[i : i + _NGRAM] for i in range(max(1, len(words) - _NGRAM + 1))}


# --- The audit


@dataclass(frozen=True)
class Evaluation:
    """What of an evaluation set stands in the training set."""

    name: str
    reading: Reading
    overlaps: list[Overlap]

    @property
    def closest(self) -> dict[int, Overlap]:
        """The closest match of every problem that has one, by `prompt_id`."""
        return {overlap.evaluated.prompt_id: overlap for overlap in reversed(self.overlaps)}

    @property
    def unseen(self) -> list[Problem]:
        """The problems without a match."""
        closest = self.closest
        return [p for p in self.reading.problems if p.prompt_id not in closest]


@dataclass(frozen=True)
class Audit:
    """What was found in a training set."""

    reading: Reading
    cleaned: Cleaned
    evaluations: list[Evaluation]
    near: float
    doubtful_kept: bool

    @property
    def left_out(self) -> dict[str, int]:
        """Rows left out for each reason. With those kept they add up to the rows read."""
        cleaned, kept = self.cleaned, self.doubtful_kept
        return {
            "unusable": len(self.reading.refused),
            "repeated row": sum(map(len, self.reading.repeats.values())),
            "rounded answer": 0 if kept else len(cleaned.rounded),
            "sentinel answer": 0 if kept else len(cleaned.sentinels),
            "conflicting answers": sum(map(len, cleaned.conflicts)),
            "repeated prompt": len(cleaned.repeated),
        }

    def text(self) -> str:
        """A short report in Markdown."""
        counts = {"read": self.reading.total, **self.left_out, "kept": len(self.cleaned.kept)}
        table = [f"| {name} | {count:,} |" for name, count in counts.items()]
        lines = [f"# Audit of {self.reading.source}", "", "| rows | |", "|---|---:|", *table]
        remarks = list(_remarks(self))
        if remarks:
            lines += ["", *(f"- {remark}" for remark in remarks)]
        if self.evaluations:
            lines += ["", "## Evaluation sets", "", *_overlap_table(self)]
        return "\n".join(lines) + "\n"

    def as_json(self) -> dict[str, Any]:
        """The whole report. Rows are numbered from 1, ids are the source's own."""
        at, cleaned = self.reading.at, self.cleaned
        numbers = dict(zip(self.reading.numbers, self.reading.problems, strict=True))

        def listed(problems: Iterable[Problem]) -> list[dict[str, Any]]:
            return [{**at(problem), "answer": problem.gold} for problem in problems]

        return {
            "source": self.reading.source,
            "rows_are": f"{self.reading.unit}s, from 1",
            "rows": {
                "read": self.reading.total,
                "left_out": self.left_out,
                "kept": len(cleaned.kept),
            },
            "note": self.reading.note,
            "unusable": _refusals(self.reading),
            "repeated_rows": [
                {**at(numbers[first]), "repeats": again}
                for first, again in self.reading.repeats.items()
            ],
            "repeated_prompts": [
                {**at(problem), "first": at(first)} for problem, first in cleaned.repeated
            ],
            "doubtful_answers_kept": self.doubtful_kept,
            "rounded_answers": listed(cleaned.rounded),
            "sentinel_answers": listed(cleaned.sentinels),
            "conflicting_answers": [listed(group) for group in cleaned.conflicts],
            "kept_but_look": {
                "restated": [listed(group) for group in cleaned.restated],
                "answer_minus_one": listed(cleaned.uncertain),
                "control_characters": [at(problem) for problem in cleaned.damaged],
            },
            "near": self.near,
            "evaluation_sets": [self._evaluation_json(found) for found in self.evaluations],
        }

    def _evaluation_json(self, evaluation: Evaluation) -> dict[str, Any]:
        reading = evaluation.reading
        return {
            "name": evaluation.name,
            "source": reading.source,
            "rows_are": f"{reading.unit}s, from 1",
            "rows": reading.total,
            "unusable": _refusals(reading),
            "unseen": len(evaluation.unseen),
            "seen": [
                {**reading.at(found.evaluated), "problem_id": _logged_id(found.evaluated)}
                for _, found in sorted(evaluation.closest.items())
            ],
            "overlaps": [
                {
                    "kind": overlap.kind,
                    "share": round(overlap.share, 4),
                    "same_answer": overlap.same_answer,
                    "evaluated": {
                        **reading.at(overlap.evaluated),
                        "answer": overlap.evaluated.gold,
                    },
                    "trained": {
                        **self.reading.at(overlap.trained),
                        "answer": overlap.trained.gold,
                    },
                }
                for overlap in evaluation.overlaps
            ],
        }


def _refusals(reading: Reading) -> list[dict[str, Any]]:
    return [
        {"file": reading.source, "row": row, "field": refusal.field, "reason": refusal.reason}
        for row, refusal in reading.refused
    ]


def _logged_id(problem: Problem) -> str:
    """What the run log's evaluations call a problem of a set that was read whole."""
    return f"{problem.prompt_id}:{problem.source_id}"


def _remarks(audit: Audit) -> Iterator[str]:
    reading, cleaned = audit.reading, audit.cleaned

    def named(problems: Sequence[Problem]) -> str:
        rows = (f"{p.gold} ({reading.unit} {reading.at(p)['row']})" for p in problems[:3])
        return ", ".join(rows) + (", ..." if len(problems) > 3 else "")

    if reading.note:
        yield reading.note
    reasons: dict[str, list[int]] = {}
    for row, refusal in reading.refused:
        reasons.setdefault(refusal.reason, []).append(row)
    for reason, rows in sorted(reasons.items(), key=lambda item: -len(item[1]))[:5]:
        yield f"unusable: {len(rows):,} x {reason} (first in {reading.unit} {rows[0]})"
    if len(reasons) > 5:
        yield f"unusable for {len(reasons) - 5:,} other reasons: see report.json"
    kept = ", kept as asked" if audit.doubtful_kept else ""
    if cleaned.rounded:
        yield f"rounded answers{kept}: {named(cleaned.rounded)}"
    if cleaned.sentinels:
        yield f"sentinel answers{kept}: {named(cleaned.sentinels)}"
    if cleaned.conflicts:
        first = named(cleaned.conflicts[0])
        yield f"conflicting answers to {len(cleaned.conflicts):,} prompts, the first: {first}"
    if cleaned.restated:
        differ = sum(len({p.gold for p in group}) > 1 for group in cleaned.restated)
        more = sum(map(len, cleaned.restated)) - len(cleaned.restated)
        yield (
            f"kept, have a look: {more:,} prompts restate another one in other LaTeX, and "
            f"{differ:,} of these {len(cleaned.restated):,} groups have different answers"
        )
    if cleaned.uncertain:
        yield (
            f"kept, have a look: {len(cleaned.uncertain):,} answers are -1, which this source also "
            "writes where it has none"
        )
    if cleaned.damaged:
        yield (
            f"kept, have a look: {len(cleaned.damaged):,} texts hold control characters, as a "
            r"\frac does whose \f was read as an escape"
        )


def _overlap_table(audit: Audit) -> Iterator[str]:
    yield f"| set | problems | in the training set | {' | '.join(KINDS)} | same answer | unseen |"
    yield "|---" + "|---:" * (len(KINDS) + 4) + "|"
    for evaluation in audit.evaluations:
        closest = evaluation.closest.values()
        kinds = Counter(overlap.kind for overlap in closest)
        same = {o.evaluated.prompt_id for o in evaluation.overlaps if o.same_answer}
        counts = [
            len(evaluation.reading.problems),
            len(closest),
            *(kinds[kind] for kind in KINDS),
            len(same),
            len(evaluation.unseen),
        ]
        yield f"| {evaluation.name} | {' | '.join(f'{count:,}' for count in counts)} |"
    yield ""
    yield (
        f"Exact: equal up to white space. Normalized: up to case, punctuation and LaTeX layout. "
        f"Near: {audit.near:.0%} or more of the problem's sequences of {_NGRAM} words stand in one "
        "training problem, its sentence on the answer's form aside."
    )
    refused = [(e, row, why) for e in audit.evaluations for row, why in e.reading.refused]
    if refused:
        evaluation, row, refusal = refused[0]
        yield ""
        yield (
            f"{len(refused):,} rows of these sets are unusable, the first in {evaluation.name}, "
            f"{evaluation.reading.unit} {row}: {refusal.reason}"
        )


# --- Files


def prepare(
    train: Dataset,
    *,
    output: Path,
    evaluation: Sequence[Dataset] = (),
    near: float = NEAR,
    unseen: bool = False,
    keep_doubtful: bool = False,
) -> Audit:
    """Audits a training set, and writes it cleaned, with a report, into a folder.

    Every file appears whole, replacing an older one of its name: `problems.jsonl` (the clean
    problems in the layout that `read_problems` calls our own), `report.md`, `report.json` and, if
    asked for, `<name>-unseen.jsonl` for each evaluation set with an unseen problem.

    Args:
        train: The training set; source, split and name count, the rest is a run's choice.
        output: The folder, made where it is missing.
        evaluation: Evaluation sets, likewise.
        near: See `overlaps`.
        unseen: Also write each evaluation set without the problems of the training set.
        keep_doubtful: Keep rounded and sentinel answers.

    Raises:
        DataError: A source cannot be read, or has no usable row; no problem is left; the output
            folder cannot be written, or a file in it would replace a source.
    """
    if not 0 < near <= 1:
        raise DataError(f"near must be a share above 0 and up to 1, got {near}")
    _require_room(train, evaluation, output)
    reading = _read(train, merge_equal=True)
    cleaned = clean(reading.problems, keep_doubtful=keep_doubtful)
    evaluations = []
    for dataset in evaluation:
        asked = _read(dataset, merge_equal=False)
        pairs = overlaps(cleaned.kept, asked.problems, near=near)
        evaluations.append(Evaluation(benchmark_name(dataset), asked, pairs))
    audit = Audit(reading, cleaned, evaluations, near, keep_doubtful)
    if not cleaned.kept:
        reasons = ", ".join(f"{count} {reason}" for reason, count in audit.left_out.items())
        raise DataError(f"{reading.source}: no problem is left of {reading.total} rows ({reasons})")

    for found in evaluations if unseen else ():
        file = output / _unseen_file(found.name)
        if found.unseen:
            _write_problems(file, found.unseen, found.reading)
        else:
            file.unlink(missing_ok=True)  # of an earlier audit, and true no more
    with _in_place_of(output / "report.json") as out:
        json.dump(audit.as_json(), out, ensure_ascii=False, indent=1)
    with _in_place_of(output / "report.md") as out:
        out.write(audit.text())
    _write_problems(output / "problems.jsonl", cleaned.kept, reading)
    return audit


def _read(dataset: Dataset, *, merge_equal: bool) -> Reading:
    source = dataset.source
    found = scan_problems(source, name=dataset.name, split=dataset.split)
    bar = tqdm(found, desc=f"reading {source}", unit=" rows", leave=False, disable=None)
    reading = collect(source, bar, merge_equal=merge_equal)
    if not reading.total:
        raise DataError(f"{source} has no rows")
    if not reading.problems:
        row, refusal = reading.refused[0]
        raise DataError(
            f"{source} has no usable row; {reading.unit} {row}: {refusal.reason}",
            field=refusal.field,
        )
    return reading


def _unseen_file(name: str) -> str:
    return f"{name}-unseen.jsonl"


def _require_room(train: Dataset, evaluation: Sequence[Dataset], output: Path) -> None:
    names = [benchmark_name(dataset) for dataset in evaluation]
    if len(set(names)) < len(names) or any("/" in name for name in names):
        raise DataError(
            f"evaluation sets must have different names without a slash, got {', '.join(names)}; "
            "set `name` in evaluation.benchmarks"
        )
    written = {output / "problems.jsonl", *(output / _unseen_file(name) for name in names)}
    taken = {file.resolve() for file in written}
    for dataset in (train, *evaluation):
        source = Path(dataset.source).expanduser().resolve()
        if source in taken or output.resolve().is_relative_to(source):
            raise DataError(
                f"{output} would change the source {dataset.source}; give another output folder"
            )
    try:
        output.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise DataError(f"{output} is no folder: a file stands in its place") from error
    except OSError as error:
        raise DataError(f"{output} cannot be made ({error.strerror})") from error


def _write_problems(file: Path, problems: Sequence[Problem], reading: Reading) -> None:
    """Writes problems, and reads them back: what a run will read must be what was audited."""
    with _in_place_of(file) as out:
        for problem in problems:
            out.write(json.dumps(_row(problem), ensure_ascii=False) + "\n")
        out.flush()
        again = collect(out.name, scan_problems(out.name), merge_equal=False)
        lines = dict(zip(again.numbers, map(_row, again.problems), strict=True))
        for number, problem in enumerate(problems, 1):
            if lines.get(number) != _row(problem):
                raise DataError(
                    f"{reading.source}, {reading.unit} {reading.at(problem)['row']}: would read "
                    f"differently from {file.name}, where only some rows are left; correct its "
                    f"answer ({problem.gold!r:.60}) or its text, or take it out"
                )


def _row(problem: Problem) -> dict[str, Any]:
    row: dict[str, Any] = {
        "problem": problem.text,
        "answer": problem.gold,
        "id": problem.source_id,
        "level": problem.level,
        "difficulty": problem.difficulty,
    }
    return {field: value for field, value in row.items() if value is not None}


@contextmanager
def _in_place_of(file: Path) -> Iterator[TextIO]:
    """A file beside, open for writing, which takes the place when it is complete."""
    aside = file.with_name(f".partial-{file.name}")
    try:
        # Half of a surrogate pair is no UTF-8, but has an escape in JSON.
        with aside.open("w", encoding="utf-8", errors="backslashreplace") as out:
            yield out
        aside.replace(file)
    except OSError as error:
        raise DataError(f"{file} cannot be written ({error.strerror})") from error
    finally:
        aside.unlink(missing_ok=True)
