"""``autopar.devices``: the mesh is chosen together with the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from searched import FAST
from torch import nn

import autopar
from autopar import Mesh
from autopar.costs.machine import Link
from autopar.ir.mesh import ranks_by_group
from autopar.model import choose_mesh
from autopar.report.hosts import bytes_between_hosts
from autopar.search.devices.meshes import meshes

X = torch.randn(32, 64, dtype=torch.float64)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).double()


@pytest.mark.parametrize(
    ("count", "shapes"),
    [
        (1, [(1,)]),
        (7, [(7,)]),
        (8, [(8,), (2, 4), (4, 2), (2, 2, 2)]),
        (12, [(12,), (2, 6), (3, 4), (4, 3), (6, 2), (2, 2, 3), (2, 3, 2), (3, 2, 2)]),
    ],
)
def test_all_meshes_of_a_number_of_ranks(count: int, shapes: list[tuple[int, ...]]) -> None:
    assert [tuple(mesh.sizes.values()) for mesh in meshes(count)] == shapes


@pytest.mark.long
def test_the_mesh_with_the_cheapest_plan() -> None:
    module = model()
    parallel = autopar.parallelize(module, autopar.devices(8, FAST), example=(X,))
    solution = parallel.solution
    assert solution is not None and solution.exact
    assert autopar.price(parallel.program, FAST).nanoseconds == solution.nanoseconds
    others = {}
    for mesh in meshes(8):
        other = autopar.parallelize(module, mesh, "search", example=(X,), machine=FAST).solution
        assert other is not None
        others[mesh.axes] = other.nanoseconds
    assert solution.nanoseconds == min(others.values()) == others[parallel.mesh.axes]
    (note,) = parallel.reports["plan"].notes
    assert note.startswith(f"the mesh ({parallel.mesh}) is the fastest of 4; the others: ")
    torch.testing.assert_close(parallel.simulate(X), module(X))


def test_the_second_start_compares_no_meshes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searched = []
    search = choose_mesh.search
    monkeypatch.setattr(choose_mesh, "search", lambda *a, **kw: searched.append(1) or search(*a, **kw))
    found = []
    for _ in range(2):
        parallel = autopar.parallelize(model(), autopar.devices(4, FAST), example=(X,), cache=tmp_path)
        said = [row.notes[0].partition(":")[0] for row in parallel.reports if row.name.startswith("cache")]
        found.append((parallel.mesh, str(parallel.program), parallel.reports["plan"].notes, said, len(searched)))
    first, second = found
    assert first[:3] == second[:3]
    assert first[3:] == (["miss", "miss"], 2) and second[3:] == (["hit", "hit"], 2)
    autopar.parallelize(model(), autopar.devices(4, FAST), example=(X,), cache=tmp_path, memory=1e9)
    assert len(searched) == 4, "another limit is another choice"


def test_no_time_is_left_for_most_meshes() -> None:
    parallel = autopar.parallelize(model(), autopar.devices(4, FAST), example=(X,), time_limit=0)
    assert parallel.mesh == Mesh(a=4)
    (note,) = parallel.reports["plan"].notes
    assert note == "the mesh (a=4) is the fastest of 1; 1 more have no plan, as (a=2 b=2): the time limit came before"


def test_one_device() -> None:
    assert autopar.parallelize(model(), autopar.devices(1), example=(X,)).mesh == Mesh(a=1)


@pytest.mark.parametrize("count", [0, -1, 2**30, 2.0, True, "8", None])
def test_no_number_of_devices(count: Any) -> None:
    with pytest.raises(ValueError, match="is no number of devices from 1 to"):
        autopar.devices(count)


def test_what_devices_need() -> None:
    with pytest.raises(ValueError, match="there is no machine 'abacus'"):
        autopar.devices(8, "abacus")
    with pytest.raises(ValueError, match=r"give its arguments as example=\(x,\)"):
        autopar.parallelize(model(), autopar.devices(8))
    with pytest.raises(ValueError, match="a plan that names axes needs a Mesh"):
        autopar.parallelize(model(), autopar.devices(8), {"*.weight": ("dp",)}, example=(X,))
    with pytest.raises(ValueError, match='all ranks bring the batch: inputs="global"'):
        autopar.parallelize(model(), autopar.devices(8), example=(X,), inputs="local")


@pytest.mark.long
@pytest.mark.parametrize("bandwidth", [1e5, 1e8])
def test_the_axis_with_most_traffic_is_inside_the_hosts(bandwidth: float) -> None:
    """In the meshes that are compared, the axes differ in which of them crosses hosts."""
    machine = replace(FAST, name="slow between hosts", ranks_per_node=4, outside=Link(1e-6, bandwidth))
    parallel = autopar.parallelize(model(), autopar.devices(8, machine), example=(X,))
    moved = parallel.reports["levels"].bytes
    most = max(moved, key=moved.__getitem__)
    assert all(len({rank // 4 for rank in group}) == 1 for group in ranks_by_group(parallel.mesh, (most,)))
    assert 2 * bytes_between_hosts(parallel.program, machine) < moved[most]
