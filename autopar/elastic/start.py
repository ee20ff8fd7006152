"""Say from which step a job goes on, on which mesh, and how many steps were lost."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.mesh import Mesh


@dataclass(frozen=True)
class Start:
    """Where a training goes on.

    Attributes:
        folder: the folder of the checkpoints.
        is_resumed: whether there was a checkpoint.
        taken: the steps of the checkpoint; 0 if there was none.
        lost: the steps that had been taken after it, and are taken again.
        steps: the steps of the whole training.
        every: the steps between two checkpoints.
        mesh: the mesh on which it goes on.
    """

    folder: str
    is_resumed: bool
    taken: int
    lost: int
    steps: int
    every: int
    mesh: Mesh

    def __str__(self) -> str:
        next_step = f"step {self.taken + 1} of {self.steps} is next" if self.taken < self.steps else "no step is left"
        source = f"from {self.folder}" if self.is_resumed else f"and {self.folder} has no checkpoint"
        lost = f"; {self.lost} step{'s' * (self.lost != 1)} lost" if self.is_resumed or self.lost else ""
        return f"{next_step}, on {self.mesh}, {source}{lost}"
