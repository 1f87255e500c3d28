"""A user's history of success rates: every form of the file, and one error for each fault."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import t as student

from sim.replay import (
    MOST_TRIALS,
    REAL_RUN,
    Replay,
    ReplaySettings,
    not_measured,
    read_replay,
    rise,
    rise_row,
)
from sim.study import SimError

K = 4
histories = st.lists(st.lists(st.integers(0, K), min_size=1, max_size=6), min_size=1, max_size=5)


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def as_json(history: list[list[int]], *, rates: bool) -> str:
    return json.dumps({f"q{i}": [s / K if rates else s for s in h] for i, h in enumerate(history)})


def as_long(history: list[list[int]], *, rates: bool, first: int) -> str:
    lines = [f"epoch,{'rate' if rates else 'successes'},prompt,trials"]
    rows = [
        f"{first + epoch},{s / K if rates else s},q{i},{K}"
        for i, h in enumerate(history)
        for epoch, s in enumerate(h)
    ]
    return "\n".join([lines[0], *reversed(rows)])


def as_wide(history: list[list[int]], *, rates: bool, first: int) -> str:
    longest = max(map(len, history))
    lines = [",".join(["prompt", *(str(first + epoch) for epoch in range(longest))])]
    for i, h in enumerate(history):
        cells = [str(s / K if rates else s) for s in h] + [""] * (longest - len(h))
        lines.append(",".join([f"q{i}", *cells]))
    return "\n".join(lines)


@settings(max_examples=30, deadline=None)
@given(histories, st.booleans(), st.sampled_from([0, 1, 7]))
def test_every_form_of_the_file_says_the_same(
    tmp_path_factory: pytest.TempPathFactory, history: list[list[int]], rates: bool, first: int
) -> None:
    folder = tmp_path_factory.mktemp("replay")
    values: Any = "rates" if rates else "counts"
    files = [
        write(folder, "a.json", as_json(history, rates=rates)),
        write(folder, "wide.csv", as_wide(history, rates=rates, first=first)),
        write(folder, "long.csv", as_long(history, rates=rates, first=first)),
    ]
    for file in files:
        replay = read_replay(file, trials=K, values=values)
        by_name = dict(zip(replay.source_ids, range(len(history)), strict=True))
        assert replay.trials == K
        assert replay.counts.shape == (len(history), max(map(len, history)))
        for i, h in enumerate(history):
            row = by_name[f"q{i}"]
            assert replay.lengths[row] == len(h)
            assert replay.counts[row, : len(h)].tolist() == h
            assert not replay.counts[row, len(h) :].any()
            assert replay.mask[row].tolist() == [e < len(h) for e in range(replay.mask.shape[1])]
        assert replay.common.shape == (len(history), min(map(len, history)))


def test_what_the_numbers_are_is_told_from_the_file_where_it_leaves_no_doubt(
    tmp_path: Path,
) -> None:
    counts = write(tmp_path, "counts.json", '{"a": [0, 1, 3]}')
    rates = write(tmp_path, "rates.json", '{"a": [0, 1, 0.75]}')
    either = write(tmp_path, "either.json", '{"a": [0, 1]}')
    assert read_replay(counts, trials=K).counts.tolist() == [[0, 1, 3]]
    assert read_replay(rates, trials=K).counts.tolist() == [[0, 4, 3]]
    assert read_replay(either, trials=1).counts.tolist() == [[0, 1]]
    assert read_replay(either, trials=K, values="counts").counts.tolist() == [[0, 1]]
    assert read_replay(either, trials=K, values="rates").counts.tolist() == [[0, 4]]
    with pytest.raises(SimError, match=r"either\.json: .*set values to rates or counts"):
        read_replay(either, trials=K)


def test_k_may_stand_in_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "a.csv", "prompt,epoch,rate,trials\na,0,0.25,4\na,1,0.5,4\n")
    assert read_replay(file).counts.tolist() == [[1, 2]]
    with pytest.raises(SimError, match="trials is 4 by its columns but set to 8"):
        read_replay(file, trials=8)


def test_rates_with_few_digits_are_read(tmp_path: Path) -> None:
    file = write(tmp_path, "a.json", '{"a": [0.333, 0.667, 1]}')
    assert read_replay(file, trials=3).counts.tolist() == [[1, 2, 3]]


def test_a_byte_order_mark_blank_lines_and_spaces_are_no_fault(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("\ufeffprompt, 0, 1\n\n a , 1 , 2 \n\n", encoding="utf-8")
    assert read_replay(file, trials=K).source_ids == ("a",)
    assert read_replay(file, trials=K).counts.tolist() == [[1, 2]]


LONG = "prompt,epoch,successes\n"
FAULTS = [
    ("a.txt", "x", "unknown kind '.txt'; give a .json or a .csv"),
    ("a.json", " \n", "is empty"),
    ("a.json", "{", "is not JSON"),
    ("a.json", "[" * 100_000, "nested too deeply"),
    ("a.json", "{}", "at least one prompt"),
    ("a.json", "[[1, 2]]", r"must be \{prompt:"),
    ("a.json", '{"a": 1}', "prompt 'a': it must be"),
    ("a.json", '{"a": []}', "prompt 'a': .*at least one epoch"),
    ("a.json", '{"a": [1], "a": [2]}', "prompt 'a' stands there 2 times"),
    ("a.json", '{"a": [1, null, 2]}', "prompt 'a', epoch 1: is missing; fill it in"),
    ("a.json", '{"a": [1, "2"]}', "prompt 'a', epoch 1: is '2', no number"),
    ("a.json", '{"a": [1, true]}', "prompt 'a', epoch 1: is True, no number"),
    ("a.json", '{"a": [2, NaN]}', "prompt 'a', epoch 1: nan cannot be"),
    ("a.json", '{"a": [2, Infinity]}', "prompt 'a', epoch 1: inf cannot be"),
    ("a.json", '{"a": [2, 1' + "0" * 400 + "]}", "prompt 'a', epoch 1: inf cannot be"),
    ("a.json", '{"a": [2, 1' + "0" * 5000 + "]}", "prompt 'a', epoch 1: inf cannot be"),
    ("a.json", '{"a": [2, 5]}', r"epoch 1: 5 cannot be, counts are whole numbers in 0\.\.4"),
    ("a.json", '{"a": [2, -1]}', r"epoch 1: -1 cannot be, counts are whole numbers in 0\.\.4"),
    ("a.json", '{"a": [2, 1.5]}', "epoch 1: 1.5 cannot be, counts"),
    ("a.json", '{"a": [0.3, 1]}', "epoch 0: 0.3 cannot be, rates are multiples of 1/4"),
    ("a.json", '{"a": [0.5, -0.25]}', "epoch 1: -0.25 cannot be, rates"),
    ("a.csv", "prompt,0\n", "must hold a header and the row of at least one prompt"),
    ("a.csv", ",,\n", "must hold a header and the row of at least one prompt"),
    ("a.csv", 'prompt,0\n"a,1\n', "is not CSV"),
    ("a.csv", "prompt,0,0\na,1,2\n", "header: column '0' stands there 2 times"),
    ("a.csv", "prompt,0,1\na,1\n", "row 2: 2 cells, the header has 3"),
    ("a.csv", "name,0,1\na,1,2\n", "header: columns name, 0, 1; the wide form has prompt"),
    ("a.csv", "prompt\na\n", "header: columns prompt; the wide form"),
    ("a.csv", "prompt,0,2\na,1,2\n", "header: .*one after the other"),
    ("a.csv", "prompt,0,1\n,1,2\n", "row 2: has no prompt"),
    ("a.csv", "prompt,0,1\na,1,2\n\na,1,2\n", "row 4: prompt 'a' stands there twice"),
    ("a.csv", "prompt,0,1\na,,\n", r"row 2 \(prompt 'a'\): has no epoch"),
    ("a.csv", "prompt,5,6,7\na,1,,2\n", r"row 2 \(prompt 'a', epoch 6\): is missing"),
    ("a.csv", '\n\nprompt,5,6\n"a\nb",1,2\n\nc,1,x\n', r"row 7 \(prompt 'c', epoch 6\): 'x'"),
    ("a.csv", '\nprompt,5\na,1\n"b\n\nc",1,2\n', "row 4: 3 cells, the header has 2"),
    ("a.csv", "prompt,5,6\na,1,x\n", r"row 2 \(prompt 'a', epoch 6\): 'x' is no number"),
    ("a.csv", "prompt,5,6\na,2,9\n", "prompt 'a', epoch 6: 9 cannot be"),
    ("a.csv", "prompt,5,6\na,2,nan\n", "prompt 'a', epoch 6: nan cannot be"),
    ("a.csv", "prompt,epoch,score\na,0,1\n", "header: columns prompt, epoch, score; the long"),
    ("a.csv", "prompt,epoch,rate,successes\na,0,1,1\n", "header: columns .*; the long form"),
    ("a.csv", LONG + ",0,1\n", "row 2: has no prompt"),
    ("a.csv", LONG + "a,0,\n", r"row 2 \(prompt 'a', epoch 0\): successes: is missing"),
    ("a.csv", LONG + "a,,1\n", r"row 2 \(prompt 'a', epoch \?\): epoch must be a whole number"),
    ("a.csv", LONG + "a,0.5,1\n", "epoch must be a whole number from 0, got '0.5'"),
    ("a.csv", LONG + "a,0,1\na,0,1\n", r"row 3 \(prompt 'a', epoch 0\): stands there twice"),
    ("a.csv", LONG + "a,0,1\na,2,1\n", "prompt 'a', epoch 1: is missing, though later ones"),
    ("a.csv", LONG + "a,0,1\nb,1,1\n", "prompt 'b', epoch 0: is missing"),
    ("a.csv", LONG + "a,1,9\n", "prompt 'a', epoch 1: 9 cannot be"),
    (
        "a.csv",
        "prompt,epoch,rate,trials\na,0,1,4\na,1,1,8\n",
        r"row 3 \(prompt 'a', epoch 1\): 8 trials, rows before 4; one file has one k",
    ),
]


@pytest.mark.parametrize(("name", "text", "message"), FAULTS)
def test_a_fault_is_named_with_its_file_and_place(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    file = write(tmp_path, name, text)
    with pytest.raises(SimError, match=message) as raised:
        read_replay(file, trials=None if "trials" in text else K)
    assert str(raised.value).startswith(str(file))


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SimError, match="cannot be read"):
        read_replay(tmp_path / "absent.json", trials=K)
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(SimError, match="cannot be read"):
        read_replay(tmp_path / "folder.csv", trials=K)
    (tmp_path / "latin.csv").write_bytes(b"prompt,0\n\xe9,1\n")
    with pytest.raises(SimError, match="is not UTF-8"):
        read_replay(tmp_path / "latin.csv", trials=K)


def test_k_must_be_known_and_positive(tmp_path: Path) -> None:
    file = write(tmp_path, "a.json", '{"a": [1]}')
    with pytest.raises(SimError, match="set trials to k"):
        read_replay(file)
    for trials in (0, MOST_TRIALS + 1, 10**20):
        with pytest.raises(SimError, match=f"trials must be 1 to 1000000, got {trials}"):
            read_replay(file, trials=trials)
    with pytest.raises(SimError, match="trials must be 1 to 1000000, got 999999999"):
        read_replay(
            write(tmp_path, "a.csv", "prompt,epoch,rate,trials\na,0,1,999999999\n"), values="rates"
        )
    with pytest.raises(ValueError, match="replay_trials"):
        ReplaySettings(replay_trials=MOST_TRIALS + 1)


numbers = st.one_of(
    st.integers(-2, K + 1), st.integers(), st.floats(width=32), st.sampled_from([0.25, 0.5, 1e300])
)


def understood(file: Path, trials: int | None, values: Any) -> None:
    """Reads a file; if it is accepted, its counts must be possible."""
    try:
        replay = read_replay(file, trials=trials, values=values)
    except SimError:
        return
    assert replay.counts.min() >= 0
    assert replay.counts.max() <= replay.trials
    assert replay.lengths.min() >= 1


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(st.text(max_size=3), st.lists(numbers, max_size=4), max_size=3),
    st.one_of(st.none(), st.integers(-1, 10), st.integers(), st.just(10**6)),
    st.sampled_from([None, "rates", "counts"]),
)
def test_counts_lie_between_0_and_trials_whatever_the_file_holds(
    tmp_path_factory: pytest.TempPathFactory, content: Any, trials: int | None, values: Any
) -> None:
    folder = tmp_path_factory.mktemp("replay")
    understood(write(folder, "a.json", json.dumps(content)), trials, values)


CELLS = (
    "prompt",
    "epoch",
    "successes",
    "rate",
    "trials",
    "0",
    "1",
    "0.5",
    "a",
    " ",
    '"',
    "\n",
    ",",
)


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=40),
        st.text(max_size=40).map(lambda text: text.encode("utf-8", "surrogatepass")),
        st.lists(st.sampled_from(CELLS), max_size=25).map(lambda cells: ",".join(cells).encode()),
        st.lists(st.sampled_from('{}[]":,0123456789.eE-+ntf'), max_size=25).map(
            lambda signs: "".join(signs).encode()
        ),
        st.integers(1, 6000).map(lambda digits: b'{"a": [' + b"7" * digits + b"]}"),
    ),
    st.sampled_from([".json", ".csv"]),
    st.sampled_from([None, 1, K]),
)
def test_any_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, kind: str, trials: int | None
) -> None:
    file = tmp_path_factory.mktemp("replay") / f"a{kind}"
    file.write_bytes(content)
    understood(file, trials, None)


def replay_of(counts: list[list[int]]) -> Replay:
    """A run whose prompts, of K rollouts, may stop at different epochs."""
    lengths = np.array([len(history) for history in counts])
    padded = np.array([history + [0] * (lengths.max() - len(history)) for history in counts])
    return Replay(tuple(map(str, range(len(counts)))), padded, lengths, K)


def test_a_run_rises_by_the_mean_of_its_prompts_over_the_epochs_they_share() -> None:
    found = rise(replay_of([[0, 1, 2, 3], [1, 1, 1, 3, 0, 0], [0, 0, 1, 2, 4]]))
    each = np.array([2.0, 1.0, 1.5]) / K
    assert found.estimate == pytest.approx(each.mean())
    half = student.ppf(0.975, 2) * each.std(ddof=1) / np.sqrt(3)
    assert (found.low, found.high) == pytest.approx((each.mean() - half, each.mean() + half))
    assert rise(replay_of([[3, 2, 1, 0], [3, 1, 1, 0], [4, 4, 1, 1]])).high < 0
    assert not rise(replay_of([[1, 2, 1, 2], [3, 4, 3, 4]] * 5)).low > 0


def test_a_single_epoch_shows_no_rise() -> None:
    row = rise_row(rise(replay_of([[1], [0, 1, 2]])))
    assert np.isnan([row.value, row.low, row.high]).all()
    assert row.n == 0


def test_the_real_run_has_its_known_size() -> None:
    if not REAL_RUN.exists():
        pytest.skip(f"needs ../shared/data/runs/{REAL_RUN.name}, the history of a real run")
    replay = read_replay(REAL_RUN, trials=8)
    assert replay.counts.shape == (1209, 57)
    assert (replay.lengths.min(), replay.lengths.max()) == (44, 57)
    assert replay.mask.sum() == replay.lengths.sum() == 64_000
    accuracy = replay.common.mean(axis=0) / 8
    assert accuracy[0] == pytest.approx(0.335, abs=5e-4)
    assert accuracy[-1] == pytest.approx(0.470, abs=5e-4)
    assert rise(replay).low > 0


def test_without_a_file_there_is_a_row_that_says_so() -> None:
    assert ReplaySettings(replay=None).read_replay() is None
    row = not_measured(5)
    assert row.setting.startswith("not measured")
    assert np.isnan(row.value)
    assert (row.claim, row.verdict) == (5, "")
