"""Refuse a checkpoint that was written with other options that change the numbers of a training."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from autopar.errors import CheckpointError
from autopar.step.train_step import TrainStep

OPTIONS = ("amp", "keep", "reduce_dtype", "loss_scale", "clip_norm", "clip_parameters", "ema")  # of ``train_step``


def numbers_of(step: TrainStep, rows: int | None) -> dict[str, Any]:
    """Return the options of a step that change its numbers, as texts, and the rows of the global batch.

    Args:
        rows: ``None`` where the ranks bring their own rows.
    """
    options = {name: str(getattr(step.options, name)) for name in OPTIONS}
    return {"optimizer": type(step.optimizer).__name__, **options, "rows": rows}


def check_same(folder: str | os.PathLike[str], saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ``CheckpointError`` if a checkpoint was saved with other numbers."""
    different = [
        f"\n    {'the rows of a batch' if name == 'rows' else name}: {value}, and in the checkpoint {saved.get(name)}"
        for name, value in now.items()
        if saved.get(name) != value and not (name == "rows" and None in (value, saved.get(name)))
    ]
    if different:
        raise CheckpointError(
            f"the checkpoint in {folder} is of another training{''.join(different)}\n  train with the same as before, "
            f"on any mesh, or name another folder"
        )
