"""Hyper-parameters: which of them the paper reports, and what stands in their place here.

After the table in section 9.1 of the reading note of arXiv 2608.03068, in our words, with what a
reproduction needs besides.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from analysis.exhibit import Exhibit
from analysis.markdown import markdown
from analysis.sources import Source
from analysis.studies import short
from cvpo import METHODS, CurriculumConfig, StochasticityConfig
from cvpo.estimator import estimate_advantages

CVPO = ("cvpo", "cvpo-stochasticity", "cvpo-curriculum")
"""Methods whose runs the table reads."""

NOTHING = "-"


@dataclass(frozen=True)
class Entry:
    """A row of the table: numbers that the note lists together."""

    name: str
    reported: str
    """yes, in part or no."""
    paper: tuple[float, ...]
    """The paper's numbers, one for each key; empty where it has none."""
    remark: str
    keys: tuple[str, ...]
    """Of the trainer's configuration."""
    listed: bool = True
    """Whether the note's table has it."""


ENTRIES = (
    Entry("learning rate of actor, critic", "yes", (1e-6, 2e-6), "", ("actor.lr", "critic.lr")),
    Entry(
        "prompts of a step, rollouts of each, longest response (tokens)",
        "yes",
        (256, 16, 6144),
        "",
        ("rollout.prompts", "rollout.samples", "rollout.max_tokens"),
    ),
    Entry(
        "GAE: lambda_critic, length-adaptive alpha, gamma",
        "yes",
        (0.1, 0.17, 1.0),
        "VAPO and VC-PPO use lambda_critic = 1",
        ("algorithm.lambda_critic", "algorithm.length_adaptive_alpha", "algorithm.gamma"),
    ),
    Entry(
        "PPO clip range below, above",
        "yes",
        (0.2, 0.28),
        "",
        ("algorithm.clip_low", "algorithm.clip_high"),
    ),
    Entry("weight of the positive LM loss", "yes", (0.1,), "", ("algorithm.lm_coefficient",)),
    Entry("steps of value pretraining", "yes", (21,), "", ("pretraining.max_steps",)),
    Entry(
        "alpha_P, alpha_N",
        "in part",
        (),
        "one variance coefficient of .1, .3 or .5; how it sets the two is not said",
        ("stochasticity.alpha_p", "stochasticity.alpha_n"),
    ),
    Entry(
        "sharpness lambda_P, lambda_N",
        "no",
        (),
        "fixed, without a number",
        ("stochasticity.lambda_p", "stochasticity.lambda_n"),
    ),
    Entry(
        "early curve k1, c1, k2, c2",
        "yes",
        (1.6, -0.2, 2.0, 1.2),
        "sensitivity not tested",
        ("curriculum.early",),
    ),
    Entry(
        "bottleneck curve k1', c1', k2', c2'",
        "yes",
        (4.1, -0.1, 2.0, 0.9),
        "sensitivity not tested",
        ("curriculum.bottleneck",),
    ),
    Entry(
        "bottleneck test: low set, its |change|; high set, its change",
        "yes",
        (0.3, 0.05, 0.8, 0.03),
        "sensitivity not tested",
        ("curriculum.low", "curriculum.low_delta", "curriculum.high", "curriculum.high_delta"),
    ),
    Entry("link to the code", "no", (), "none given; this project is written from the paper", ()),
    Entry(
        "statistic of a trajectory's values",
        "in part",
        (),
        "(15)-(16) write a variance and compare it with a mean of standard deviations",
        ("stochasticity.signal",),
        listed=False,
    ),
    Entry(
        "prompts of a set that must meet the bottleneck test",
        "in part",
        (),
        "algorithm 2 prints all of them; the text does not say",
        ("curriculum.quantifier",),
        listed=False,
    ),
    Entry(
        "forgetting of the tracker",
        "yes",
        (1.0,),
        "none: counts are kept for ever",
        ("curriculum.discount",),
        listed=False,
    ),
    Entry(
        "steps between bottleneck tests",
        "no",
        (),
        "null: one pass over the prompts",
        ("curriculum.round_steps",),
        listed=False,
    ),
    Entry("updates of a step", "no", (), "", ("actor.minibatches",), listed=False),
    Entry(
        "temperature, top_p of rollouts",
        "no",
        (),
        "",
        ("rollout.temperature", "rollout.top_p"),
        listed=False,
    ),
)

_ELSEWHERE = {"pretraining.max_steps": "value_pretraining_steps"}
"""Keys that the method's declaration has under another name."""


def make(sources: Sequence[Source]) -> Exhibit:
    """The table, with the values of CVPO's runs or, without any, `cvpo`'s own defaults."""
    runs = [s for s in sources if s.method in CVPO and isinstance(s.config.get("rollout"), dict)]
    configs = [resolved(str(run.method), run.config) for run in runs] or [defaults()]
    rows = []
    for entry in ENTRIES:
        here, same = used(entry, configs)
        rows.append(
            {
                "hyper-parameter": entry.name,
                "reported": entry.reported,
                "paper": "; ".join(filter(None, [_joined(entry.paper), entry.remark])) or NOTHING,
                "here": here,
                "key": ", ".join(entry.keys) or NOTHING,
                "same": same,
                "listed": entry.listed,
            }
        )
    table = pd.DataFrame(rows)
    shown = table.assign(
        **{
            "hyper-parameter": table["hyper-parameter"]
            + table["listed"].map({True: "", False: "†"}),
            "here": table["here"].where(table["same"] != "no", "**" + table["here"] + "**"),
        }
    ).drop(columns=["same", "listed"])
    return Exhibit(_caption(runs), table, text=markdown(shown))


def resolved(method: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """A run's configuration with `declared`, the method's declaration with the run's overrides.

    Runs log it; for one that does not, it is put together from the method's own and what the run's
    section `algorithm` sets.
    """
    if isinstance(config.get("declared"), Mapping):
        return dict(config)
    given = {k: value for k, value in _section(config, "algorithm").items() if value is not None}
    steps = _section(config, "pretraining").get("max_steps")
    if steps is not None:
        given["value_pretraining_steps"] = steps
    return {**config, "declared": asdict(METHODS[method]) | given}


def defaults() -> dict[str, Any]:
    """What the library itself declares for CVPO, as a configuration."""
    gamma = inspect.signature(estimate_advantages).parameters["gamma"].default
    return {
        "declared": asdict(METHODS["cvpo"]),
        "algorithm": {"gamma": gamma},
        "stochasticity": asdict(StochasticityConfig()),
        "curriculum": asdict(CurriculumConfig()),
    }


def used(entry: Entry, configs: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """The values in words, and whether they are the paper's: yes, no, or `NOTHING` to compare."""
    found = [_values(entry.keys, config) for config in configs if _reads(entry, config)]
    if not entry.keys or not found:
        return NOTHING, NOTHING
    counts = Counter(map(_joined, found))
    text = (
        next(iter(counts))
        if len(counts) == 1
        else "; ".join(f"{values} ({n} of {len(found)} runs)" for values, n in counts.most_common())
    )
    if not entry.paper or any(value is None for values in found for value in values):
        return text, NOTHING
    return text, "yes" if all(values == list(entry.paper) for values in found) else "no"


def _reads(entry: Entry, config: Mapping[str, Any]) -> bool:
    """Whether a run's method uses the weight, W_S or W_D, that an entry's keys belong to."""
    sections = {key.split(".")[0] for key in entry.keys}
    return all(config["declared"].get(section, True) for section in sections)


def _values(keys: Sequence[str], config: Mapping[str, Any]) -> list[Any]:
    """Of each key, curves spread out; None where the configuration does not have it."""
    values: list[Any] = []
    for key in keys:
        section, name = key.split(".")
        declared = config["declared"].get(_ELSEWHERE.get(key, name))
        own = _section(config, section).get(name)
        value = declared if section in ("algorithm", "pretraining") and name != "gamma" else own
        values += list(value) if isinstance(value, (list, tuple)) else [value]
    return values


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}


def _joined(values: Sequence[Any]) -> str:
    def text(value: Any) -> str:
        if value is None:
            return NOTHING
        return short(value) if isinstance(value, (int, float)) else str(value)

    return " / ".join(map(text, values))


def _caption(runs: Sequence[Source]) -> str:
    where = (
        f"`here` is what the configurations of {len(runs)} runs of CVPO or one of its halves say "
        "(a dash: not set)"
        if runs
        else "No run of CVPO is among the logs, so `here` is what the library declares by itself; "
        "a dash stands for what only a run's configuration decides"
    )
    return (
        "CVPO's hyper-parameters: whether the paper reports them, its numbers, and those used here "
        "with the key that sets them. After section 9.1 of the reading note; † marks what a "
        f"reproduction needs and that list leaves out. {where}. Bold: other than the paper's. The "
        "curriculum's constants are all reported and none of them is tested; the constants of W_S "
        "are tested in one number and not reported."
    )
