"""A parameter of other ranks keeps its device through what is done with it; meta stands for a device that is no CPU."""

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import autopar
from autopar import Mesh
from autopar.ir.layout import DistAttr, Layout
from autopar.model.dtensor_parameters import holds_part_of, move_parameters
from autopar.runtime.dtensors import dtensor_of_piece, redistribute
from autopar.runtime.elsewhere import Elsewhere
from autopar.torch_private import DisableTorchFunctionSubclass, device_mesh_of_others


@pytest.fixture
def weight() -> Iterator[torch.nn.Parameter]:
    with autopar.one_rank(Mesh(dp=2), 0):
        mesh = device_mesh_of_others("cpu", torch.tensor([1]), ("stage",))
        piece = torch.zeros(0, device="meta")
        yield torch.nn.Parameter(dtensor_of_piece(piece, mesh, [Replicate()], (4, 4), (4, 1)))


def parameter_of_step(x: Any) -> Any:
    with DisableTorchFunctionSubclass():  # as while a step runs
        return torch.nn.Parameter(x.detach().clone().to(torch.float64))


MADE: dict[str, Callable[[Any], Any]] = {
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "clone": lambda x: x.clone(),
    "cast": lambda x: x.to(torch.bfloat16),
    "zeros_like": torch.zeros_like,
    "rand_like": torch.rand_like,
    "sum with a graph": lambda x: (x * 2).sum(),
    "product": lambda x: x.t() @ x.detach(),
    "parts": lambda x: x.split(2)[1],
    "list op": lambda x: torch._foreach_mul([x, x], 2.0)[1],
    "parameter": lambda x: torch.nn.Parameter(x.detach()),
    "while a step runs": parameter_of_step,
    "deepcopy": copy.deepcopy,
    "redistributed": lambda x: redistribute(x.detach(), [Shard(0)]),
}


@pytest.mark.parametrize("name", MADE)
def test_what_is_made_of_it_keeps_the_device(weight: torch.nn.Parameter, name: str) -> None:
    made = MADE[name](weight)
    assert (type(made), made.device, made.to_local().device) == (Elsewhere, weight.device, weight.device)
    assert weight.is_meta


def test_a_device_that_is_asked_for_is_taken(weight: torch.nn.Parameter) -> None:
    assert torch.zeros_like(weight, device="cpu").device.type == "cpu"
    there = torch.zeros_like(weight, device="cpu").detach()
    assert [there.to("meta").device.type, there.cpu().device.type, there.to(weight).device.type] == [
        "meta", "cpu", "meta",
    ]  # fmt: skip


def test_in_place_functions_return_it(weight: torch.nn.Parameter) -> None:
    x = weight.detach()
    assert x.mul_(2) is x and x.copy_(x.clone()) is x and x.__iadd__(1) is x
    torch._foreach_lerp_([x], [weight.detach()], 0.5)
    assert x.is_meta


def test_copies_are_parameters_with_gradients(weight: torch.nn.Parameter) -> None:
    weight.grad, weight.note = torch.zeros_like(weight), "kept"  # type: ignore[attr-defined]
    copied = copy.deepcopy(weight)
    assert isinstance(copied, torch.nn.Parameter) and copied.requires_grad and copied.note == "kept"  # type: ignore[attr-defined]
    assert copied.grad is not None and copied.grad.is_meta and copied.grad is not weight.grad


def test_modules_averages_and_optimizers_take_it(weight: torch.nn.Parameter) -> None:
    model = torch.nn.Linear(4, 4, bias=False)
    model.weight = weight
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(2):
        averaged.update_parameters(model)
    assert averaged.module.weight.is_meta
    model.load_state_dict(averaged.module.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert optimizer.state[weight]["momentum_buffer"].is_meta
    optimizer.zero_grad(set_to_none=False)
    assert model.weight is weight and weight.is_meta and weight.grad.is_meta


def test_it_is_saved_and_loaded(weight: torch.nn.Parameter) -> None:
    file = io.BytesIO()
    torch.save(weight.detach(), file)
    file.seek(0)
    assert type(torch.load(file, weights_only=False)) is Elsewhere


def test_parameters_that_move_parameters_and_back_keep_the_device() -> None:
    mesh, own, other = Mesh(pp=2), Mesh(pp=1, ranks=[0]), Mesh(pp=1, ranks=[1])
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(2)))
    with autopar.one_rank(mesh, 0):
        calls = autopar.parallelize(model, mesh, cache=False)._calls
        first, second = calls.module.parameters()
        for stages in ((own, other), (other, own), (mesh, mesh)):
            homes = [Layout(stage, DistAttr.replicated(2)) for stage in stages]
            move_parameters(calls.module, {"0.weight": homes[0], "1.weight": homes[1]}, calls.job)
            assert [first.is_meta, second.is_meta] == [True, True]
            assert [holds_part_of(first), holds_part_of(second)] == [stage is not other for stage in stages]
            assert [first, second] == list(calls.module.parameters())
