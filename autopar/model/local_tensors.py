"""Take this rank's pieces of the tensors of a call, and make global tensors of the pieces that a program returns."""

from __future__ import annotations

from typing import NamedTuple

import torch

from autopar.capture.model_state import ModelState, Named
from autopar.ir.dtensor import placements_of
from autopar.ir.mesh import Mesh
from autopar.ir.record import TensorType
from autopar.model.dtensor_parameters import local_of
from autopar.model.inputs import CallInputs, piece_of
from autopar.runtime.dtensors import full_tensor, is_dtensor
from autopar.runtime.interface import Interface
from autopar.runtime.processes.job import Job
from autopar.torch_private import dtensor_like


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
