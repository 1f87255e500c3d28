r"""The string normal form behind the `normalized` and `symbolic` verifiers.

The rules are the ones public graders agree on (MATH, Minerva, Qwen2.5-Math, Math-Verify): LaTeX
that only changes the looks goes, units and currency go, numbers get one spelling, `x = 5` means
`5`. Nothing is computed: `2/4` is not `1/2` here. All of it is text in, text out, without
recursion; the caller bounds the length.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class NormalAnswer:
    """An answer taken apart.

    Attributes:
        value: The normal form.
        name: What the value was assigned to (`x` of `x = 5`), or "".
        unit: The unit that was dropped, in one spelling, or "" (none, or not a known unit).
        choice: The letter of an option given with its text, `E` of `(E) 42`, or "".
    """

    value: str
    name: str
    unit: str
    choice: str = ""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# --- looks: characters and commands that do not change the meaning ---------------------------

_GREEK = "αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΠΣΦΨΩ"
_GREEK_NAMES = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau "
    "upsilon phi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega"
)
_CHARACTERS = {
    **{code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)},  # full-width ASCII
    **dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff\x00"), ""),
    **dict.fromkeys(map(ord, "\u00a0\u2009\u202f\u3000"), " "),
    **dict.fromkeys(map(ord, "−–‐‑"), "-"),
    **dict.fromkeys(map(ord, "×·⋅∙"), r"\cdot "),
    ord("½"): r"\frac{1}{2}",
    ord("¼"): r"\frac{1}{4}",
    ord("¾"): r"\frac{3}{4}",
    ord("÷"): "/",
    ord("⁄"): "/",
    ord("∞"): r"\infty ",
    ord("√"): r"\sqrt ",
    ord("≤"): r"\leq ",
    ord("≥"): r"\geq ",
    ord("≠"): r"\neq ",
    ord("±"): r"\pm ",
    ord("∪"): r"\cup ",
    ord("∩"): r"\cap ",
    ord("∈"): r"\in ",
    ord("∅"): r"\emptyset ",
    ord("°"): r"^\circ ",
    ord("、"): ",",
    ord("。"): ".",
    **{ord(mark): f"\\{name} " for mark, name in zip(_GREEK, _GREEK_NAMES.split(), strict=True)},
}

_RAISED, _LOWERED = "⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "₋₀₁₂₃₄₅₆₇₈₉"
_SCRIPT_DIGITS = str.maketrans(_RAISED + _LOWERED, "-0123456789" * 2)
_SCRIPTS = re.compile(f"[{_RAISED}]+|[{_LOWERED}]+")
_ROOT_OF_NUMBER = re.compile(r"√ ?([0-9]+(?:\.[0-9]+)?)")

_SYNONYMS = {
    "dfrac": "frac",
    "tfrac": "frac",
    "cfrac": "frac",
    "dbinom": "binom",
    "tbinom": "binom",
    "le": "leq",
    "leqslant": "leq",
    "ge": "geq",
    "geqslant": "geq",
    "ne": "neq",
    "times": "cdot",
    "varnothing": "emptyset",
    "degree": "circ",
    "lbrace": "{",
    "rbrace": "}",
    "land": "wedge",
    "lor": "vee",
}
_PLAIN = {
    "lt": "<",
    "gt": ">",
    "vert": "|",
    "lvert": "|",
    "rvert": "|",
    "mid": "|",
    "lbrack": "[",
    "rbrack": "]",
    "colon": ":",
    "slash": "/",
}
# Layout commands; dropped. The fonts among them leave their braces, which are dropped later.
_LAYOUT = _words(
    "left right middle big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr displaystyle "
    "textstyle scriptstyle limits nolimits boxed fbox quad qquad thinspace enspace space "
    "medspace thickspace negthinspace nonumber hfill newline rm bf it"
)
_ARGUMENTS = {"\\frac": 2, "\\binom": 2, "\\sqrt": 1, "\\mathbb": 1, "\\mathcal": 1}
_TEXT_COMMANDS = _words(
    "text textbf textit textrm textsf texttt textnormal textup emph mbox hbox mathrm mathbf mathit "
    "mathsf mathtt mathnormal boldsymbol bm operatorname"
)
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_TEXT_IN_TEXT = re.compile(r"\\text\s*\{\s*(\\text\s*\{[^{}]*\})\s*\}")
_SPACES = re.compile(r"\s+")
_MATH_DOLLAR = re.compile(r"(?<!\\)\$")
_COMMAND = re.compile(r"\\([A-Za-z]+)\s?")
_DELIMITER = re.compile(r"(?<!\\)\\[()\[\]]")
_HSPACE = re.compile(r"\\[hv]space\*?\s*\{[^{}]*\}")
_NOT_EQUAL = re.compile(r"\\not ?=")
_NEGATIVE_SPACE = re.compile(r"\\!\s*")
_SPACE = re.compile(r"(?<!\\)\\[,;:> \n]|~")
_INVISIBLE_DELIMITER = re.compile(r"\\(left|right)\s*\.")
_COMMA_GROUP = re.compile(r"(?<!\\)\{\s*,\s*\}")
_CURRENCY = {"\\$": "dollar", "€": "euro", "£": "poundsterling", "¥": "yen"}
_CIRC = re.compile(
    r"(?:\{ ?\} ?)?(?:\^ ?\{ ?\\circ ?\}|\^ ?\\circ(?![A-Za-z])|(?<=\d) ?\\circ(?![A-Za-z]))"
    r"(?: ?(?:\\text ?\{ ?[CF] ?\}|[CF](?![A-Za-z])))?"
)
_PERCENT = re.compile(r"\\?%|(?<![A-Za-z])(?:percent(?:age)?|pct)(?![A-Za-z])")
_LIST_WORD = re.compile(
    r",? ?\\text ?\{ ?(?:and|or) ?\} ?|,? ?(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]) ?"
)
_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|.", re.DOTALL)
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_ROW_END = re.compile(r"\\\\\s*(?=\\end\{)")
_PROSE_PREFIX = re.compile(
    r"^\s*(?:the\s+)?(?:final\s+|correct\s+)?answer\s*(?:is\s*:?|:)\s*", re.IGNORECASE
)


def _rename(match: re.Match[str]) -> str:
    name = match[1]
    if name in _LAYOUT:
        return " "
    if name in _TEXT_COMMANDS:
        return "\\text"
    if name in _PLAIN:
        return _PLAIN[name]
    return match[0].replace(name, _SYNONYMS.get(name, name))


def _script(match: re.Match[str]) -> str:
    """All of `2¹⁰` is one exponent."""
    return f"{'^' if match[0][0] in _RAISED else '_'}{{{match[0].translate(_SCRIPT_DIGITS)}}}"


def _brace_arguments(text: str) -> str:
    r"""`\frac12`, `\frac1{2}`, `\sqrt3`, `\sqrt(3)` with every argument in braces."""
    tokens = _TOKEN.findall(text)
    closing: dict[int, int] = {}
    opened: list[tuple[str, int]] = []
    for i, token in enumerate(tokens):
        if token in "{(":
            opened.append((token, i))
        elif token in "})" and opened and opened[-1][0] == ("{" if token == "}" else "("):
            closing[opened.pop()[1]] = i

    before: dict[int, str] = {}
    after: dict[int, str] = {}

    def drop_space(i: int) -> int:
        while i < len(tokens) and not tokens[i].strip():
            tokens[i] = ""
            i += 1
        return i

    for i, token in enumerate(tokens):
        arguments = _ARGUMENTS.get(token, 0)
        at = i + 1
        for _ in range(arguments):
            at = drop_space(at)
            if token == "\\sqrt" and tokens[at : at + 1] == ["["]:  # \sqrt[3]2
                degree = tokens[at : at + 8]
                at = drop_space(at + degree.index("]") + 1) if "]" in degree else len(tokens)
            if at >= len(tokens):
                break
            if tokens[at] == "{":
                if at not in closing:
                    break
                at = closing[at] + 1
            elif token == "\\sqrt" and tokens[at] == "(" and at in closing:
                end = closing[at]
                tokens[at], tokens[end] = "{", "}"
                at = end + 1
            elif tokens[at].isalnum() or tokens[at] == "\\pi":
                before[at], after[at] = "{", "}"
                at += 1
            else:
                break
    return "".join(before.get(i, "") + token + after.get(i, "") for i, token in enumerate(tokens))


def clean_latex(text: str) -> str:
    r"""The answer with everything dropped that only changes its looks.

    Keeps what carries meaning or tells a unit: `\text{...}` (in this one spelling), `\%`,
    `^\circ`, assignments and spaces.
    """
    text = _ROOT_OF_NUMBER.sub(r"\\sqrt{\1}", _SCRIPTS.sub(_script, text))
    text = _SPACES.sub(" ", text.translate(_CHARACTERS))
    text = _MATH_DOLLAR.sub(" ", text)
    # In a matrix a doubled backslash is a new row, elsewhere an escape left in by JSON or Python.
    text = text.replace("\\\\", r" \\ " if "\\begin" in text else "\\")
    text = _ROW_END.sub("", text)
    text = _NEGATIVE_SPACE.sub("", text)
    text = _COMMA_GROUP.sub(",", text)
    text = _DELIMITER.sub(" ", text)
    text = _HSPACE.sub(" ", text)
    text = _SPACE.sub(" ", text)
    text = _INVISIBLE_DELIMITER.sub(" ", text)
    text = _NOT_EQUAL.sub(r"\\neq ", _SPACES.sub(" ", _COMMAND.sub(_rename, text)))
    text = _TEXT_IN_TEXT.sub(r"\1", text)
    text = _LIST_WORD.sub(", ", text)
    text = _PERCENT.sub(r"\\%", text.replace("\\text{\\%}", "\\%"))
    text = _brace_arguments(text)
    return _strip_outer(_PROSE_PREFIX.sub("", text))


def _strip_outer(text: str) -> str:
    """Drop outer space, final punctuation, and braces around the whole."""
    text = text.strip().rstrip(".,;:").strip()
    closing: dict[int, int] = {}
    opened: list[int] = []
    for match in _BRACE.finditer(text):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            closing[opened.pop()] = match.start()
    start, end = 0, len(text)
    while closing.get(start) == end - 1 > start:
        start, end = start + 1, end - 1
    return text[start:end].strip()


# --- units -----------------------------------------------------------------------------------

_UNIT_SPELLINGS = {
    "dollar": "dollar dollars usd buck bucks",
    "cent": "cent cents",
    "euro": "euro euros",
    "poundsterling": "gbp",
    "yen": "yen",
    "rupee": "rupee rupees rs",
    "mm": "mm millimeter millimeters millimetre millimetres",
    "cm": "cm centimeter centimeters centimetre centimetres",
    "m": "m meter meters metre metres",
    "km": "km kilometer kilometers kilometre kilometres",
    "inch": "inch inches in",
    "foot": "foot feet ft",
    "yard": "yard yards yd",
    "mile": "mile miles",
    "g": "g gram grams",
    "kg": "kg kilogram kilograms",
    "mg": "mg milligram milligrams",
    "pound": "pound pounds lb lbs",
    "ounce": "ounce ounces oz",
    "ton": "ton tons tonne tonnes",
    "liter": "l liter liters litre litres",
    "ml": "ml milliliter milliliters",
    "gallon": "gallon gallons gal",
    "second": "s sec secs second seconds",
    "minute": "min mins minute minutes",
    "hour": "h hr hrs hour hours",
    "day": "day days",
    "week": "week weeks",
    "month": "month months",
    "year": "year years yr yrs",
    "degree": "degree degrees deg",
    "radian": "radian radians rad",
    "mph": "mph",
    "kmh": "kmh kph",
    "am": "am",
    "pm": "pm",
    "unit": "unit units",
}
_UNITS = {word: unit for unit, words in _UNIT_SPELLINGS.items() for word in words.split()}
_UNIT_FILLERS = _words("square cubic sq cu per of a the")
# Words that follow a number and change it, so are no units.
_OPERATORS = _words(
    "mod choose plus minus times over divided squared cubed factorial hundred thousand million "
    "billion trillion mil mln bn half third quarter dozen sin cos tan cot sec csc log exp sqrt "
    "root inf infinity not but if when where for base than from " + _GREEK_NAMES
)
_TRAILING_TEXT = re.compile(r"\\text\{([^{}]*)\}\s*(?:\^\s*\{?\s*[0-9]\s*\}?)?\s*$")
_TRAILING_WORDS = re.compile(
    r"(?<![A-Za-z\\])([A-Za-z][A-Za-z./]*(?: +[A-Za-z][A-Za-z./]*){0,4})"
    r" *(?:\^ ?\{?[0-9]\}?)? *$"
)
# 4000千克, 30元: no space and no known spelling, but no variable either. 5万 is 50000.
_TRAILING_IDEOGRAPHS = re.compile(
    r"(?<=[\d}]) ?(?![十百万萬亿億半]|千(?![克米瓦卡])|分之)"
    r"[\u3041-\u30ff\u3400-\u9fff\uac00-\ud7af]+ *$"
)
_PURE_NUMBER = re.compile(r"[-+]?(?:[\d,. /]+|\d* ?\\frac\{\d+\}\{\d+\})")
_ENDS_QUANTITY = re.compile(r"(?:\d|\}|\)|\\pi)\s*$")


def _known_unit(phrase: str) -> str | None:
    """The unit's one spelling, "" if the phrase has only unknown words, None if it mixes both."""
    # Capitals are no units when alone: 5 M is 5 million.
    lower = phrase.lower() if len(phrase) > 1 or phrase == "L" else phrase
    words = [word for word in re.split(r"[ /]+", lower.replace(".", "")) if word]
    units = [_UNITS.get(word, "") for word in words if word not in _UNIT_FILLERS]
    if units and all(units):
        return " ".join(units)
    return "" if not any(units) else None


def split_unit(text: str) -> tuple[str, str]:
    r"""Take a trailing unit (`\text{ cm}^2`, `miles per hour`, `\%`, `^\circ`) or currency off."""
    unit = ""
    for sign, name in _CURRENCY.items():
        if sign in text:
            unit, text = name, text.replace(sign, " ")
    text = text.strip()
    if _CIRC.search(text):
        unit, text = "degree", _CIRC.sub("", text).strip()
    if text.endswith("\\%"):
        return text[:-2].strip(), "%"
    text = _TRAILING_IDEOGRAPHS.sub("", text)
    if match := _TRAILING_TEXT.search(text):
        head = text[: match.start()].strip()
        phrase = match[1].strip()
        quantity = _ENDS_QUANTITY.search(head) and any(char.isdigit() for char in head)
        quantity = quantity and _OPERATORS.isdisjoint(phrase.lower().split())
        # 2\text{i} and 2\mathbf{AB} are quantities without a unit.
        if quantity and (_known_unit(phrase) or not (len(phrase) == 1 or phrase.isupper())):
            return head, _known_unit(phrase) or unit
    elif match := _TRAILING_WORDS.search(text):
        before, phrase = text[: match.start()], match[1]
        head = before.strip()
        words = [word for word in re.split(r"[ /]+", phrase.replace(".", "")) if word]
        plain = len(words[0]) > 1 or "/" in phrase  # not the variables of 2 m
        if _known_unit(phrase) and _ENDS_QUANTITY.search(head) and plain:
            return head, _known_unit(phrase) or unit
        noun = all(len(word) > 2 and word.islower() and word not in _OPERATORS for word in words)
        spaced = before != head  # not the product 2abc
        if noun and spaced and _PURE_NUMBER.fullmatch(head):
            return head, unit
    return text, unit


# --- numbers, names, letters -----------------------------------------------------------------

_GROUPED = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?!,?\d)")
_SPACE_GROUPED = re.compile(r"(?<![\d.,] )(?<![\d.,])[1-9]\d{0,2}(?: \d{3})+(?! ?\d)")
_BARE_POINT = re.compile(r"(?<![\w.])\.(?=\d)")
_LEADING_ZEROS = re.compile(r"(?<![\d.])(?<!\d,)0+(?=\d)")  # 3,05 may be 3.05, not 3 and 5
_DECIMAL = re.compile(r"(?<![\d.])\d+\.\d+(?![\d.])")
_MIXED = re.compile(r"(?<![\d./])(\d+) +(\d+)/(\d+)(?![\d/.])")
_SYMBOL = r"\\sqrt\{\w+\}|\\pi(?![A-Za-z])|[A-Za-z]"
_NUMBER = r"\d+(?:\.\d+)?"
_SLASH = re.compile(  # not 1/2x, of which nobody knows what is below the bar
    rf"(?<![\w./^}}\\)])(\d*(?:{_SYMBOL})|{_NUMBER}) ?/ ?({_SYMBOL}|{_NUMBER})"
    r"(?![\w./(^{]|\\(?!end|\\))"
)
_SPELLINGS = (
    (re.compile(r"(^|[(\[,={])\+"), r"\1"),  # +7, (1,+\infty)
    # The minus of one term only: \frac{-1+i}{2} is not -\frac{1+i}{2}.
    (re.compile(r"(^|[(\[,={])\\frac\{-([\w.]+|\d*\\pi)\}"), r"\1-\\frac{\2}"),
    (re.compile(r"([_^])\{(\w)\}"), r"\1\2"),
)
_LOOSE_SPACE = re.compile(r"(?<!\d) | (?!\d)")
_NAME = (
    r"\|?(?:\\?text\{[^{}]*\}|\\[A-Za-z]+|[A-Z]{2,4}|[A-Za-z]{4,}|[A-Za-z])'*"
    r"(?:_(?:\w|\{\w+\}))?(?:\([A-Za-z](?:,[A-Za-z])*\))?\|?"
)
_ASSIGNMENT = re.compile(rf"({_NAME})(?:=|\\in(?![A-Za-z]))([^=<>]+)")
_CHOICE = re.compile(r"\(([A-Za-z])\)|\[([A-Z])\]|([A-Z])[.):]")
# Listing several options is no answer.
_OPTION = re.compile(r"(?:\(([A-Z])\)[:.]?|([A-Z])[.:)] ) ?(.+)")
_OTHER_LETTER = re.compile(r"(?<![A-Za-z])[A-Z](?![A-Za-z])")
_TEXT_ATOM = re.compile(r"\\text ?\{ ?([A-Za-z]|-?[\d.,]+) ?\}")
_WORD = re.compile(r"[A-Za-z]{3,}")


def _outside_brackets(pattern: re.Pattern[str], drop: str, text: str) -> str:
    """Drop a character from the matches that stand in no bracket: (1,000) is a pair."""
    depths, depth = [], 0
    for i, char in enumerate(text):
        if char in "([" or (char == "{" and text[i - 1 : i] == "\\"):
            depth += 1
        elif char in ")]" or (char == "}" and text[i - 1 : i] == "\\"):
            depth -= 1
        depths.append(depth)
    return pattern.sub(
        lambda match: match[0] if depths[match.start()] else match[0].replace(drop, ""), text
    )


def _one_number_spelling(text: str) -> str:
    text = _outside_brackets(_GROUPED, ",", text)
    text = _outside_brackets(_SPACE_GROUPED, " ", text)
    text = _BARE_POINT.sub("0.", text)
    text = _LEADING_ZEROS.sub("", text)
    return _DECIMAL.sub(lambda match: match[0].rstrip("0").rstrip("."), text)


def _split_name(text: str) -> tuple[str, str]:
    """Split `x=5` into name and value, and `x=1,x=2` into x and `1,2`."""
    if match := _ASSIGNMENT.fullmatch(text):
        return match[1], match[2]
    parts = [_ASSIGNMENT.fullmatch(part) for part in text.split(",")]
    names = {part[1] for part in parts if part}
    if len(names) == 1 and all(parts):
        return names.pop(), ",".join(part[2] for part in parts if part)
    return "", text


def take_apart(text: str) -> NormalAnswer:
    """The normal form of an answer, with the name and the unit it was given under."""
    text, unit = split_unit(clean_latex(text))
    text = _SPACES.sub(" ", _TEXT.sub(r"\1", text)).strip()
    option = _OPTION.fullmatch(text)
    choice = option[1] or option[2] if option and not _OTHER_LETTER.search(option[3]) else ""
    text = _one_number_spelling(text)
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    text = _SLASH.sub(r"\\frac{\1}{\2}", text)
    text = _LOOSE_SPACE.sub("", text).replace(";", ",").replace("*", "\\cdot")
    name, text = _split_name(text)
    text = _strip_outer(text)
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    if letter := _CHOICE.fullmatch(text):
        text = letter[1] or letter[2] or letter[3]
    return NormalAnswer(text.lower() if _WORD.fullmatch(text) else text, name, unit, choice)


# What Math-Verify reads as something else: 25_8 as 25, f' as f; 2 3, 2{3} and {2}{3} as 2 + 3;
# 5!! as (5!)!, 2^3^2 as 8^2, A^T as A; any two sets \{x : ...\} as equal; 3,05 as 3 and 5.
_MISREAD = re.compile(
    r"\d ?_|'|\\prime|\\equiv|(?<!_)\d \d|(?<![\d_^])\d+ ?\{|(?<![\w\]}^_])\{\d+\} ?\{"
    r"|! ?!|\^ ?(?:\w|\{[^{}]*\}) ?\^|\^ ?(?:\{ ?)?(?:T|\\top)(?![A-Za-z])|\\\{[^{}]*:|\d,0\d"
)
# Names and words, of which it makes products: AB would be BA, and east seat.
_WORD_OR_NAME = re.compile(r"[A-Za-z]{4,}|(?=[a-z]*[A-Z])[A-Za-z]{2,}")
_MIXED_FRACTION = re.compile(r"(?<![\d.}^_])(\d+) ?(\\frac\{\d+\}\{\d+\})(?! ?[\w^\\])")
_PRODUCT = re.compile(r"(?:(?<![\w}.^])\d[\d.]*|\)) ?(?=\()|\) ?(?=\d)")  # 2(3), (2)(3), (2)3 too
_REPEATING = re.compile(r"(?<![\d.])(\d{0,9})\.(\d{0,9}) ?\\overline ?\{(\d{1,9})\}")


def _repeating_fraction(match: re.Match[str]) -> str:
    whole, start, cycle = match.groups()
    numerator = int(whole + start + cycle) - int((whole + start) or "0")
    return f"\\frac{{{numerator}}}{{{(10 ** len(cycle) - 1) * 10 ** len(start)}}}"


def symbolic_form(text: str) -> str | None:
    r"""What the symbolic verifier is given: cleaned, in one number spelling, without its unit.

    Mixed numbers become sums, repeating decimals fractions. None if Math-Verify would misread it.
    """
    text, unit = split_unit(clean_latex(text))
    text = _SPACES.sub(" ", _TEXT_ATOM.sub(r"\1", text))
    text = _REPEATING.sub(_repeating_fraction, _one_number_spelling(text))
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    text = _MIXED_FRACTION.sub(r"(\1+\2)", text)
    text = _PRODUCT.sub(lambda match: match[0] + r"\cdot ", text)
    if _MISREAD.search(text) or _WORD_OR_NAME.fullmatch(text):
        return None
    return text + ("\\%" if unit == "%" else "")
