"""What exhibits call a training, which runs are seeds of the same one, and how it is drawn.

A label is the method and whatever of W_S, W_D, lambda_critic and the prompt sampler differs from
the method's own default: ``cvpo``, ``cvpo c=.1``, ``cvpo-stochasticity (constant)``.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import matplotlib as mpl
import numpy as np

from analysis import METHOD_COLORS, AnalysisError, method_color
from analysis.exhibit import DASHES
from analysis.sources import Source
from cvpo import METHODS, CurriculumConfig, StochasticityConfig
from cvpo.stochasticity import ARMS

_ORDER = sorted(METHODS, key=lambda method: method == "cvpo")
"""Of rows and legends: CVPO last, after its two halves; methods of users after the known ones."""

_C = float(StochasticityConfig().alpha_p)

_MARKERS = "osD^vP<>Xhpd8"

_NO_MATTER = (
    "seed",
    "steps",
    "run_dir",
    "method",
    "declared",
    "evaluation.",
    "checkpoints.",
    "log.",
    "engine.",
    "warmstart.",
    "stochasticity.",
    "curriculum.",
    "model.device",
    "rollout.sampler",
    "rollout.batch_size",
    "algorithm.lambda_critic",
    "algorithm.stochasticity",
    "algorithm.curriculum",
)
"""Keys that runs of one label may differ in: they change no training, or the label has them."""


def trainings(sources: Sequence[Source]) -> list[Source]:
    """The sources that are trainings of a known method; logs of studies are none."""
    return [s for s in sources if s.method is not None and "study" not in s.config]


def label(source: Source) -> str:
    """What exhibits call a training: its method, and what differs from that method's default.

    W_S and W_D are told apart only where the method uses them. Decision: ``c`` stands for
    alpha_P = alpha_N, the one coefficient that the paper reports; its default is .3.

    Raises:
        AnalysisError: the log does not say which method it is of.
    """
    if source.method is None:
        raise AnalysisError(f"{source.path} does not say which method it is a training of")
    return " ".join([source.method, *_differences(source.method, source.config)])


def groups(sources: Sequence[Source]) -> dict[str, list[Source]]:
    """The trainings by label, in the order of rows and legends; those of a label by seed.

    Runs of one label are taken for seeds of one training. Where they differ in anything else that
    a training depends on (the learning rate, say), the label is split by it.

    Raises:
        AnalysisError: two runs of a label have one seed: a copy is no second seed.
    """
    by_label: dict[str, list[Source]] = {}
    for source in trainings(sources):
        by_label.setdefault(label(source), []).append(source)
    split: dict[str, list[Source]] = {}
    for name in sorted(by_label, key=_rank):
        for full_name, members in _split(name, by_label[name]).items():
            split[full_name] = sorted(members, key=lambda s: (s.seed is None, s.seed, s.name))
            _check_seeds(full_name, split[full_name])
    return split


def of_methods(sources: Sequence[Source]) -> tuple[list[Source], str]:
    """Without the trainings of a control arm or another setting, where methods can be compared.

    A dozen curves in one panel cannot be told apart, and those have exhibits of their own.

    Returns:
        The sources to show, all of them unless at least two methods are there as they are; and a
        sentence on what is left out, empty if nothing is.
    """
    labels = {id(source): label(source) for source in trainings(sources)}
    alone = {labels[id(s)] for s in trainings(sources) if labels[id(s)] == s.method}
    others = sorted(set(labels.values()) - alone)
    if len(alone) < 2 or not others:
        return list(sources), ""
    shown = [s for s in sources if labels.get(id(s)) not in others]
    return shown, (
        f"Left out here are {', '.join(others)}: table 1, the coefficients (figure 4) and the "
        "control arms have them."
    )


def coefficient(name: str) -> float:
    """The c of a label: alpha_P = alpha_N, where the method uses W_S."""
    found = re.search(r" c=([0-9.]+)", name)
    return float(found[1]) if found else _C


def color(name: str) -> str:
    """A label's colour: its method's, lighter below c = .3 and darker above."""
    base, c = method_color(_method(name)), coefficient(name)
    if c == _C:
        return base
    share, other = (0.6 * (1 - c / _C), "white") if c < _C else (min(2 * (c - _C), 0.6), "black")
    mine, its = (np.array(mpl.colors.to_rgb(end)) for end in (base, other))
    red, green, blue = (1 - share) * mine + share * its
    return mpl.colors.to_hex((red, green, blue))


def dash(name: str) -> Any:
    """A label's line style: solid, unless c, an arm or another setting sets it apart."""
    variant = _variant(name)
    if variant is None:
        c = coefficient(name)
        return DASHES[(c < _C) + 2 * (c > _C)]
    return DASHES[1 + variant % (len(DASHES) - 1)]


def marker(name: str) -> str:
    """A label's marker, so that no two methods, and no two arms of one, differ by colour alone."""
    variant = _variant(name)
    if variant is None:
        known = list(METHOD_COLORS)
        method = _method(name)
        variant = known.index(method) if method in known else len(known)
    return _MARKERS[variant % len(_MARKERS)]


# -------------------------------------------------------------------------------------- labels


def _differences(method: str, config: Mapping[str, Any]) -> Iterator[str]:
    """What of a training is not its method's default, one term each."""
    declared = METHODS.get(method)
    if _uses("stochasticity", method, config):
        yield from _stochasticity_terms(_section(config, "stochasticity"))
    if _uses("curriculum", method, config):
        yield from _terms(
            _section(config, "curriculum"), asdict(CurriculumConfig()) | {"round_steps": None}
        )
    for factor, symbol in (("stochasticity", "W_S"), ("curriculum", "W_D")):
        own = declared is not None and getattr(declared, factor)
        if _uses(factor, method, config) != own:
            yield f"{'without' if own else 'with'} {symbol}"
    resolved = _section(config, "declared").get("lambda_critic")
    if declared is not None and declared.critic and resolved not in (None, declared.lambda_critic):
        yield f"lambda_critic={_short(resolved)}"
    sampler = _section(config, "rollout").get("sampler", "shuffled-epochs")
    if sampler != "shuffled-epochs":
        yield f"sampler={sampler}"


def _uses(factor: str, method: str, config: Mapping[str, Any]) -> bool:
    """Whether a training uses W_S or W_D: as it was resolved, else as the method declares it."""
    resolved = _section(config, "declared").get(factor)
    if resolved is not None:
        return bool(resolved)
    return method in METHODS and bool(getattr(METHODS[method], factor))


def _stochasticity_terms(section: Mapping[str, Any]) -> Iterator[str]:
    default = asdict(StochasticityConfig())
    found = default | {key: value for key, value in section.items() if key in default}
    for short, pair in (("c", ("alpha_p", "alpha_n")), ("lambda", ("lambda_p", "lambda_n"))):
        if found[pair[0]] == found[pair[1]] != default[pair[0]]:
            yield f"{short}={_short(found[pair[0]])}"
            found |= {key: default[key] for key in pair}
    arm = found.pop("arm")
    yield from _terms(found, default)
    if arm != default["arm"]:
        yield f"({arm})"


def _terms(section: Mapping[str, Any], default: Mapping[str, Any]) -> Iterator[str]:
    for key, value in section.items():
        value = tuple(value) if isinstance(value, list) else value
        if key in default and value != default[key]:
            yield f"{key}={_short(value)}"


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}


def _short(value: Any) -> str:
    """A number without its leading zero, as the paper writes coefficients."""
    if isinstance(value, tuple):
        return "/".join(map(_short, value))
    if isinstance(value, float):
        return re.sub(r"^(-?)0\.", r"\1.", f"{value:g}")
    return str(value)


# -------------------------------------------------------------------------------------- groups


def _rank(name: str) -> tuple[int, str, float, str]:
    method = _method(name)
    known = _ORDER.index(method) if method in _ORDER else len(_ORDER)
    return known, method, coefficient(name), name


def _split(name: str, members: Sequence[Source]) -> dict[str, list[Source]]:
    """A label's runs, apart where they are not seeds of one training."""
    configs = [_flat(source.config) for source in members]
    keys = sorted({key for config in configs for key in config if not key.startswith(_NO_MATTER)})
    apart = [key for key in keys if len({repr(config.get(key)) for config in configs}) > 1]
    split: dict[str, list[Source]] = {}
    for source, config in zip(members, configs, strict=True):
        terms = [f"{key}={_short(config.get(key))}" for key in apart]
        split.setdefault(" ".join([name, *terms]), []).append(source)
    return dict(sorted(split.items()))


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _check_seeds(name: str, members: Sequence[Source]) -> None:
    for first, second in itertools.pairwise(members):
        if first.seed is not None and first.seed == second.seed:
            raise AnalysisError(
                f"{first.path} and {second.path} are both {name} with seed {first.seed}: a copy is "
                "no second seed; give one of them"
            )


# --------------------------------------------------------------------------------------- looks


def _method(name: str) -> str:
    return name.split(" ", 1)[0]


def _variant(name: str) -> int | None:
    """A number for what else than c sets a label apart from its method; None if nothing does."""
    rest = re.sub(r"^\S+( c=[0-9.]+)?", "", name).strip()
    if not rest:
        return None
    arm = rest.strip("()")
    return ARMS.index(arm) if arm in ARMS else zlib.crc32(rest.encode())
