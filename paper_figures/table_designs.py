"""The design comparison: how CVPO and the methods around it estimate, weigh and choose.

After the table in section 5.1 of the reading note of arXiv 2608.03068, in our words. Where the note
describes a method otherwise than its source does, the last column says what is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import pandas as pd

from analysis.exhibit import Exhibit
from analysis.markdown import markdown
from analysis.sources import Source


@dataclass(frozen=True)
class Design:
    """A row of the table."""

    method: str
    source: str
    advantage: str
    within_trajectory: str
    """Whether the spread of values within a trajectory is used."""
    curriculum: str
    weakness: str
    """The main one, as the note has it, corrected where it does not apply."""
    here: str
    """What this project calls it: a method of the trainer, or a sampler."""
    correction: str


DESIGNS = (
    Design(
        "GRPO",
        "arXiv 2402.03300",
        "reward normalised within the prompt's group, no critic",
        "no",
        "none",
        "no signal from a group that is all right or all wrong; one advantage for every token",
        "`grpo`; the paper's baseline is `grpo-async`",
        "The paper's baseline is not GRPO as published but a variant that is one step asynchronous",
    ),
    Design(
        "VC-PPO, VAPO",
        "arXiv 2503.01491, 2504.05118",
        "GAE with separate lambdas for critic and policy; VAPO's adapts to the length",
        "no",
        "none",
        "needs accurate values, and then does not use how they move along a response",
        "`vc-ppo`, `vapo`",
        "The length-adaptive lambda is VAPO's alone; VC-PPO's policy has lambda = .95",
    ),
    Design(
        "MoPPS (Qu et al.)",
        "arXiv 2507.04632",
        "that of the method it chooses prompts for",
        "no",
        "online: a Beta posterior of each prompt's success rate, sampled (Thompson), decides which "
        "prompts are rolled out",
        "a prompt's posterior learns only from its own rollouts",
        "sampler `mopps`",
        "The note calls it a static prediction by a model that needs training and calibration of "
        "its own. It has no such model: the posterior is updated with the training's own rollouts",
    ),
    Design(
        "E2H (Parashar et al.)",
        "arXiv 2506.06632",
        "that of the method it chooses prompts for",
        "no",
        "fixed: bins of difficulty and a schedule of their shares are set beforehand",
        "does not see how difficulty drifts as the policy improves",
        "samplers `e2h-cosine`, `e2h-gaussian`",
        "The schedule moves the bins' probabilities; it is no strict order from easy to hard",
    ),
    Design(
        "CVPO",
        "arXiv 2608.03068",
        "VAPO's, times W_S (spread of values, by outcome) and W_D (success rate)",
        "yes",
        "online: a Beta posterior of each prompt's success rate, its mean weighs the loss",
        "many constants set by hand, cost not accounted for, one model and domain",
        "`cvpo`, `cvpo-stochasticity`, `cvpo-curriculum`",
        "The spread is a standard deviation where the equations write a variance; the posterior "
        "never forgets",
    ),
)

HEADINGS = {
    "method": "method",
    "source": "source",
    "advantage": "advantage",
    "within_trajectory": "spread of values within a trajectory",
    "curriculum": "curriculum",
    "weakness": "main weakness",
    "here": "name here",
    "correction": "correction of the note",
}


def make(sources: Sequence[Source]) -> Exhibit:  # noqa: ARG001  (every exhibit takes them)
    """The table; it needs no run."""
    table = pd.DataFrame([asdict(design) for design in DESIGNS])
    return Exhibit(
        "Design of CVPO and of the methods it is compared with, after section 5.1 of the reading "
        "note, with corrections in the last column. Two things are said to be new in CVPO. That it "
        "uses the spread of values within a trajectory stands: no other method here does. That its "
        "curriculum is online and follows the policy sets it apart from E2H, but not from MoPPS, "
        "which tracks a posterior of the same kind; CVPO weighs the loss with it where MoPPS "
        "chooses the prompts. No measurement of ours is in this table.",
        table,
        text=markdown(table.rename(columns=HEADINGS)),
    )
