"""Samplers choose which prompts are rolled out; W_D, by contrast, only changes what they count for.

A sampler is anything with the five methods of `Sampler`, made from a `Pool`. `SAMPLERS` finds one
by name. Constants are keyword arguments whose defaults are the sources'.
"""

from collections.abc import Callable
from functools import partial

from cvpo.samplers.adarft import AdaRFT
from cvpo.samplers.bins import E2H, SEC
from cvpo.samplers.interface import Feedback, Pool, Sampler, Selective
from cvpo.samplers.near_half import PCL, Oracle
from cvpo.samplers.plain import ShuffledEpochs, Uniform
from cvpo.samplers.thompson import Thompson, bots, dbb, mopps, moving_average, thompson_weight
from cvpo.samplers.vcrl import VCRL
from cvpo.samplers.weighted import WD

SAMPLERS: dict[str, Callable[[Pool], Sampler]] = {
    "shuffled-epochs": ShuffledEpochs,
    "uniform": Uniform,
    "mopps": mopps,
    "e2h-cosine": partial(E2H, schedule="cosine"),
    "e2h-gaussian": partial(E2H, schedule="gaussian"),
    "adarft": AdaRFT,
    "vcrl": VCRL,
    "sec": SEC,
    "pcl": PCL,
    "oracle": Oracle,
    "w-d": WD,
    "dbb": dbb,
    "bots": bots,
    "moving-average": moving_average,
}
"""A sampler's name -> its constructor ``(pool)``. The last three: MoPPS's rule, other trackers."""

__all__ = [
    "E2H",
    "PCL",
    "SAMPLERS",
    "SEC",
    "VCRL",
    "WD",
    "AdaRFT",
    "Feedback",
    "Oracle",
    "Pool",
    "Sampler",
    "Selective",
    "ShuffledEpochs",
    "Thompson",
    "Uniform",
    "bots",
    "dbb",
    "mopps",
    "moving_average",
    "thompson_weight",
]
