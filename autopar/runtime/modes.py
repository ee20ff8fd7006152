"""The modes under which a captured step runs: it holds its own backward, and the casts that autocast made."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def as_captured() -> Iterator[None]:
    """Without gradients and without autocast, whatever the caller has on."""
    with torch.no_grad(), contextlib.ExitStack() as off:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                off.enter_context(torch.autocast(device, enabled=False))
        yield
