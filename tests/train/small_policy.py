"""A policy small enough for a test and of a shape that vLLM's CPU kernels have."""

from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from train import addition

POSITIONS = 320
"""More than two blocks of vLLM's KV cache on a CPU, 128 each, so that prefixes are cached."""


def save_policy(folder: Path, *, tied: bool = True, head_size: int = 32) -> str:
    """Writes random weights, spread so that many tokens are likely, and returns the path.

    The generation config has habits that would each bias the policy.
    """
    tokenizer = addition.tokenizer()
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=2 * head_size,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=POSITIONS,
            tie_word_embeddings=tied,
            initializer_range=0.15,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, tokenizer.encode(",")[0]],
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        repetition_penalty=5.0,
        temperature=0.1,
        top_k=1,
        min_new_tokens=15,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
