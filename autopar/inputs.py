"""The tensors of a call on one rank: how they lie on the mesh, and this rank's pieces of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autopar.capture.arguments import Arguments
from autopar.ir.dtensor import attr_of, mesh_of, placements_of
from autopar.ir.layout import DistAttr
from autopar.ir.mesh import Mesh
from autopar.ir.record import TensorType
from autopar.ir.structure import unflatten
from autopar.runtime.dtensors import redistribute
from autopar.runtime.processes.agreement import Brought
from autopar.runtime.simulation.pieces import cut
from autopar.shards import is_dtensor, local_of

INPUTS = ("global", "local")


@dataclass(frozen=True)
class Given:
    """One call.

    Attributes:
        arguments: as they were given.
        laid: input → how it lies, where that does not come from the plan: DTensors, and pieces that ranks bring.
        shapes: input → its global shape, of pieces that ranks bring.
    """

    arguments: Arguments
    laid: Mapping[str, DistAttr]
    shapes: Mapping[str, tuple[int, ...]]

    def whole(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call with tensors of their global shapes; those that are nowhere whole are on meta."""
        names = iter(self.arguments.names)
        flat = []
        for value in self.arguments.flat:
            shape = self.shapes.get(next(names)) if isinstance(value, torch.Tensor) else None
            flat.append(value if shape is None else torch.empty(shape, dtype=value.dtype, device="meta").requires_grad_(value.requires_grad))
        return unflatten(flat, self.arguments.spec)  # type: ignore[return-value]

    def brought(self) -> list[Brought]:
        """The tensors as this rank has them: whole, where all have the same, or its piece."""
        named = zip(self.arguments.names, self.arguments.tensors, strict=True)
        return [Brought(name, local_of(tensor), tuple(self.laid[name].axes) if name in self.laid else ()) for name, tensor in named]

    @property
    def facts(self) -> tuple[Any, ...]:
        """What a capture is keyed by, beside the arguments' own signature."""
        return tuple(self.laid.items()), tuple(self.shapes.items())


Shapes = Mapping[str, tuple[int, ...]]


def given_call(arguments: Arguments, inputs: str, mesh: Mesh, layouts: Callable[[Shapes], Mapping[str, DistAttr]]) -> Given:
    """How the tensors of a call lie.

    With ``inputs="local"`` each rank brings its own piece, and all bring pieces of one size (others are made a whole batch before,
    by ``uneven``); the plan is applied to the pieces, and a dim that it splits is as many times longer as there are pieces.

    Args:
        layouts: what the plan says of inputs of such shapes.

    Raises:
        ValueError: a DTensor on another mesh, or pending; pieces of a merged dim.
    """
    laid: dict[str, DistAttr] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    plain: dict[str, tuple[int, ...]] = {}
    for name, tensor in zip(arguments.names, arguments.tensors, strict=True):
        if is_dtensor(tensor):
            laid[name] = _attr_of_dtensor(name, tensor, mesh)
        else:
            plain[name] = tuple(tensor.shape)
    if inputs == "local" and mesh.size > 1 and plain:
        attrs = layouts(plain)
        for name, shape in plain.items():
            attr = laid[name] = attrs.get(name, DistAttr.replicated(len(shape)))
            if any(len(dim) > 1 for dim in attr.dims):
                raise ValueError(f"the plan splits the parts of a merged dim of {name}, which ranks cannot bring as pieces; use inputs=\"global\"")
            shapes[name] = tuple(n * mesh.count(dim[0][1]) for n, dim in zip(shape, attr.dims, strict=True))
    return Given(arguments, laid, shapes)


def _attr_of_dtensor(name: str, tensor: Any, mesh: Mesh) -> DistAttr:
    if mesh_of(tensor.device_mesh) != mesh:
        raise ValueError(f"the argument {name} is a DTensor on another mesh ({mesh_of(tensor.device_mesh)}); redistribute it to ({mesh})")
    attr = attr_of(tensor.placements, mesh, tensor.shape)
    if attr.pending:
        raise ValueError(f"the argument {name} is a DTensor that is {tensor.placements}; redistribute it, so that it is not Partial")
    return attr


def piece_of(tensor: torch.Tensor, name: str, type: TensorType, rank: int, given: Given) -> torch.Tensor:
    """This rank's piece of a parameter, a buffer or an input, as a plain tensor outside of autograd."""
    assert type.layout is not None
    mesh = type.layout.mesh
    if is_dtensor(tensor):
        if attr_of(tensor.placements, mesh, type.shape) != type.attr:  # type: ignore[attr-defined]
            tensor = redistribute(tensor.detach(), placements_of(type.attr, mesh, type.shape))
        return local_of(tensor)
    if name in given.shapes or type.attr.is_replicated:
        return tensor.detach()
    return cut(tensor.detach(), type, mesh.coordinates(rank))

