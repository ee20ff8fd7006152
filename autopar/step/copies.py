"""The low-precision copies of parameters that ``micro`` computes with: parameters themselves stay in float32 (master weights), and with
ZeRO split as the optimizer's state is. The update makes new copies; who else writes to a parameter makes them stale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from autopar.dtensor import placements_of
from autopar.mesh import Mesh
from autopar.record import TensorType
from autopar.runtime.job import Job
from autopar.shards import local_of
from autopar.torch_private import version_of


@dataclass
class Copies:
    """This process's pieces of the copies, by parameter; full tensors where it is alone.

    Attributes:
        made: name → the copy.
    """

    mesh: Mesh
    job: Job | None
    made: dict[str, torch.Tensor] = field(default_factory=dict)
    _versions: dict[str, tuple[int, int]] = field(default_factory=dict)

    def refresh(self, parameters: Mapping[str, torch.Tensor], types: Mapping[str, TensorType]) -> dict[str, torch.Tensor]:
        """The copies, of these types; those of parameters that have been written to are made anew. All ranks call it.

        What is written through ``parameter.data`` is not seen: torch does not count it.
        """
        for name, type in types.items():
            parameter, piece = parameters[name], self.made.get(name)
            if piece is None or piece.dtype != type.dtype or self._versions[name] != _version(parameter):
                self.made[name] = self._copy(parameter.detach(), type)
                self._versions[name] = _version(parameter)
        return {name: self.made[name] for name in types}

    def keep(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """After an update, which has made them anew."""
        self._versions = {name: _version(parameters[name]) for name in self.made}

    def _copy(self, parameter: torch.Tensor, type: TensorType) -> torch.Tensor:
        low = parameter.to(type.dtype)
        if self.job is not None:
            low = low.redistribute(placements=placements_of(type.attr, self.mesh, type.shape))  # type: ignore[attr-defined]
        return local_of(low).clone()


def _version(parameter: torch.Tensor) -> tuple[int, int]:
    """The parameter's memory, and how often it was written to."""
    piece = local_of(parameter)
    return piece.data_ptr(), version_of(piece)
