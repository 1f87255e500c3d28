"""Figure 1: the tokens of the highest mean value, as a word cloud over the table behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont
from wordcloud import WordCloud

from analysis import AnalysisError
from analysis.exhibit import COLUMN, FONT, Exhibit, drawable, style
from analysis.selection import describe, headline, holding, paragraph, recent
from analysis.sources import Source

MIN_COUNT = 30
"""A token has to have been chosen so often: the mean of fewer values is mostly noise."""

WORDS = 60
"""At most so many are drawn, those of the highest mean; the table has all."""

_COLUMNS = ("step", "token_id", "token", "count", "value_sum", "value_sq_sum")
_MARKS = {" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"}
_PIXELS, _SCALE = (680, 400), 3
_COLORS = mpl.colors.LinearSegmentedColormap.from_list(
    "value", mpl.colormaps["cividis_r"](np.linspace(0.25, 1.0, 256))
)


def make(sources: Sequence[Source]) -> Exhibit:
    """The tokens of CVPO's last logged step, pooled over its seeds.

    Raises:
        AnalysisError: no run logged token values, or no token was chosen often enough.
    """
    selection = holding(
        sources,
        "tokens",
        ["value_sum", "value_sq_sum"],
        remedy="train a method that has a critic with log.tokens_every above 0",
    )
    label = headline(selection.groups)
    frames = {run.name: recent(run, "tokens", _COLUMNS, 1)[-1] for run in selection.groups[label]}
    step = max(int(frame["step"].iloc[0]) for frame in frames.values())
    pooled = [run for run in selection.groups[label] if (frames[run.name]["step"] == step).all()]
    table = mean_values(pd.concat([frames[run.name] for run in pooled]))
    kept = table[table["count"] >= MIN_COUNT]
    if kept.empty:
        raise AnalysisError(
            f"{label}, step {step}: no token was chosen {MIN_COUNT} times or more; log a step with "
            "more responses"
        )
    with style():
        figure, drawn = _draw(kept.head(WORDS))
    behind = [run.name for run in selection.groups[label] if run not in pooled]
    caption = paragraph(
        f"Tokens by the critic's mean value at step {step} of {describe({label: pooled})}: the "
        "larger and darker, the higher. The value is that of the state in which the token was "
        "chosen, before it is read: it says how good the place looked, not what the token did, and "
        "a token that ends responses carries what is known at the end.",
        f"Shown are {_how_many(drawn, len(kept))}, over {table['count'].sum():,} tokens; "
        f"{len(table) - len(kept)} of {len(table)} entries were chosen fewer than {MIN_COUNT} "
        "times and are in the table only.",
        "␣ is a space, ↵ a line feed; what the font lacks is written as its code.",
        "The table's standard errors take tokens as independent, which those of one response are "
        "not.",
        *(f"{name} has not come to step {step} and is left out." for name in behind),
        *selection.notes,
    )
    return Exhibit(caption, table.assign(label=label, step=step), figure)


def mean_values(rows: pd.DataFrame) -> pd.DataFrame:
    """Mean value of each token with its spread, from the run log's sums; the highest mean first.

    Args:
        rows: token_id, token, count, value_sum and value_sq_sum; a token may stand in several.

    Returns:
        token_id, token, count, mean, sd (n - 1) and standard_error, in reward; NaN where the count
        is 1.
    """
    sums = rows.groupby(["token_id", "token"], as_index=False)[
        ["count", "value_sum", "value_sq_sum"]
    ].sum()
    n, total = sums["count"], sums["value_sum"]
    mean = total / n
    variance = ((sums["value_sq_sum"] - total * mean) / (n - 1).where(n > 1)).clip(lower=0)
    sd = np.sqrt(variance)
    table = sums[["token_id", "token", "count"]].assign(
        mean=mean, sd=sd, standard_error=sd / np.sqrt(n)
    )
    return table.sort_values(["mean", "token_id"], ascending=[False, True], ignore_index=True)


def visible(token: str) -> str:
    """A token with its white space as signs, and what cannot be drawn as its code."""
    return drawable("".join(_MARKS.get(sign, sign) for sign in token)) or "(empty)"


def _how_many(shown: int, kept: int) -> str:
    return f"all {kept} tokens" if shown == kept else f"the {shown} highest of {kept} tokens"


def _draw(shown: pd.DataFrame) -> tuple[Figure, int]:
    """The cloud, and how many words found room in it, from the highest mean on."""
    words = [visible(token) for token in shown["token"]]
    # several entries may look alike, such as pieces of one character
    words = [
        word if words.count(word) == 1 else f"{word}#{token_id}"
        for word, token_id in zip(words, shown["token_id"], strict=True)
    ]
    mean = dict(zip(words, shown["mean"], strict=True))
    low, high = min(mean.values()), max(mean.values())
    norm = mpl.colors.Normalize(low, high if high > low else low + 1e-9)

    def paint(word: str, **_: Any) -> str:
        return mpl.colors.to_hex(_COLORS(norm(mean[word])))

    cloud = WordCloud(
        font_path=findfont(FONT),
        width=_PIXELS[0],
        height=_PIXELS[1],
        scale=_SCALE,
        background_color="white",
        prefer_horizontal=1.0,  # a turned \boxed or minus is hard to read
        relative_scaling=1.0,  # size follows the value, not the rank
        max_words=len(words),
        max_font_size=_PIXELS[1] // 4,
        min_font_size=7,
        color_func=paint,
        random_state=0,
    )
    # the smallest word is a quarter of the largest
    cloud.generate_from_frequencies({word: 0.25 + 0.75 * norm(mean[word]) for word in words})
    figure = plt.figure(figsize=(COLUMN, COLUMN * 0.68), layout="constrained")
    panel = figure.add_subplot()
    panel.imshow(cloud.to_array())
    panel.set_axis_off()
    bar = figure.colorbar(
        mpl.cm.ScalarMappable(norm, _COLORS),
        ax=panel,
        orientation="horizontal",
        shrink=0.7,
        aspect=40,
        pad=0.03,
    )
    bar.set_label("mean value V of the state (reward)")
    bar.outline.set_visible(False)
    return figure, len(cloud.layout_)
