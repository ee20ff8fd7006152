"""Put parameters on stages of a mesh, and do with their state what users do. Each function runs on four ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from loops import whole as whole_value
from torch import nn

import autopar
from autopar import Mesh
from autopar.ir.dtensor import edge_of, placements_of
from autopar.ir.layout import DistAttr, Layout
from autopar.model.dtensor_parameters import move_parameters
from autopar.runtime.dtensors import is_dtensor
from autopar.runtime.processes.groups import process_groups

# what parallelize refuses on an axis ``pp`` is not the matter of these tests
MESHES: dict[str, dict[str, int]] = {
    "pp4": {"stage": 4},
    "pp2 tp2": {"stage": 2, "tp": 2},
    "dp2 pp2": {"dp": 2, "stage": 2},
    "tp2 pp2": {"tp": 2, "stage": 2},
}
PLAN: dict[str, Any] = {"up.weight": ("tp", None), "up.bias": ("tp",), "down.weight": (None, "tp")}


class Net(nn.Module):
    """Parameters of several shapes: uneven, merged, tied, of one number, frozen; and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)
        self.qkv = nn.Linear(6, 24, bias=False)
        self.scale = nn.Parameter(torch.randn(()))
        self.head = nn.Linear(9, 6)
        self.head.weight = self.down.weight
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.register_buffer("seen", torch.arange(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.head(self.up(x)) + self.down(self.up(x)) * self.scale).square().mean() + self.qkv(x).mean()


def stage(mesh: Mesh, number: int) -> Mesh:
    """The ranks of a mesh with this coordinate along the axis ``stage``, on the other axes."""
    return Mesh(
        {axis: size for axis, size in mesh.axes if axis != "stage"},
        ranks=[rank for rank in mesh.ranks if mesh.coordinates(rank)["stage"] == number],
        name=f"stage{number}",
    )


def cut(model: nn.Module, mesh: Mesh, shift: int = 0) -> dict[str, Layout]:
    """A home for each parameter, in turn on each stage; one has a merged dim."""
    homes = {}
    for k, (name, parameter) in enumerate(model.named_parameters()):
        place = stage(mesh, (k + shift) % mesh.sizes["stage"])
        homes[name] = Layout(place, attr_of(name, parameter, place, merged=True))
    return homes


def whole(model: nn.Module, mesh: Mesh) -> dict[str, Layout]:
    """Every home on the whole mesh, as the plan says."""
    return {name: Layout(mesh, attr_of(name, parameter, mesh)) for name, parameter in model.named_parameters()}


def attr_of(name: str, parameter: torch.Tensor, mesh: Mesh, merged: bool = False) -> DistAttr:
    if merged and "tp" in mesh.names and name == "qkv.weight":
        return DistAttr((((3, ()), (8, ("tp",))), ((None, ()),)))
    if "tp" not in mesh.names or name not in PLAN:
        return DistAttr.replicated(parameter.dim())
    return edge_of(DistAttr.split(*PLAN[name]), mesh, tuple(parameter.shape))


def made(sizes: Mapping[str, int], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    plan = {name: dims for name, dims in PLAN.items() if "tp" in sizes}
    return autopar.parallelize(Net().double(), Mesh(sizes), plan)


def values(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: parameter.detach() for name, parameter in Net().double().named_parameters()}


def check_place(tensor: Any, value: torch.Tensor, home: Layout, job: Any) -> None:
    """A DTensor lies as its home says, to the bit, and its piece is empty on the other ranks."""
    assert tensor.shape == value.shape and tensor.dtype == value.dtype
    assert tensor.device_mesh.mesh.flatten().tolist() == list(home.mesh.ranks)
    assert tensor.placements == placements_of(home.attr, home.mesh, tuple(value.shape))
    piece = tensor.detach().to_local()
    if job.rank in home.mesh:
        parts = home.attr.local_shape(value.shape, home.mesh, home.mesh.coordinates(job.rank))
        assert tuple(piece.shape) == parts
        assert torch.equal(tensor.detach().full_tensor(), value)
    else:
        assert piece.numel() == 0 or not value.dim()


def values_here(tensor: Any) -> torch.Tensor | None:
    """The full values of a tensor, on a rank that has a part of them; else ``None``, and its piece is empty."""
    if not is_dtensor(tensor):
        return tensor.detach()
    if tensor.device_mesh.get_coordinate() is not None:
        return whole_value(tensor.detach())
    assert tensor.to_local().numel() == 0 or not tensor.dim()
    return None


def moved(sizes: dict[str, int]) -> None:
    """From the whole mesh to stages, to other stages, and back: the values stay, and so do the objects."""
    groups = len(process_groups())
    parallel, expected = made(sizes), values()
    mesh, job, before = parallel.mesh, parallel.job, dict(parallel.named_parameters())
    optimizer = torch.optim.AdamW(parallel.parameters())
    parallel.scale.tag = "kept"
    parallel.up.weight.grad = torch.ones_like(parallel.up.weight)
    for homes in (cut(parallel, mesh), cut(parallel, mesh), cut(parallel, mesh, 1), whole(parallel, mesh)):
        move_parameters(parallel.module, homes, job)
        assert parallel.up.weight.grad is None
        for name, parameter in parallel.named_parameters():
            assert parameter is before[name] and parameter.requires_grad == (name != "frozen")
            check_place(parameter, expected[name], homes[name], job)
        assert parallel.head.weight is parallel.down.weight and parallel.scale.tag == "kept"
        assert optimizer.param_groups[0]["params"] == list(parallel.parameters())
    parallel(torch.ones(4, 6, dtype=torch.float64)).backward()
    parallel.close()
    assert len(process_groups()) == groups  # those of the stages are closed, too
