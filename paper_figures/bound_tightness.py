"""How loose each link of the gradient bound (eq. 5-13) is, and where the printed bound breaks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from analysis import AnalysisError
from analysis.exhibit import PAGE, Exhibit, style
from analysis.sources import Source
from analysis.studies import (
    GREY,
    INK,
    SHADES,
    about,
    find_study,
    plain_log,
    read_table,
    rows_where,
)
from cvpo.metrics import bootstrap_interval

LINKS = {
    "score_times_advantage": "(5)  E[‖g‖ |A|]",
    "absolute_advantage": "(5)  C E|A|",
    "root_mean_square": "(7)  C √E[A²]",
    "deviation": "(8)  C √Var A",
    "expanded": "(9)  C √(Var Q + Var V - 2 Cov)",
    "printed": "(13)  C (σ_Q + √Var V)",
}
"""Columns ``link_*`` of the study's worlds, as the paper numbers them; g is the score."""

POLICIES = {
    "tabular": ("one logit each", INK, "o"),
    "shared": ("shared weights", SHADES[1], "s"),
}

CHAIN = {
    "||grad J||": ("episodic ‖∇J‖", SHADES[2], "-", "o", -3),
    "printed bound (13)": ("printed\nbound (13)", INK, (0, (4, 1.5)), "s", 0),
    "C sqrt(E[T] E_q[4p(1-p)])": ("sound bound", SHADES[3], (0, (5, 1.2, 1.2, 1.2)), "D", 3),
    "||grad J|| / T": ("token mean\n‖∇J‖/T", SHADES[1], (0, (1.2, 1.2)), "^", 0),
}
"""Of the chain's rows, how they are drawn; last: points by which the label is raised."""


def make(sources: Sequence[Source]) -> Exhibit:
    """Bound over true gradient in random worlds, and the chain on which (13) fails."""
    study = find_study(sources, "bound")
    numbers = ("link_gradient", *(f"link_{link}" for link in LINKS))
    worlds = read_table(study, "worlds", words=("policy",), numbers=numbers)
    moving = worlds[worlds["link_gradient"] > 0]
    if moving.empty:
        raise AnalysisError(f"{study.path}: no world has a gradient; run the study with others")
    links = tightness(moving)
    chain = on_the_chain(study)
    with style():
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(PAGE, 2.5), layout="constrained", width_ratios=[1.5, 1]
        )
        _draw_links(left, links)
        _draw_chain(right, chain)
    chain["panel"] = "chain"
    table = pd.concat([links.assign(panel="links"), chain.drop(columns=["setting", "n"])])
    return Exhibit(_caption(study, worlds, links, chain), table, figure)


def on_the_chain(study: Source) -> pd.DataFrame:
    """The study's rows of the quantities of `CHAIN`, with T and `what`; none without chains."""
    found = [
        rows_where(study, quantity, r"chain of T = (?P<T>\d+) binary actions").assign(what=quantity)
        for quantity in CHAIN
    ]
    lost = [what for what, rows in zip(CHAIN, found, strict=True) if rows.empty]
    if 0 < len(lost) < len(CHAIN):
        raise AnalysisError(
            f"{study.path}: its rows have no {', '.join(lost)} of the chain; make the study again "
            "with this version"
        )
    chain = pd.concat(found, ignore_index=True)
    return chain.assign(T=chain["T"].astype(int))


def tightness(worlds: pd.DataFrame) -> pd.DataFrame:
    """How much larger each link is than the true gradient of the token mean.

    Args:
        worlds: policy, link_gradient (positive) and the links of every world.

    Returns:
        Rows by policy and link: what, value (median ratio), low, high (its 95 % bootstrap interval
        over worlds), p5, p95 (of the worlds), over_previous (median ratio to the link before),
        holding (share of worlds in which it is at least the link before) and n.
    """
    rows = []
    for policy, mine in worlds.groupby("policy", sort=False):
        before = mine["link_gradient"].to_numpy()
        gradient = before
        for link, name in LINKS.items():
            bound = mine[f"link_{link}"].to_numpy()
            ratio = bound / gradient
            found = bootstrap_interval(
                ratio, statistic=lambda rows: np.median(rows, axis=1), num_resamples=2000
            )
            rows.append(
                {
                    "policy": policy,
                    "what": name,
                    "value": found.estimate,
                    "low": found.low,
                    "high": found.high,
                    "p5": np.quantile(ratio, 0.05),
                    "p95": np.quantile(ratio, 0.95),
                    "over_previous": np.median(bound / before),
                    "holding": np.mean(bound >= before * (1 - 1e-9)),  # but for rounding
                    "n": len(mine),
                }
            )
            before = bound
    return pd.DataFrame(rows)


def _draw_links(panel: Any, links: pd.DataFrame) -> None:
    y = np.arange(len(LINKS))[::-1]
    policies = list(dict.fromkeys(links["policy"]))
    for index, policy in enumerate(policies):
        name, color, marker = POLICIES.get(policy, (policy, GREY, "D"))
        mine = links[links["policy"] == policy]
        at = y + 0.2 * (1 - len(policies)) / 2 + 0.2 * (len(policies) - 1 - index)
        panel.hlines(at, mine["p5"], mine["p95"], color, linewidth=0.8)
        panel.plot(mine["value"], at, color=color, marker=marker, linestyle="none", label=name)
        for height, row in zip(at, mine.itertuples(), strict=True):
            panel.annotate(
                f"{row.value:.3g}",
                (row.p95, height),
                (3, 0),
                textcoords="offset points",
                va="center",
                size=5.5,
                color=color,
            )
    panel.set_xscale("log")
    panel.axvline(1, color=GREY, linewidth=0.6)
    panel.set_yticks(y, list(LINKS.values()))
    panel.set_xlabel("bound / ‖∇J‖ of the token mean (ratio)")
    panel.set_title("a  each link", loc="left")
    panel.set_xlim(0.8, 2.5 * links["p95"].max())
    plain_log(panel.xaxis)
    panel.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, handlelength=1, columnspacing=1)


def _draw_chain(panel: Any, chain: pd.DataFrame) -> None:
    panel.set_title("b  chain of T binary actions", loc="left")
    if chain.empty:
        panel.text(0.5, 0.5, "not in this log", ha="center", transform=panel.transAxes)
        return
    for what, (name, color, dash, marker, raised) in CHAIN.items():
        mine = chain[chain["what"] == what].sort_values("T")
        panel.plot(mine["T"], mine["value"], color=color, linestyle=dash, marker=marker)
        end = (mine["T"].iloc[-1], mine["value"].iloc[-1])
        panel.annotate(
            name, end, (5, raised), textcoords="offset points", va="center", color=color, size=6
        )
    panel.set_xscale("log")
    panel.set_yscale("log")
    lengths = sorted(set(chain["T"]))
    panel.set_xticks(lengths, [str(T) for T in lengths], minor=False)
    panel.set_xticks([], minor=True)
    panel.set_xlabel("tokens of a response, T")
    panel.set_ylabel("norm or bound (unit of the reward)")
    plain_log(panel.yaxis)


def _caption(study: Source, worlds: pd.DataFrame, links: pd.DataFrame, chain: pd.DataFrame) -> str:
    n = int(links.groupby("policy")["n"].first().sum())
    held = links["holding"].min()
    text = [
        "How loose the gradient bound of equations 3-13 is, link by link.",
        (
            f"(a) Each bound over the true gradient of the token mean, in {n} random worlds that "
            "are solved exactly, with a policy that has a logit for each action or weights that "
            "all tokens share: marker and number the median, line the central 90 % of the worlds; "
            "the interval of the median stands in the table."
        ),
        "Every link is at least the one before in every world."
        if held == 1
        else f"A link falls below the one before in up to {1 - held:.1%} of the worlds.",
        "C is the largest score in the world.",
    ]
    if len(worlds) > n:
        text.append(f"{len(worlds) - n} worlds without any gradient are left out.")
    if chain.empty:
        text.append("(b) is empty: the study was run without chains (key `chains`).")
    else:
        longest = chain[chain["T"] == chain["T"].max()].set_index("what")["value"]
        text.append(
            "(b) A chain of T actions in {-1, +1} with one shared logit and the sign of their sum "
            "as reward, exact: the bound as printed holds for the token mean and fails for the "
            f"episodic objective (at T = {chain['T'].max()} the gradient is "
            f"{longest['||grad J||']:.3g}, the bound {longest['printed bound (13)']:.3g}); "
            "C √(E[T] E_q[4p(1-p)]) bounds it. The paper prints (13) without that limit and shows "
            "no measurement of it."
        )
    return " ".join([*text, about(study)])
