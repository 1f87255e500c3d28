"""CVPO (arXiv 2608.03068): value-based PPO with value-variance and curriculum weights.

The method as pure functions on tensors. Read `cvpo.estimator` first; `cvpo.stochasticity` holds
W_S, `cvpo.curriculum` W_D. Importing this loads torch, NumPy and jaxtyping, nothing else.
"""

from cvpo.advantage import gae, group_advantage, length_adaptive_lambda, terminal_rewards
from cvpo.curriculum import (
    BetaTracker,
    CurriculumConfig,
    Curve,
    DifficultyCurriculum,
    RoundClock,
    RoundReport,
    difficulty_weight,
)
from cvpo.estimator import (
    METHODS,
    Advantages,
    Method,
    advantage_moments,
    estimate_advantages,
    mean_and_deviation,
    weighted_advantages,
)
from cvpo.groups import group_mean, shuffle_within
from cvpo.loss import (
    BatchCounts,
    kl_loss,
    policy_loss,
    policy_statistics,
    positive_lm_loss,
    value_loss,
)
from cvpo.metrics import (
    Interval,
    avg_at_k,
    explained_variance,
    hierarchical_bootstrap,
    paired_difference,
    pass_at_k,
)
from cvpo.reward import extract_answer, verify
from cvpo.runlog import (
    RunLog,
    read_calibration,
    read_evals,
    read_events,
    read_metrics,
    read_problems,
    read_prompts,
    read_run,
    read_scores,
    read_table,
    read_tokens,
    read_trajectories,
)
from cvpo.samplers import SAMPLERS, Feedback, Sampler, ShuffledEpochs, Uniform
from cvpo.stochasticity import (
    ARMS,
    Stochasticity,
    StochasticityConfig,
    stochasticity,
    stochasticity_weight,
    trajectory_std,
    weight_diagnostics,
)

__all__ = [
    "ARMS",
    "METHODS",
    "SAMPLERS",
    "Advantages",
    "BatchCounts",
    "BetaTracker",
    "CurriculumConfig",
    "Curve",
    "DifficultyCurriculum",
    "Feedback",
    "Interval",
    "Method",
    "RoundClock",
    "RoundReport",
    "RunLog",
    "Sampler",
    "ShuffledEpochs",
    "Stochasticity",
    "StochasticityConfig",
    "Uniform",
    "advantage_moments",
    "avg_at_k",
    "difficulty_weight",
    "estimate_advantages",
    "explained_variance",
    "extract_answer",
    "gae",
    "group_advantage",
    "group_mean",
    "hierarchical_bootstrap",
    "kl_loss",
    "length_adaptive_lambda",
    "mean_and_deviation",
    "paired_difference",
    "pass_at_k",
    "policy_loss",
    "policy_statistics",
    "positive_lm_loss",
    "read_calibration",
    "read_evals",
    "read_events",
    "read_metrics",
    "read_problems",
    "read_prompts",
    "read_run",
    "read_scores",
    "read_table",
    "read_tokens",
    "read_trajectories",
    "shuffle_within",
    "stochasticity",
    "stochasticity_weight",
    "terminal_rewards",
    "trajectory_std",
    "value_loss",
    "verify",
    "weight_diagnostics",
    "weighted_advantages",
]
