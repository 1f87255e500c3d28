"""How well the tracker follows drift of difficulty, by how much of the past it forgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from analysis import AnalysisError
from analysis.exhibit import DASHES, PAGE, Exhibit, style
from analysis.sources import Source
from analysis.studies import (
    GREY,
    SHADES,
    about,
    find_study,
    plain_log,
    read_table,
    rows_where,
    short,
)
from cvpo.metrics import paired_t_interval

COVERAGE = 0.9
"""Nominal, of the study's credible intervals."""
REAL = "a real run"
MARKERS = ("o", "s", "^", "v", "D")
"""Markers of the kinds of drift, in their order."""
LAGS = {"50% of the jump": 0, "90% of the jump": 1}


def make(sources: Sequence[Source]) -> Exhibit:
    """Error of rho, coverage of its interval, and lag behind a jump, by discount."""
    study = find_study(sources, "tracker")
    by_seed = read_table(
        study,
        "tracker_seeds",
        words=("world", "tracker"),
        numbers=("seed", "truth_error", "covered"),
        key=("world", "tracker", "seed"),
    )
    real = real_errors(study)
    found = pd.concat([_tidy(real), synthetic(by_seed), lags(study)], ignore_index=True)
    drawn = found[found["discount"].notna()]
    if drawn.empty:
        raise AnalysisError(
            f"{study.path}: no discount of the Beta tracker was measured; set discounts=[...]"
        )
    discounts = sorted(set(drawn["discount"]), reverse=True)
    of_drift = drawn[drawn["quantity"] != "lag"]["drift"]
    drifts = {name: index for index, name in enumerate(dict.fromkeys(of_drift))}
    with style():
        figure, panels = plt.subplots(1, 3, figsize=(PAGE, 2.6), layout="constrained")
        titles = ("a  error of the tracked rate", "b  credible intervals", "c  lag behind a jump")
        for panel, quantity, title in zip(
            panels, ("error", "coverage", "lag"), titles, strict=True
        ):
            mine = drawn[drawn["quantity"] == quantity]
            _draw(panel, mine, discounts, LAGS if quantity == "lag" else drifts)
            panel.set_title(title, loc="left")
            panel.set_xlabel("discount of the tracker (1: the paper)")
            if quantity != "coverage" and (mine["value"] > 0).any():
                panel.set_yscale("log")
                plain_log(panel.yaxis)
        panels[0].set_ylabel("rms error of ρ (success rate)")
        panels[1].axhline(COVERAGE, color=GREY, linewidth=0.6)
        panels[1].set_ylabel("prompts covered (share)")
        panels[2].set_ylabel("rounds")
        panels[2].legend()
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=5)
    return Exhibit(_caption(study, found, real), found, figure)


def real_errors(study: Source) -> pd.DataFrame:
    """Rows of `make`'s table for the real run, n its prompts, and the number of `predictions`.

    None if the study was made without one.
    """
    setting = r"real run, (?P<predictions>\d+) predictions: (?P<tracker>.+)"
    rows = rows_where(study, "squared error of rho", setting)
    ends = rows[["value", "low", "high"]].clip(lower=0).pow(0.5)
    return rows.assign(quantity="error", drift=REAL, **ends)


def synthetic(by_seed: pd.DataFrame) -> pd.DataFrame:
    """Errors and coverages over seeds, worlds of one speed averaged over their shapes first.

    Args:
        by_seed: world, tracker, seed, truth_error (squared) and covered.

    Returns:
        Rows by quantity, drift and tracker. value, low, high: mean over seeds and its 95 % t
        interval, of the error the root of both; n: seeds.
    """
    speed = by_seed["world"].str.extract(r"growth (.+)$")[0]
    kind = ("improving, " + speed + " a round").fillna(by_seed["world"])
    mean = by_seed.assign(drift=kind).groupby(["drift", "tracker", "seed"], sort=False)
    means = mean[["truth_error", "covered"]].mean().reset_index()
    rows: list[dict[str, Any]] = []
    for (drift, tracker), mine in means.groupby(["drift", "tracker"], sort=False):
        for quantity, column, power in (("error", "truth_error", 0.5), ("coverage", "covered", 1)):
            x = mine[column].to_numpy()
            interval = paired_t_interval(x, np.zeros_like(x))
            ends = np.clip([interval.estimate, interval.low, interval.high], 0, 1) ** power
            rows.append(
                {"quantity": quantity, "drift": drift, "tracker": tracker, "n": len(x)}
                | dict(zip(("value", "low", "high"), ends, strict=True))
            )
    return _tidy(pd.DataFrame(rows))


def lags(study: Source) -> pd.DataFrame:
    """Rounds until rho has covered a half and most of a jump; NaN: never."""
    frames = [
        rows_where(
            study, f"rounds to {share} of a jump to 0.9", r"(?P<tracker>[^;]+)(; .*)?", never=True
        ).assign(quantity="lag", drift=f"{share} of the jump")
        for share in ("50%", "90%")
    ]
    return _tidy(pd.concat(frames))


def _tidy(rows: pd.DataFrame) -> pd.DataFrame:
    discount = rows["tracker"].str.extract(r"^beta (.+)$")[0].astype(float)
    columns = ["quantity", "drift", "tracker", "discount", "value", "low", "high", "n"]
    return rows.assign(discount=discount)[columns].reset_index(drop=True)


def _draw(
    panel: Any, rows: pd.DataFrame, discounts: Sequence[float], looks: Mapping[str, int]
) -> None:
    """Lines over discounts, which stand at equal distances."""
    for drift, mine in rows.groupby("drift", sort=False):
        ordered = mine.sort_values("discount", ascending=False)
        x = [discounts.index(discount) for discount in ordered["discount"]]
        look = looks[str(drift)]
        color = SHADES[look % len(SHADES)]
        panel.fill_between(x, ordered["low"], ordered["high"], color=color, alpha=0.2, linewidth=0)
        panel.plot(
            x,
            ordered["value"],
            color=color,
            linestyle=DASHES[look % len(DASHES)],
            marker=MARKERS[look % len(MARKERS)],
            label=drift,
        )
    panel.set_xticks(range(len(discounts)), map(short, discounts))


def _caption(study: Source, found: pd.DataFrame, real: pd.DataFrame) -> str:
    growth = study.config.get("growths", [])
    text = [
        (
            "What the tracker of success rates loses by never forgetting, against the discount d "
            "with which it forgets."
        ),
        (
            "(a) Root mean squared error of rho against the true rate after each round, in "
            f"synthetic drift ({study.config.get('num_prompts', '?')} prompts, "
            f"{study.config.get('rounds', '?')} rounds of 16 rollouts, the first "
            f"{study.config.get('burn_in', '?')} not scored; logits grow by "
            f"{' or '.join(map(short, growth))} a round, three shapes averaged; the plateau stops "
            "half-way)."
        ),
    ]
    if real.empty:
        text.append("The study was made without a real run, so none is shown.")
    else:
        text.append(
            f"In the real run there is no truth: rho predicts the next "
            f"{study.config.get('replay_trials') or 'few'} rollouts of a prompt "
            f"({int(real['predictions'].iloc[0]):,} predictions), whose own noise is part of the "
            f"error; its interval is over {real['n'].max():,} prompts, and coverage is not known."
        )
    text.append(
        f"(b) Share of prompts and rounds whose {COVERAGE:.0%} credible interval holds the true "
        "rate; grey: nominal."
    )
    lag = found[found["quantity"] == "lag"]
    never = lag.loc[lag["value"].isna(), "tracker"].unique().tolist()
    text.append(
        "(c) Rounds that rho needs to cover a half and nine tenths of a jump from 0 to .9 after 20 "
        "rounds of failures, with expected counts (exact)."
    )
    if never:
        text.append(f"Not reached in 1000 rounds: {', '.join(never)}.")
    text.append(
        "Bands are 95 % t intervals over seeds. Other trackers stand in the table. The paper's "
        "tracker never forgets (d = 1), and the paper does not measure how well it follows."
    )
    return " ".join([*text, about(study)])
