"""Make DTensors and device meshes in ways that have no public name."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol, TypeGuard

import torch


def dtensor_like(piece: torch.Tensor, other: Any) -> torch.Tensor:
    """Make a DTensor of this rank's piece with the layout of another DTensor.

    It is ``from_local`` without its 0.1 ms.
    Tried on 2.11 to 2.15. The piece gets the other's strides too: fused optimizers
    read both in memory order.
    """
    local = other._local_tensor
    if piece.stride() != local.stride():
        piece = torch.empty_strided(local.shape, local.stride(), dtype=piece.dtype, device=piece.device).copy_(piece)
    return type(other)(piece, other._spec, requires_grad=False)


def strided_shard(dim: int, parts: int) -> Any:
    """Return the placement of a dim of ``parts`` equal parts, each of which is split: ``(3 4096/tp)``.
    Tried on 2.11 to 2.15.

    DTensor uses it for FSDP over tensor parallelism. Optimizers, norms and ``full_tensor`` support it.
    ``torch.distributed.checkpoint`` refuses to save it, and loads wrong values into it without an error.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    _take_lone_strided_shards()
    return _StridedShard(dim, split_factor=parts)


@functools.cache
def _take_lone_strided_shards() -> None:
    """Let 2.11 redistribute a strided shard that is no order of mesh dims, as 2.12 does by itself.

    Tried on 2.11 to 2.15: all but 2.11 need nothing.
    """
    if not torch.__version__.startswith("2.11."):
        return
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    spec: Any = DTensorSpec
    decoded = spec._normalize_placements_into_shard_order

    def normalized(placements: Any, mesh: Any, use_strided_shard_as_shard_order: bool = True) -> Any:
        if spec._maybe_convert_StridedShard_to_shard_order(placements, mesh) is None:
            use_strided_shard_as_shard_order = False
        return decoded(placements, mesh, use_strided_shard_as_shard_order)

    spec._normalize_placements_into_shard_order = staticmethod(normalized)


@dataclass(frozen=True)
class FullStateDicts:
    """What a function of ``torch.distributed.checkpoint.state_dict`` with ``full_state_dict=True`` is about to do.

    Attributes:
        reads: whether it makes a state dict, and does not load one.
        model: whether it is about the parameters of the model, and not only about the state of optimizers.
        broadcasts: whether the first rank sends the values to the others.
        optimizers: the optimizers whose state is read or loaded.
    """

    reads: bool
    model: bool
    broadcasts: bool
    optimizers: tuple[torch.optim.Optimizer, ...]


def full_state_dicts() -> FullStateDicts | None:
    """Return what torch's state dict functions are about to do, if one of them lists the parameters now.

    They list them first, before they send anything. ``None`` if none of them runs, or without ``full_state_dict=True``.
    Tried on 2.11 to 2.15.
    """
    begin = getattr(sys.modules.get("torch.distributed.checkpoint.state_dict"), "_verify_options", None)
    if begin is None:
        return None
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not begin.__code__:
        frame = frame.f_back
    if frame is None or frame.f_back is None:
        return None
    options, optimizers, function = frame.f_locals["options"], frame.f_locals["optims"], frame.f_back.f_code.co_name
    if options is None or not options.full_state_dict:
        return None
    return FullStateDicts(
        reads=function.startswith("get_"),
        model="optimizer" not in function,
        broadcasts=options.broadcast_from_rank0,
        optimizers=tuple(optimizers),
    )


class StridedShard(Protocol):
    """What a placement of ``strided_shard`` has."""

    dim: int
    split_factor: int


def is_strided_shard(placement: object) -> TypeGuard[StridedShard]:
    """Return whether a placement is one of ``strided_shard``. Tried on 2.11 to 2.15."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return type(placement) is _StridedShard


def dtensor_around(
    piece: torch.Tensor, device_mesh: Any, placements: Sequence[Any], shape: Sequence[int], stride: Sequence[int],
    kind: Any = None,
) -> torch.Tensor:  # fmt: skip
    """Make a DTensor whose local tensor is ``piece``, on the piece's device. Tried on 2.11 to 2.15.

    ``kind``: a subclass of DTensor.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec = DTensorSpec(
        device_mesh, tuple(placements), tensor_meta=TensorMeta(torch.Size(shape), tuple(stride), piece.dtype)
    )
    return (kind or DTensor)(piece, spec, requires_grad=False)


def device_mesh_of_others(device_type: str, ranks: torch.Tensor, names: tuple[str, ...]) -> Any:
    """Make a device mesh that this rank is not on, without process groups. Tried on 2.11 to 2.15.

    The public ways make groups, or take this rank's.
    """
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh(device_type, ranks, mesh_dim_names=names, _init_backend=False)


def forget_groups(device_mesh: Any) -> None:
    """Drop the closed groups of a device mesh, so that their threads end. Tried on 2.11 to 2.15.

    They also end while DTensors keep the mesh.
    """
    device_mesh._pg_registry.clear()
    forget_meshes()


def forget_meshes() -> None:
    """Let DTensor's rules for ops forget device meshes. Tried on 2.11 to 2.15.

    Else an op on a mesh that equals an earlier one would return a DTensor on that one, where this process may have been
    another rank.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # tried on 2.11 to 2.15

    _clear_sharding_prop_cache()


def dtensor_handlers() -> dict[Any, Callable[..., Any]]:
    """Return DTensor's table of ops that a function computes in its place. Tried on 2.11 to 2.15.

    The function gets the op, its arguments and its keyword arguments.
    """
    from torch.distributed.tensor import DTensor

    return DTensor._op_dispatcher._custom_op_handlers


def give_memory(tensor: Any, piece: torch.Tensor) -> None:
    """Let a DTensor's piece be in the memory of another tensor, as ``.data =`` does: no version changes.

    What shared the old memory keeps it. The piece stays the same object. Tried on 2.11 to 2.15.
    """
    if type(tensor._local_tensor) is torch.Tensor:
        tensor._local_tensor.data = piece
    else:  # the result of a collective that is not waited for
        tensor._local_tensor = piece


def add_dtensor_methods(methods: Mapping[str, Callable[..., Any] | property]) -> None:
    """Give DTensor methods where it has only torch.Tensor's, which do not fit it. Tried on 2.11 to 2.15."""
    from torch.distributed.tensor import DTensor

    for name, method in methods.items():
        if name not in vars(DTensor):
            setattr(DTensor, name, method)
