"""What a run will need, before it is paid for: memory, FLOPs, time, disk. No device, no weights.

Everything follows from the model's config.json (`shape`), from how the run is laid out over devices
(`layout`) and from what a step has to do (`work`). Where the formulas come from:

- Weights, gradients, optimiser (`memory`): the ZeRO paper (Rajbhandari et al. 2020, arXiv
  1910.02054), section 3.1 and table 1. In bfloat16, 2 + 2 + 12 bytes a parameter: weight; gradient;
  float32 master weight and Adam's two moments. In float32, 4 + 4 + 8 in plain PyTorch. Stage 1
  splits the optimiser over the devices, stage 2 the gradients too, stage 3 the weights too.
- Activations (`memory`): counted tensor by tensor, as Korthikanti et al. 2022 (arXiv 2205.05198) do
  for GPT, for layers with RMSNorm, rotary embeddings, grouped queries and a gated MLP.
- FLOPs (`cost`): 2 for each matrix weight and token of a forward pass, and the attention term; a
  backward pass is two forward passes, and activation checkpointing adds one (same paper).
- Seconds (`cost`): FLOPs / (peak x share reached), or bytes / bandwidth where that takes longer.

Decision: mean lengths default to their limits, so that without `prompt_tokens` and
`response_tokens` tokens, FLOPs, time and disk are upper bounds. Memory always takes the limits.

A GB is 10^9 bytes.
"""

from train.plan.layout import Assumptions, Device, Layout, device_named, layout_of, parse_memory
from train.plan.predict import Plan, plan
from train.plan.shape import Shape, shape_of

__all__ = [
    "Assumptions",
    "Device",
    "Layout",
    "Plan",
    "Shape",
    "device_named",
    "layout_of",
    "parse_memory",
    "plan",
    "shape_of",
]
