"""Hold what the models of ``test_guards_reach`` import: a Python module of the user's own."""

from __future__ import annotations

import torch

BETA = 2.0


class Options:
    gain = 1.0


def scale(h: torch.Tensor) -> torch.Tensor:
    return h * BETA
