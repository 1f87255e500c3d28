"""Finding a study's log, its rows, and what its seeds allow."""

import math

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from analysis import AnalysisError
from analysis.markdown import markdown
from analysis.studies import (
    about,
    find_study,
    forest,
    has_study,
    plain_log,
    read_table,
    rows_where,
    short,
)
from tests.study_logs import write_study

ROWS = [
    {"quantity": "error", "setting": "real run: beta 0.9", "value": 0.1, "low": 0.05, "high": 0.2},
    {"quantity": "error", "setting": "real run: beta 1", "value": 0.3},
    {"quantity": "error", "setting": "frozen: beta 1", "value": 0.4, "n": 5},
    {"quantity": "error of rho", "setting": "real run: beta 1", "value": 9.0},
]


def test_a_study_is_found_by_its_name_among_others(tmp_path):
    sources = [write_study(tmp_path / name, name, ROWS) for name in ("bound", "tracker")]
    assert find_study(sources, "tracker").name == "tracker"
    assert has_study(sources, "bound")
    assert not has_study(sources, "weights")


def test_a_missing_study_says_how_to_make_it():
    with pytest.raises(AnalysisError, match="python -m sim trigger"):
        find_study([], "trigger")


def test_two_logs_of_a_study_are_refused_by_their_paths(tmp_path):
    sources = [write_study(tmp_path / name, "bound", ROWS) for name in ("a", "b")]
    with pytest.raises(AnalysisError, match=f"{tmp_path / 'a'} {tmp_path / 'b'}; give one"):
        find_study(sources, "bound")


def test_a_study_that_has_not_finished_is_refused(tmp_path):
    study = write_study(tmp_path / "bound", "bound", finished=False)
    with pytest.raises(AnalysisError, match="has not finished"):
        find_study([study], "bound")


def test_rows_are_found_by_quantity_and_the_whole_setting(tmp_path):
    study = write_study(tmp_path / "s", "tracker", ROWS)
    found = rows_where(study, "error", r"real run: beta (?P<discount>.+)")
    assert found["discount"].tolist() == ["0.9", "1"]
    assert found["value"].tolist() == [0.1, 0.3]
    assert found["low"][0] == 0.05
    assert math.isnan(found["low"][1])
    assert rows_where(study, "error", "real run")["value"].tolist() == []
    assert rows_where(study, "error")["n"].tolist() == [1, 1, 5]


def test_rows_that_are_not_there_are_an_empty_frame_with_all_columns(tmp_path):
    study = write_study(tmp_path / "s", "tracker", ROWS)
    assert "T" in rows_where(study, "gradient", r"chain of T = (?P<T>\d+)").columns


@pytest.mark.parametrize(
    ("seeds", "says", "silent"),
    [
        ((7,), "seed 7 only", "difference is claimed"),
        ((0, 1, 2), "Fewer than 5 seeds", "only"),
        ((0, 1, 2, 3, 4), "5 seeds (0-4)", "claimed"),
    ],
)
def test_the_seeds_say_what_may_be_claimed(tmp_path, seeds, says, silent):
    text = about(write_study(tmp_path / "s", "bound", ROWS, seeds=seeds))
    assert says in text
    assert silent not in text
    assert "python -m sim bound" in text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.3, ".3"), (-0.2, "-.2"), (1.0, "1"), (1e-6, "1e-6"), (12.5, "12.5"), (0.0, "0")],
)
def test_numbers_are_written_as_the_paper_writes_them(number, text):
    assert short(number) == text


def test_a_forest_draws_scaled_points_and_no_interval_where_there_is_none():
    figure, panel = plt.subplots()
    frame = pd.DataFrame({"value": [0.1, 0.2], "low": [0.0, math.nan], "high": [0.3, math.nan]})
    forest(panel, [0, 1], frame, scale=100, color="k", marker="o")
    assert panel.lines[0].get_xdata().tolist() == pytest.approx([10, 20])
    drawn = [part for part in panel.collections[0].get_segments() if len(part)]
    assert drawn[0][:, 0].tolist() == pytest.approx([0, 30])
    plt.close(figure)


def test_logarithmic_axes_have_plain_numbers():
    figure, panel = plt.subplots()
    panel.set_xscale("log")
    panel.set_xlim(0.02, 200)
    plain_log(panel.xaxis)
    figure.canvas.draw()
    labels = {label.get_text() for label in panel.get_xticklabels()}
    assert {"0.1", "0.5", "100"} <= labels
    plt.close(figure)


def test_markdown_keeps_columns_apart_whatever_a_cell_holds():
    assert markdown(pd.DataFrame({"a": ["x\n\ny"]})).splitlines()[2] == "| x y |"
    text = markdown(pd.DataFrame({"a": ["x|y", 1], "long name": [0.5, "z"]}))
    lines = text.splitlines()
    assert lines[0] == r"| a    | long name |"
    assert lines[1] == r"|------|-----------|"
    assert lines[2] == r"| x\|y | 0.5       |"
    assert len({len(line) for line in lines}) == 1


def table_of(tmp_path, **columns):
    rows = pd.DataFrame({"who": ["a", "b", "b"], "n": [1, 2, 3], "x": [0.5, 1.5, 2.5]} | columns)
    return write_study(tmp_path / "s", "bound", tables={"t": rows.to_dict("records")})


def read(study):
    return read_table(study, "t", words=["who"], numbers=["n"], gaps=["x"], key=["who", "n"])


@pytest.mark.parametrize("nothing", [None, math.nan])
@pytest.mark.parametrize("rows", [[0, 1, 2], [1]])
def test_numbers_that_may_be_missing_are_nan_whatever_stands_there(tmp_path, nothing, rows):
    x = [nothing if row in rows else 0.5 for row in range(3)]
    found = read(table_of(tmp_path, x=x))
    assert found["x"].dtype == float
    assert found["x"].isna().tolist() == [row in rows for row in range(3)]


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"n": [None] * 3}, r"tables/t, row 1: 'n' is nan, no finite number"),
        ({"n": [1.0, math.nan, 2.0]}, r"tables/t, row 2: 'n' is nan, no finite number"),
        ({"n": [1.0, 2.0, math.inf]}, r"tables/t, row 3: 'n' is inf, no finite number"),
        ({"n": ["1", "2", "3"]}, r"tables/t, row 1: 'n' is 1, no number"),
        ({"x": ["", "2", "3"]}, r"tables/t, row 1: 'x' is , no number"),
        ({"who": ["a", None, "c"]}, r"tables/t, row 2: 'who' is (nan|None), no text"),
        ({"who": [None] * 3}, r"tables/t, row 1: 'who' is None, no text"),
        ({"who": [1, 2, 3]}, r"tables/t, row 1: 'who' is 1, no text"),
        ({"n": [1, 2, 2]}, r"tables/t, row 3: b, 2 stands there twice"),
    ],
)
def test_what_cannot_be_reckoned_with_is_named_by_table_row_and_column(tmp_path, columns, said):
    with pytest.raises(AnalysisError, match=said) as error:
        read(table_of(tmp_path, **columns))
    assert "run the study again" in str(error.value)


def test_a_row_without_a_value_is_refused_unless_it_means_never(tmp_path):
    rows = [{"quantity": "step", "setting": "d = 1"}, {"quantity": "error", "setting": "d = 1"}]
    study = write_study(tmp_path / "s", "trigger", rows)
    assert math.isnan(rows_where(study, "step", never=True)["value"][0])
    with pytest.raises(AnalysisError, match="no number for the step of d = 1; run the study again"):
        rows_where(study, "step")


def test_a_row_that_stands_there_twice_is_refused(tmp_path):
    study = write_study(tmp_path / "s", "tracker", [*ROWS, ROWS[0]])
    with pytest.raises(AnalysisError, match=r"error, real run: beta 0\.9 stands there twice"):
        rows_where(study, "error of rho")
