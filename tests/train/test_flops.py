"""FLOPs by formula against those that PyTorch counts."""

import math

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from train.flops import flops_per_token, peak_flops, utilization

SHAPE = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
}
CONFIGS = {
    "qwen2": Qwen2Config(**SHAPE),
    "qwen2 tied": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen2 without groups": Qwen2Config(**{**SHAPE, "num_key_value_heads": 8}),
    "qwen3 with wide heads": Qwen3Config(**SHAPE, head_dim=32),
    "llama": LlamaConfig(**SHAPE),
}
# The counter also sees the product that makes the rotary angles, head_dim FLOPs a token.
ERROR = 1e-3


def counted(config: PretrainedConfig, rows: int, length: int, *, backward: bool = False) -> int:
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    ids = torch.randint(config.vocab_size, (rows, length))
    with FlopCounterMode(display=False) as counter:
        logits = model(input_ids=ids, use_cache=False).logits
        if backward:
            logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("length", [1, 33, 300])
@pytest.mark.parametrize("name", CONFIGS)
def test_formula_counts_what_pytorch_counts(name: str, length: int) -> None:
    config = CONFIGS[name]
    per_token = flops_per_token(config, length)
    assert per_token is not None
    assert per_token * length * 2 == pytest.approx(counted(config, 2, length), rel=ERROR)


def test_a_backward_pass_costs_two_forward_passes() -> None:
    config = CONFIGS["qwen2"]
    per_token = flops_per_token(config, 64)
    assert per_token is not None
    assert 3 * per_token * 64 == pytest.approx(counted(config, 1, 64, backward=True), rel=ERROR)


def test_a_critic_has_a_head_of_one_output() -> None:
    config = CONFIGS["qwen2"]
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").model
    head = nn.Linear(config.hidden_size, 1)
    with FlopCounterMode(display=False) as counter:
        head(model(input_ids=torch.zeros(1, 40, dtype=torch.long)).last_hidden_state)
    per_token = flops_per_token(config, 40, outputs=1)
    assert per_token is not None
    assert per_token * 40 == pytest.approx(counter.get_total_flops(), rel=ERROR)


def test_a_large_model_needs_two_flops_for_each_parameter_and_its_attention() -> None:
    # Qwen2.5-7B: 7.62 billion parameters, .545 of them the embedding, which is looked up.
    config = Qwen2Config(
        vocab_size=152_064,
        hidden_size=3584,
        intermediate_size=18_944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
    )
    assert flops_per_token(config, 0) == pytest.approx(2 * (7.62e9 - 0.545e9), rel=2e-3)
    long, none = flops_per_token(config, 6144), flops_per_token(config, 0)
    assert long is not None
    assert none is not None
    assert long - none == 4 * 28 * 3584 * 6144


def test_other_architectures_are_not_known() -> None:
    assert flops_per_token(GPT2Config(), 10) is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA A800-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H800", 989e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H20", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A10", None),
        ("Tesla V100-SXM2-16GB", None),
        ("cpu", None),
        ("", None),
    ],
)
def test_peak_of_a_device(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak


def test_utilization_is_a_share_of_the_peak_or_not_known() -> None:
    assert utilization(3e15, 10.0, peak=2 * 300e12) == pytest.approx(0.5)
    for flops, seconds, peak in ((None, 1.0, 1.0), (1.0, 1.0, None), (1.0, 0.0, 1.0)):
        assert math.isnan(utilization(flops, seconds, peak=peak))
