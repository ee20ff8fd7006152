"""Set the modes under which a captured step runs: it contains its own backward and the casts of autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def as_captured() -> Iterator[None]:
    """Switch gradients and autocast off, whatever modes the caller has set."""
    with torch.no_grad(), contextlib.ExitStack() as off:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                off.enter_context(torch.autocast(device, enabled=False))
        yield
