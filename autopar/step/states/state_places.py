"""Put the states of an optimizer where their parameters are: on the whole mesh, or on the mesh of a stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from autopar.ir.dtensor import mesh_of, placements_of
from autopar.ir.layout import DistAttr
from autopar.ir.mesh import Mesh
from autopar.model.dtensor_parameters import holds_part_of, is_on_a_stage, local_of, placed_on
from autopar.optimizers import HOST
from autopar.runtime.dtensors import dtensor_of_piece, full_tensor, is_dtensor, redistribute
from autopar.runtime.processes.job import Job

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement


class StatePlaces:
    """Where the states of parameters are.

    A state with the shape of its parameter has the mesh of the parameter. Of a parameter on the whole mesh, other
    states are plain tensors, which all ranks have. Of a parameter on a stage they are replicated on the stage, since
    only its ranks compute them; and counts of steps are plain tensors again, which all ranks count.

    Args:
        mesh: the whole mesh.
        job: the processes; ``None`` in a process that is alone, where all states are plain tensors.
        offload: whether the states are in host memory.
    """

    def __init__(self, mesh: Mesh, job: Job | None, offload: bool) -> None:
        self.job, self.offload = job, offload
        self._meshes: dict[DeviceMesh, Mesh] = {} if job is None else {job.device_mesh: mesh}

    def device(self, parameter: torch.Tensor) -> torch.device:
        """Return the device of a parameter's pieces."""
        return local_of(parameter).device if self.job is None else self.job.device

    def piece(self, parameter: torch.nn.Parameter, attr: DistAttr,
              stands_in_on: Literal["meta"] | None = None) -> torch.Tensor:  # fmt: skip
        """Return this process's piece of a parameter, in the layout of its states. All ranks call it.

        Args:
            stands_in_on: the device of the zeros that stand in for it on a rank outside of its stage, where states
                begin without values; ``None``: that of the parameter.
        """
        if holds_part_of(parameter):
            return local_of(self.placed(parameter.detach(), parameter, attr))
        mesh = self._mesh(_device_mesh(parameter))
        first = attr.local_shape(tuple(parameter.shape), mesh, mesh.coordinates(mesh.ranks[0]))
        return torch.zeros(first, dtype=parameter.dtype, device=stands_in_on or self.device(parameter))

    def placed(
        self, value: torch.Tensor, parameter: torch.nn.Parameter, attr: DistAttr, counted: bool = False
    ) -> torch.Tensor:
        """Return a state in the layout ``attr`` where its parameter is. All ranks call it.

        Args:
            counted: whether it counts steps.
        """
        placed = self._placed(value, parameter, attr, counted)
        return placed.to(HOST) if self.offload and not placed.is_meta else placed

    def _placed(
        self, value: torch.Tensor, parameter: torch.nn.Parameter, attr: DistAttr, counted: bool
    ) -> torch.Tensor:
        if self.job is None:
            return value
        device, device_mesh, alike = self.device(parameter), _device_mesh(parameter), value.shape == parameter.shape
        if not self._is_laid_out(parameter, alike, counted):
            return self._on_all_ranks(value)
        placements = self._placements(parameter, attr, value.shape)
        if is_dtensor(value) and value.device_mesh == device_mesh:
            return value if value.placements == placements else redistribute(value.to(device), placements)
        if is_on_a_stage(parameter, self.job) or is_on_a_stage(value, self.job):
            return placed_on(value.detach(), device_mesh, placements, self.job)
        from torch.distributed.tensor import distribute_tensor

        value = full_tensor(value.to(device)) if is_dtensor(value) else value
        return distribute_tensor(value.detach().to(device).contiguous(), device_mesh, placements)

    def surface(self, piece: torch.Tensor, parameter: torch.nn.Parameter, attr: DistAttr, like: torch.Size,
                counted: bool) -> torch.Tensor:  # fmt: skip
        """Return a new state in the form that the optimizer keeps: a DTensor if the parameter is one.

        Args:
            piece: this process's piece of the state; on a rank outside of the parameter's stage, what stands in for it.
            like: the shape of the parameter's piece, or of what stands in for that.
            counted: whether it counts steps.
        """
        if not holds_part_of(parameter):
            empty = () if counted or not piece.dim() else (0,)
            local = torch.zeros(empty, dtype=piece.dtype, device=HOST if self.offload else self.device(parameter))
        else:
            local = piece
        alike = piece.shape == like
        if self.job is None or not self._is_laid_out(parameter, alike, counted):
            return local
        shape = parameter.shape if alike else piece.shape
        stride = parameter.stride() if alike else torch.empty(shape, device="meta").stride()
        return dtensor_of_piece(
            local, _device_mesh(parameter), self._placements(parameter, attr, shape), tuple(shape), stride
        )

    def _is_laid_out(self, parameter: torch.Tensor, alike: bool, counted: bool) -> bool:
        """Return whether a state is a DTensor, and no plain tensor that all ranks have.

        ``alike``: whether it has the shape of its parameter.
        """
        assert self.job is not None
        return not counted and (is_on_a_stage(parameter, self.job) or (alike and parameter.dim() > 0))

    def _on_all_ranks(self, value: torch.Tensor) -> torch.Tensor:
        """Return a plain tensor; one that only a stage has is sent to all ranks."""
        from torch.distributed.tensor import Replicate

        assert self.job is not None
        if not is_on_a_stage(value, self.job):
            return value
        device_mesh = self.job.device_mesh
        return local_of(placed_on(value.detach(), device_mesh, [Replicate()] * device_mesh.ndim, self.job))

    def _placements(self, parameter: torch.Tensor, attr: DistAttr, shape: torch.Size) -> tuple[Placement, ...]:
        """Return the placements of a state; one of another shape than the parameter is replicated."""
        attr = attr if shape == parameter.shape else DistAttr.replicated(len(shape))
        return placements_of(attr, self._mesh(_device_mesh(parameter)), tuple(shape))

    def _mesh(self, device_mesh: DeviceMesh) -> Mesh:
        if device_mesh not in self._meshes:
            self._meshes[device_mesh] = mesh_of(device_mesh)
        return self._meshes[device_mesh]


def _device_mesh(parameter: torch.Tensor) -> DeviceMesh:
    assert is_dtensor(parameter)
    return parameter.device_mesh
