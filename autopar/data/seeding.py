"""Seed the generators from which datasets draw, so that a draw depends on the seed, the epoch and the row alone."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import get_worker_info

SEEDS = 2**64  # torch takes as many


def seed_generators(*facts: int) -> None:
    """Seed Python's, NumPy's and torch's generators by some integers."""
    digest = hashlib.blake2b(" ".join(map(str, facts)).encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little")
    torch.default_generator.manual_seed(number)
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the generators afterwards: the training draws from those of this process, too. Workers have their own."""
    if get_worker_info() is not None:
        yield
        return
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
