"""How the report's page is put together, so that nothing a log says can become code."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

_HERE = Path(__file__).parent

_SHOWN = 4000
"""Characters of one text; of a longer one the middle is left out."""


def render(*, data: Mapping[str, Any], library: str, **shown: Any) -> str:
    """The page as HTML, from the template with its style and script beside it.

    Args:
        data: what the script draws.
        library: the script that it draws with.
        **shown: what the template shows; text is escaped, unless it is `Markup`.
    """
    script = _asset("page.js")
    template = _environment().get_template("page.html")
    return template.render(
        **shown,
        data=Markup(_json(data)),
        style=Markup(_asset("page.css")),
        library=Markup(library),
        script=Markup(script),
        allowed=" ".join(map(_hash, (library, script))),
    )


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["percent"] = lambda share: f"{100 * share:.0f} %"
    environment.filters["points"] = _points
    return environment


def _points(change: float) -> str:
    """A change of a share in percentage points, with a true minus."""
    if math.isnan(change):
        return "-"
    return f"{round(100 * change):+d}".replace("-", "\N{MINUS SIGN}")


def visible(value: object) -> object:
    """Text of a log as it is printed: nothing in it is invisible, reorders the page, or is endless.

    Control characters are shown as their pictures, those that change the direction of writing and
    halves of surrogate pairs by their code point.
    """
    if type(value) is not str:  # Markup is the page's own
        return value
    if len(value) > _SHOWN:
        left_out = len(value) - _SHOWN
        half = _SHOWN // 2
        value = f"{value[:half]}\n[... {left_out:,} characters left out ...]\n{value[-half:]}"
    return "".join(map(_shown, value))


def _shown(character: str) -> str:
    if character.isprintable() or character in "\n\t\N{NO-BREAK SPACE}":
        return character
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    return "\N{SYMBOL FOR DELETE}" if code == 0x7F else f"\u27e8U+{code:04X}\u27e9"


def _json(data: Mapping[str, Any]) -> str:
    """Data that no text in it can end, inside a script element."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _asset(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """A script's name in a content security policy."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
