"""A mesh with fewer ranks than there are processes on several hosts: the error says how many hosts it needs."""

from __future__ import annotations

import re

import pytest

from autopar import Mesh
from autopar.runtime.processes.job import _check_size

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("nodes", "mesh", "text"),
    [
        ("3", Mesh(dp=8), "has 8 ranks, and there are 12 processes on 3 hosts; start one for each, as with torchrun "
                          "--nnodes 2 --nproc-per-node 4, or give a mesh of 12"),
        ("3", Mesh(dp=6), "has 6 ranks, and there are 12 processes on 3 hosts; start one for each, as with torchrun "
                          "--nnodes 1 --nproc-per-node 6, or give a mesh of 12"),
        ("1", Mesh(dp=6), "has 6 ranks, and there are 12 processes; start one for each, as with torchrun "
                          "--nproc-per-node 6, or give a mesh of 12"),
    ],
)  # fmt: skip
def test_more_hosts_than_the_mesh_needs(monkeypatch: pytest.MonkeyPatch, nodes: str, mesh: Mesh, text: str) -> None:
    monkeypatch.setenv("GROUP_WORLD_SIZE", nodes)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=re.escape(text)):
        _check_size(mesh, 12)
