"""Name the preset that a mesh is for. Without a plan, an example or a training step would search one."""

from __future__ import annotations

from collections.abc import Iterable


def preset_of(axes: Iterable[str]) -> str:
    """The preset for a mesh with these axes: both split the batch, and megatron the layers that it knows over tp."""
    return "megatron" if "tp" in axes else "ddp"
