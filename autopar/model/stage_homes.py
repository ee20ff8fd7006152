"""Name the stage of a pipeline on which each parameter of a model is kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh


@dataclass(frozen=True)
class StageHomes:
    """Where the parameters of a model are, once it is cut into stages.

    Attributes:
        mesh: the whole mesh.
        meshes: the mesh of each stage.
        stage: parameter → its stage.
        layouts: parameter → its mesh and layout.
    """

    mesh: Mesh
    meshes: tuple[Mesh, ...]
    stage: Mapping[str, int]
    layouts: Mapping[str, Layout]
