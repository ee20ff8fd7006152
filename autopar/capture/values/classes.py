"""Count classes, as ``one_hot`` and ``bincount`` do, where their number does not depend on values."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from autopar.capture.provenance import user_line
from autopar.capture.values.known import KnownValues
from autopar.capture.values.rows import Keeper
from autopar.ir.ops.sharded_lookup import within
from autopar.torch_private import without_function_modes, without_modes


def counted_classes(
    mode: Keeper, constant: KnownValues, name: str, args: Any, kwargs: dict[str, Any]
) -> tuple[Any] | None:
    """Return the classes, in a tuple; ``None`` where their number is given to ``one_hot``."""
    if name == "one_hot":
        named = dict(zip(("tensor", "num_classes"), args, strict=False)) | kwargs
        return None if named.get("num_classes", -1) > 0 else (_one_hot(mode, constant, named["tensor"]),)
    named = dict(zip(("input", "weights", "minlength"), args, strict=False)) | kwargs
    ids, weights, size = named["input"], named.get("weights"), named.get("minlength", 0)
    if size < 1:
        raise mode.refuse(
            "counts with bincount, and how many classes there are is a value",
            "give their number: torch.bincount(ids, minlength=classes)",
        )
    if weights is None:
        weights = torch.ones_like(ids, dtype=torch.long)
    elif weights.dtype is not torch.float32:
        weights = weights.double()
    zeros = torch.zeros(size, dtype=weights.dtype, device=ids.device)
    return (zeros.scatter_add(0, within(ids.long(), size), weights.detach()),)


def _one_hot(mode: Keeper, constant: KnownValues, ids: torch.Tensor) -> torch.Tensor:
    values = None if mode.conditions.open else constant.tensor(ids)
    if values is None or not values.numel():
        raise mode.refuse(
            "makes one_hot of classes whose number is a value", "give their number: F.one_hot(ids, classes)"
        )
    with without_modes(), without_function_modes():
        number = int(values.max()) + 1
    if constant.is_given(ids):
        mode.assume((ids.max() + 1 != number).long(), user_line())
    return F.one_hot(ids, number)
