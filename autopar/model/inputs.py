"""Describe the inputs of a call on one rank: their layouts on the mesh, and this rank's pieces.

``LocalTensors`` takes the pieces, and makes global tensors of the pieces that a program returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch

from autopar.capture.arguments import Arguments, Signature
from autopar.capture.model_state import ModelState, Named
from autopar.ir.dtensor import attr_of, mesh_of, placements_of
from autopar.ir.layout import Axes, DistAttr
from autopar.ir.mesh import Mesh
from autopar.ir.record import TensorType
from autopar.model.dtensor_parameters import local_of
from autopar.runtime.dtensors import full_tensor, is_dtensor, redistribute
from autopar.runtime.interface import Interface
from autopar.runtime.processes.agreement import Brought
from autopar.runtime.processes.job import Job
from autopar.runtime.simulation.pieces import cut
from autopar.torch_private import dtensor_like, is_transformed

Inputs = Literal["global", "local"]  # what each process passes: the whole batch, or a piece of its own
INPUTS: tuple[Inputs, ...] = get_args(Inputs)


@dataclass(frozen=True)
class CallInputs:
    """The inputs of one call, bound and flattened.

    Attributes:
        arguments: the arguments of the call.
        layouts: input → its layout, where the plan does not decide it: for DTensors, and for inputs of which each rank
            brings its own piece.
        shapes: input → its global shape, for inputs of which each rank brings its own piece.
    """

    arguments: Arguments
    layouts: Mapping[str, DistAttr]
    shapes: Mapping[str, tuple[int, ...]]

    def whole(self) -> Arguments:
        """Return the arguments with tensors of global shapes. A tensor of which this rank has a piece is on meta."""
        names = iter(self.arguments.names)
        flat = []
        for value in self.arguments.flat:
            shape = self.shapes.get(next(names)) if isinstance(value, torch.Tensor) else None
            flat.append(
                value
                if shape is None
                else torch.empty(shape, dtype=value.dtype, device="meta").requires_grad_(value.requires_grad)
            )
        return self.arguments.with_leaves(flat)

    @property
    def named(self) -> Named:
        """The tensors, by the user's names."""
        return list(zip(self.arguments.names, self.arguments.tensors, strict=True))

    def refuse_without_values(self, state: ModelState) -> None:
        """Raise ``ValueError`` if a parameter, a buffer or an input has no values to compute with."""
        refuse_without_values([*state.parameters, *state.buffers, *self.named])

    def brought(self) -> list[Brought]:
        """Return the tensors that this rank brings: the full tensor if all ranks have the same, else its piece."""
        return [
            Brought(name, local_of(tensor), tuple(self.layouts[name].axes) if name in self.layouts else ())
            for name, tensor in self.named
        ]

    @property
    def facts(self) -> tuple[Any, ...]:
        """The part of a capture's key that the signature of the arguments does not hold."""
        return tuple(self.layouts.items()), tuple(self.shapes.items())


# a capture's key, without the values that forward reads: the signature, and ``CallInputs.facts``
CallKey = tuple[Signature, tuple[Any, ...]]
Shapes = Mapping[str, tuple[int, ...]]


def call_inputs(
    arguments: Arguments, inputs: Inputs, mesh: Mesh, layouts_of: Callable[[Shapes], Mapping[str, DistAttr]]
) -> CallInputs:
    """Return the inputs of a call, with their layouts.

    With ``inputs="local"`` each rank brings its own piece, and all pieces have one size (``CallBinding.bound`` has
    joined others). The plan is applied to the pieces. The global length of a dim that it shards is the length of the
    piece times the number of pieces.

    Args:
        layouts_of: returns the plan's layouts of inputs of such shapes.

    Raises:
        ValueError: a DTensor is on another mesh or is a partial sum; the plan shards part of a merged dim, which ranks
            cannot bring.
    """
    layouts: dict[str, DistAttr] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    plain: dict[str, tuple[int, ...]] = {}
    for name, tensor in zip(arguments.names, arguments.tensors, strict=True):
        if is_dtensor(tensor):
            layouts[name] = _attr_of_dtensor(name, tensor, mesh)
        else:
            plain[name] = tuple(tensor.shape)
    if inputs == "local" and mesh.size > 1 and plain:
        attrs = layouts_of(plain)
        for name, shape in plain.items():
            attr = layouts[name] = attrs.get(name, DistAttr.replicated(len(shape)))
            shapes[name] = tuple(n * mesh.count(axes_of(attr, name, d)) for d, n in enumerate(shape))
    return CallInputs(arguments, layouts, shapes)


def axes_of(attr: DistAttr, name: str, dim: int) -> Axes:
    """Return the axes that shard a dim of an input of which ranks bring pieces.

    ``ValueError`` if they shard part of a merged dim.
    """
    if len(attr.dims[dim]) > 1:
        raise ValueError(
            f"the plan splits the parts of a merged dim of {name}, which ranks cannot bring as pieces; use "
            f'inputs="global"'
        )
    return attr.dims[dim][0][1]


def describe(arguments: Arguments, key: CallKey) -> str:
    """Describe a call; the text is the same on all ranks that make the same call: ``(x float32[4, 8]) in train``."""
    signature, _ = key
    tensors = zip(arguments.names, arguments.tensors, strict=True)
    values = [f"{name} {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for name, tensor in tensors]
    values += [constant for _, constant in signature.constants]
    flags = signature.training
    mode = "train" if all(flags) else "train in part" if any(flags) else "eval"
    grad, deterministic = signature.modes[:2]
    return (
        f"({', '.join(values)}) in {mode}"
        + " without gradients" * (not grad)
        + " deterministically" * (deterministic > 0)
    )


def _attr_of_dtensor(name: str, tensor: Any, mesh: Mesh) -> DistAttr:
    if mesh_of(tensor.device_mesh) != mesh:
        raise ValueError(
            f"the argument {name} is a DTensor on another mesh ({mesh_of(tensor.device_mesh)}); redistribute it to "
            f"({mesh})"
        )
    attr = attr_of(tensor.placements, mesh, tensor.shape)
    if attr.pending:
        raise ValueError(
            f"the argument {name} is a DTensor that is {tensor.placements}; redistribute it, so that it is not Partial"
        )
    return attr


def piece_of(tensor: torch.Tensor, name: str, type: TensorType, rank: int, inputs: CallInputs) -> torch.Tensor:
    """Return this rank's piece of a parameter, a buffer or an input, as a plain tensor without a graph.

    ``type``: the global type.
    """
    assert type.layout is not None
    mesh = type.layout.mesh
    if is_dtensor(tensor):
        if attr_of(tensor.placements, mesh, type.shape) != type.attr:
            tensor = redistribute(tensor.detach(), placements_of(type.attr, mesh, type.shape))
        return local_of(tensor)
    if name in inputs.shapes or type.attr.is_replicated:
        return tensor.detach()
    return cut(tensor.detach(), type, mesh.coordinates(rank))


def refuse_without_values(named: Named) -> None:
    """Raise ``ValueError`` if a parameter, a buffer or an input has no values to compute with."""
    for name, tensor in named:
        if is_transformed(tensor):
            raise ValueError(
                f"{name} is inside a torch.func transform or carries a forward-mode tangent; "
                f"a captured step has gradients through backward() alone"
            )
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device and has no values; to_empty() and init it")


class Pieces(NamedTuple):
    """This rank's pieces of parameters, buffers and inputs.

    Attributes:
        tensors: the pieces in the order of the placeholders.
        leaves: placeholder → the user's tensor that receives its gradient.
        brought: the placeholders for which each rank brings its own piece.
    """

    tensors: list[torch.Tensor]
    leaves: dict[str, torch.Tensor]
    brought: set[str]


class LocalTensors:
    """The tensors of a model and of its calls, on this rank.

    Args:
        module: the model, with parameters that are DTensors on processes.
        job: the processes; ``None`` in a process that is alone.
        whole: whether the model returns plain tensors of their global shapes.

    Attributes:
        parameters: name → parameter, as of the latest call.
    """

    def __init__(self, module: torch.nn.Module, mesh: Mesh, job: Job | None, whole: bool) -> None:
        self.mesh, self.job, self._whole = mesh, job, whole
        self.parameters = dict[str, torch.Tensor](module.named_parameters())

    def pieces(self, inputs: CallInputs, state: ModelState, interface: Interface, rank: int) -> Pieces:
        """Return this rank's pieces of the parameters, the buffers and the inputs of a call."""
        self.check_parameters(state.parameters)
        inputs.refuse_without_values(state)
        tensors = [tensor for _, tensor in (*state.parameters, *state.buffers)]
        with torch.no_grad():
            pieces = [local_of(tensor) for tensor in tensors]
        leaves = {
            name: tensor for name, tensor in zip(interface.arguments, tensors, strict=False) if tensor.requires_grad
        }
        brought = set()
        placeholders = interface.arguments[len(tensors) : len(tensors) + len(inputs.arguments.names)]
        for placeholder, (name, tensor) in zip(placeholders, inputs.named, strict=True):
            pieces.append(piece_of(tensor, name, interface.types[placeholder], rank, inputs))
            if tensor.requires_grad:
                leaves[placeholder] = tensor
            if name in inputs.shapes:
                brought.add(placeholder)
        return Pieces(pieces, leaves, brought)

    def check_parameters(self, named: Named) -> None:
        """Raise ``ValueError`` if a parameter was added or replaced.

        A DTensor may be replaced by one with the same placements.
        """
        for name, tensor in named:
            known = self.parameters.get(name)
            if tensor is known:
                continue
            if known is None or (is_dtensor(known) and getattr(tensor, "placements", None) != known.placements):
                raise ValueError(
                    f"the parameter {name} was {'added' if known is None else 'replaced'} after parallelize; change "
                    f"the model first, then parallelize it"
                )
            self.parameters[name] = tensor

    def returned(self, piece: torch.Tensor, type: TensorType) -> torch.Tensor:
        """Return the user's tensor for a returned piece: mostly a DTensor. ``type``: its global type.

        It is a plain tensor for a number, and with ``outputs="global"``, where the piece is the full tensor.
        """
        if self.job is None or not type.shape or self._whole:
            return piece
        return self._global(piece.contiguous(), type, torch.empty(type.shape, device="meta"))

    def gradient(self, leaf: torch.Tensor, type: TensorType, piece: torch.Tensor) -> torch.Tensor:
        """Return the gradient of a user's tensor: for a DTensor one with its placements, else a full tensor."""
        if self.job is None:
            return piece
        if is_dtensor(leaf):
            return dtensor_like(piece, leaf)
        return full_tensor(self._global(piece, type, leaf))

    def _global(self, piece: torch.Tensor, type: TensorType, like: torch.Tensor) -> torch.Tensor:
        """Return the global tensor of a piece: differentiable, with the shape and strides of ``like``."""
        from torch.distributed.tensor import DTensor

        assert self.job is not None
        placements = placements_of(type.attr, self.mesh, type.shape)
        return DTensor.from_local(
            piece, self.job.device_mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
        )
