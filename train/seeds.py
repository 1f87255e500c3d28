"""Every random draw of a run has an address; its seed is a hash of that address.

So a response depends on (run seed, step, prompt, sample) and on nothing else: not on the batch
around it, not on what was drawn before, and a resumed run draws what the uninterrupted one would.
"""

from __future__ import annotations

import hashlib

import torch


def seed_of(*address: int | str) -> int:
    """A 63-bit seed from an address such as ``(run_seed, "rollout", step, prompt, sample)``."""
    digest = hashlib.blake2b(repr(address).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator_of(*address: int | str) -> torch.Generator:
    """A CPU generator seeded by `seed_of`."""
    return torch.Generator().manual_seed(seed_of(*address))
