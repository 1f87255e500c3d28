"""Run logs in; tidy frames, tables and figures out. Reads through `cvpo.runlog` only.

Here stands what all of it shares: the error that the command line reports, and how a method looks.
"""


class AnalysisError(ValueError):
    """Runs that cannot be analysed as asked; the message names the file and what to do."""


# Okabe and Ito's palette, which the common kinds of colour blindness leave apart, with a grey and
# two darker shades. A method keeps its colour in every figure.
METHOD_COLORS: dict[str, str] = {
    "cvpo": "#D55E00",
    "cvpo-stochasticity": "#E69F00",
    "cvpo-curriculum": "#CC79A7",
    "vapo": "#0072B2",
    "vc-ppo": "#56B4E9",
    "ppo": "#000000",
    "grpo": "#009E73",
    "grpo-async": "#7FBF3F",
    "dr-grpo": "#00594A",
    "dapo": "#882255",
    "rloo": "#8C8C8C",
}


def method_color(method: str) -> str:
    """A method's colour; one that the table does not know is drawn in a neutral brown."""
    return METHOD_COLORS.get(method, "#7A5C3E")
