"""A step whose optimizer's state is in host memory has the bits of one without, and copies what it should when it should."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import loops
import pytest
import steps
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizer_steps import drawn
from processes import ranks
from steps import adamw, narrow, run, sgd
from torch import distributed, nn
from torch.overrides import TorchFunctionMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import autopar
from autopar import Mesh, checkpoint
from autopar.loss_scaling import LossScaling
from autopar.optimizers import AVERAGED, IN_PLACE, OFFLOADED, offload, register_optimizer
from autopar.optimizers.definition import DEFINITIONS
from autopar.optimizers.ops import SCHEDULED, SIGNATURES, TRUTHS, UPDATES, states_of
from autopar.shards import is_dtensor, local_of

Batches = Callable[[int], Mapping[str, torch.Tensor]]

OVERFLOWS = LossScaling(initial=2.0**30, growth=2.0**8, backoff=2.0**-8, interval=3)
FULL = {"microbatches": 2, "clip_norm": 0.5, "ema": 0.9}


def made(sizes: dict[str, int], optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw, low: bool = False, **options: Any) -> tuple[Any, Batches]:
    torch.manual_seed(0)
    make, batches, plan = steps.MODELS["mlp"]
    model = make().float() if low else make()
    parallel = autopar.parallelize(model, Mesh(sizes), plan if "tp" in sizes else None)
    return parallel.train_step(optimizer(parallel), **options), (lambda k: narrow(batches(k))) if low else batches


def everything(step: Any) -> dict[str, torch.Tensor]:
    """This rank's pieces of parameters, of the optimizer's state, and of averages; copies."""
    named = dict(step.parallel.named_parameters())
    found = {name: local_of(parameter) for name, parameter in named.items()}
    found |= {f"{name}.{key}": local_of(value) for name, parameter in named.items() for key, value in step.optimizer.state[parameter].items()}
    found |= {f"{name}.ema": local_of(average) for name, average in (step.ema or {}).items()}
    return {name: tensor.clone() for name, tensor in found.items()}


def check_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])] == []


class Travels:
    """How many tensors went to the host, call by call, inside of the block."""

    def __enter__(self) -> list[int]:
        self.real, found = offload.to_host, []
        offload.to_host = lambda tensors: (found.append(len(tensors)), self.real(tensors))[1]  # type: ignore[assignment]
        return found

    def __exit__(self, *_: Any) -> None:
        offload.to_host = self.real


def alike(sizes: dict[str, int], optimizer: Callable[[nn.Module], torch.optim.Optimizer], options: Mapping[str, Any], low: bool = False, count: int = 10,
          called: bool = False) -> tuple[list[int], list[bool]]:  # fmt: skip
    """After each step losses, norms and all that is kept are, bit for bit, those of the same step without. What travelled, what was skipped."""
    (without, batches), (step, _) = (made(sizes, optimizer, low, offload=one, **options) for one in (False, True))
    travelled, skipped = [], []
    for k in range(count):
        theirs = run(without, batches(k), promoted=not low, called=called)
        with Travels() as found:
            ours = run(step, batches(k), promoted=not low, called=called)
        travelled += found
        assert torch.equal(ours, theirs) and (step.grad_norm is None or step.grad_norm.allclose(without.grad_norm, rtol=0, atol=0, equal_nan=True)), k
        check_same(everything(step), everything(without))
        skipped.append(bool(step.skipped))
    return travelled, skipped


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def on_processes() -> None:
    for zero in (0, 1, 3):
        for optimizer in (adamw, sgd):
            travelled, _ = alike({"dp": 2}, optimizer, {**FULL, "zero": zero})
            assert len(travelled) == 10 * 3, "two groups of parameters, and all averages"
        _, skipped = alike({"dp": 2}, adamw, {**FULL, "zero": zero, "amp": "fp16-O2", "loss_scale": OVERFLOWS}, low=True, count=8)
        assert skipped == [True, True, False, False, False, True, False, False]
    travelled, _ = alike({"dp": 2}, plain_sgd, {"zero": 1}, count=2)
    assert travelled == [], "it has no state"


def test_ten_steps_on_processes() -> None:
    ranks(2).run(on_processes)


def test_one_process() -> None:
    travelled, _ = alike({"dp": 1}, adamw, FULL, count=3, called=True)
    assert len(travelled) == 3 * 3


def test_simulated() -> None:
    """There is one memory, so there is nothing to bring anywhere."""
    travelled, _ = alike({"dp": 2, "tp": 2}, adamw, {**FULL, "zero": 1})
    assert travelled == []


# -- where states are ------------------------------------------------------------------------------------------------


def moved(folder: str) -> None:
    """A checkpoint of a step that offloads goes on as the step does: in one that does, in one that does not, and with another stage of ZeRO."""
    step, batches = made({"dp": 2}, offload=True, zero=1, ema=0.9)
    for k in range(2):
        run(step, batches(k))
    states = [value for one in step.optimizer.state.values() for value in one.values()]
    assert {value.device.type for value in (*states, *step.ema.values())} == {"cpu"} and any(is_dtensor(v) and v.placements[0].is_shard() for v in states)
    checkpoint.save(folder, step.state_dict())
    run(step, batches(2))
    wanted = {name: loops.whole(value) for name, value in _values(step).items()}
    for options in ({"offload": True, "zero": 1}, {"offload": False, "zero": 1}, {"offload": True, "zero": 3}, {"offload": True, "zero": 0}):
        other, _ = made({"dp": 2}, ema=0.9, **options)
        other.capture(batches(9))
        other.load_state_dict(checkpoint.load(folder, other.state_dict()))
        run(other, batches(2))
        check_same({name: loops.whole(value) for name, value in _values(other).items()}, wanted)


def _values(step: Any) -> dict[str, torch.Tensor]:
    named = dict(step.parallel.named_parameters())
    found = {f"{name}.{key}": value for name, parameter in named.items() for key, value in step.optimizer.state[parameter].items()}
    return {**named, **found, **{f"{name}.ema": average for name, average in step.ema.items()}}


def test_checkpoints(tmp_path: Path) -> None:
    ranks(2).run(moved, str(tmp_path))


@pytest.fixture
def accelerator() -> Iterator[DeviceMesh]:
    """A device mesh of an accelerator that is not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield DeviceMesh("cuda", torch.arange(2), mesh_dim_names=("dp",), _init_backend=False)
    finally:
        distributed.destroy_process_group()


def test_states_of_an_accelerator_are_on_the_host(accelerator: DeviceMesh) -> None:
    """Where parameters are DTensors of a mesh of GPUs, so are their states, and the local tensors of these are on the CPU. Nothing is computed."""
    job = Job(0, accelerator, {}, torch.device("cuda", 0), None)  # type: ignore[arg-type]
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        local = torch.empty(3, 4, device="cuda")
        parameter = nn.Parameter(DTensor.from_local(local, accelerator, [Shard(0)], run_check=False, shape=(6, 4), stride=(4, 1)))
        for offload in (True, False):
            owned = Owned(torch.optim.AdamW([parameter]), [("w", parameter)], Mesh(dp=2), job, offload)
            split = DistAttr.parse("2/dp 4") if False else None
