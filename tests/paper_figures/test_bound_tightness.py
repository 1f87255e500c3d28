"""How loose each link is, from the worlds of the bound study."""

import numpy as np
import pytest

from analysis import AnalysisError
from paper_figures.bound_tightness import LINKS, make
from tests.study_logs import write_study

CHAIN = ("||grad J||", "printed bound (13)", "C sqrt(E[T] E_q[4p(1-p)])", "||grad J|| / T")
LOOSENESS = dict(zip(LINKS, (2, 4, 8, 8, 8, 20), strict=True))


def worlds(gradients=(0.1, 0.2, 0.4), **changed):
    return [
        {"policy": policy, "link_gradient": gradient}
        | {f"link_{link}": factor * gradient for link, factor in (LOOSENESS | changed).items()}
        for policy in ("tabular", "shared")
        for gradient in gradients
    ]


def chain(lengths=(5, 401)):
    return [
        {
            "quantity": what,
            "setting": f"chain of T = {T} binary actions",
            "value": T if what == "||grad J||" else 0.6,
        }
        for T in lengths
        for what in CHAIN
    ]


def study(path, rows=None, **options):
    return write_study(path, "bound", chain() if rows is None else rows, **options)


def test_each_link_is_held_against_the_true_gradient_and_the_link_before(tmp_path):
    exhibit = make([study(tmp_path / "s", tables={"worlds": worlds()})])
    links = exhibit.table[exhibit.table["panel"] == "links"]
    assert links["value"].tolist() == pytest.approx(2 * list(LOOSENESS.values()))
    assert links["over_previous"].tolist() == pytest.approx(2 * [2, 2, 2, 1, 1, 2.5])
    assert (links["holding"] == 1).all()
    assert (links["n"] == 3).all()
    assert "Every link is at least the one before" in exhibit.caption


def test_medians_quantiles_and_shares_are_those_of_the_worlds(tmp_path):
    rng = np.random.default_rng(0)
    table = worlds(tuple(rng.uniform(0.1, 1, 40)))
    for row in table:
        row["link_printed"] *= rng.uniform(0.3, 2)
    exhibit = make([study(tmp_path / "s", tables={"worlds": table})])
    links = exhibit.table[exhibit.table["panel"] == "links"]
    found = links[(links["policy"] == "shared") & links["what"].str.startswith("(13)")].iloc[0]
    mine = [row for row in table if row["policy"] == "shared"]
    ratio = [row["link_printed"] / row["link_gradient"] for row in mine]
    assert found["value"] == pytest.approx(np.median(ratio))
    assert found["p5"] == pytest.approx(np.quantile(ratio, 0.05))
    share = np.mean([row["link_printed"] >= row["link_expanded"] for row in mine])
    assert 0 < share < 1
    assert found["holding"] == pytest.approx(share)
    assert "falls below the one before" in exhibit.caption


def test_the_caption_says_where_the_printed_bound_fails(tmp_path):
    exhibit = make([study(tmp_path / "s", tables={"worlds": worlds()})])
    assert "at T = 401 the gradient is 401, the bound 0.6" in exhibit.caption
    drawn = exhibit.table[exhibit.table["panel"] == "chain"]
    assert drawn[drawn["what"] == "||grad J||"]["value"].tolist() == [5, 401]


def test_a_study_without_chains_says_so(tmp_path):
    rows = [{"quantity": "other", "setting": "", "value": 1.0}]
    exhibit = make([study(tmp_path / "s", rows, tables={"worlds": worlds()})])
    assert "without chains" in exhibit.caption
    assert (exhibit.table["panel"] == "links").all()


def test_worlds_without_a_gradient_are_left_out_and_counted(tmp_path):
    table = worlds((0.0, 0.1, 0.2))
    exhibit = make([study(tmp_path / "s", tables={"worlds": table})])
    assert "2 worlds without any gradient are left out" in exhibit.caption
    links = exhibit.table[exhibit.table["panel"] == "links"]
    assert np.isfinite(links["value"].astype(float)).all()


def test_worlds_of_which_none_has_a_gradient_are_refused(tmp_path):
    with pytest.raises(AnalysisError, match="no world has a gradient"):
        make([study(tmp_path / "s", tables={"worlds": worlds((0.0,))})])


def test_a_chain_of_which_a_quantity_is_missing_is_refused_by_name(tmp_path):
    rows = [row for row in chain() if row["quantity"] != "printed bound (13)"]
    with pytest.raises(AnalysisError, match=r"no printed bound \(13\) of the chain"):
        make([study(tmp_path / "s", rows, tables={"worlds": worlds()})])
