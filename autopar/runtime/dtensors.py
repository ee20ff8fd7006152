"""Make DTensors of pieces, redistribute them, and cut pieces of wholes.

They are redistributed with autopar's gather, because DTensor uses the coalesced gather of gloo: see ``start_gather``.
``redistribute`` and ``full_tensor`` are differentiable, as DTensor's methods are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from autopar.torch_private import FUNCTIONAL, TorchDispatchMode, dtensor_around, start_gather

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Return whether a value is a DTensor, without importing DTensor."""
    return isinstance(value, torch.Tensor) and type(value).__name__ != "Tensor" and hasattr(value, "to_local")


class _SingleGathers(TorchDispatchMode):
    """Replaces each functional gather by one that is not coalesced."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replaced = start_gather if func is FUNCTIONAL.all_gather_into_tensor.default else func
        return replaced(*args, **(kwargs or {}))


def dtensor_of_piece(
    piece: torch.Tensor, device_mesh: Any, placements: Sequence[Any], shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """Return the DTensor whose piece on this rank is ``piece``, which is empty on a rank outside of the mesh.

    It, and what is computed from it, is on the piece's device on all ranks.
    """
    from autopar.runtime.elsewhere import Elsewhere  # needs DTensor, which is slow to import

    kind = Elsewhere if device_mesh.get_coordinate() is None else None
    return dtensor_around(piece, device_mesh, placements, shape, stride, kind)


def redistribute(tensor: Any, placements: Sequence[Any]) -> Any:
    """Return a DTensor with other placements on its mesh."""
    if tensor.device_mesh.get_coordinate() is None:  # nothing moves
        return dtensor_of_piece(tensor.to_local(), tensor.device_mesh, placements, tensor.shape, tensor.stride())
    with _SingleGathers():
        return tensor.redistribute(placements=placements)


def full_tensor(tensor: Any) -> torch.Tensor:
    """Return a whole DTensor, as a plain tensor on each rank."""
    with _SingleGathers():
        return tensor.full_tensor()


def piece_of_whole(like: Any, whole: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's piece of a whole plain tensor, cut as a DTensor is; ``None`` where the rank has none."""
    return None if like.device_mesh.get_coordinate() is None else distributed(whole, like).to_local()


def distributed(whole: torch.Tensor, like: Any, placements: Sequence[Any] | None = None) -> Any:
    """Return a plain tensor that all ranks have as a DTensor on the mesh of another: with its placements, or others."""
    from torch.distributed.tensor import distribute_tensor

    placements = like.placements if placements is None else placements
    return distribute_tensor(whole, like.device_mesh, placements, src_data_rank=None)
