"""Trainings with a fused qkv weight, whose states go through folders of ``torch.distributed.checkpoint``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from error_texts import refused
from loops import whole
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import autopar
from autopar import Mesh
from autopar.torch_private import is_strided_shard

PLAN = {"mix.qkv.weight": ("(3 8/tp)", None), "mix.qkv.bias": ("(3 8/tp)",), "out.weight": (None, "tp")}
MESHES = {"dp2 tp2": {"dp": 2, "tp": 2}, "tp4": {"tp": 4}, "dp4": {"dp": 4}, "pp2 tp2": {"pp": 2, "tp": 2}}
STEPS = 2


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return q * k.sigmoid() + v


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = Mix(), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.mix(x)).square().mean()


def model(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def alone(steps: int) -> dict[str, torch.Tensor]:
    """The weights on one device."""
    net = model(0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        net(batch(step)).backward()
        optimizer.step()
    return dict(net.state_dict())


def made(mesh: str, seed: int) -> Any:
    sizes = MESHES[mesh]
    parallel = autopar.parallelize(model(seed), Mesh(sizes), PLAN if "tp" in sizes else "ddp")
    options: dict[str, Any] = {"microbatches": 2, "schedule": "1f1b"} if "pp" in sizes else {}
    return parallel.train_step(torch.optim.AdamW(parallel.parameters(), lr=0.05), ema=0.9, **options)


def check(step: Any, steps: int) -> None:
    """Parameters lie as the plan says, and have the values of one device."""
    merged = step.parallel.mix.qkv.weight
    assert any(map(is_strided_shard, merged.placements)) == ("tp" in step.parallel.mesh.names)
    for name, value in alone(steps).items():
        found = dict(step.parallel.named_parameters())[name]
        if found.device_mesh.get_coordinate() is not None:
            torch.testing.assert_close(whole(found).detach(), value, rtol=0, atol=1e-12)


# -- on ranks -----------------------------------------------------------------------------------------------------


def states_of_steps(folder: str, names: list[str]) -> None:
    """Each training goes on from the folder of the one before, on another mesh, and ends where one device does."""
    for k, name in enumerate(names):
        step = made(name, seed=k)
        step.capture(batch(0))
        if k:
            step(batch(99))
            state = step.state_dict()
            loaded = {key: state[key] for key in ("model", "optimizer", "ema")}
            dcp.load(loaded, checkpoint_id=f"{folder}/{k - 1}")
            step.load_state_dict({**state, **loaded, "step": k * STEPS})
        for number in range(k * STEPS, (k + 1) * STEPS):
            step(batch(number))
        check(step, (k + 1) * STEPS)
        state = step.state_dict()
        dcp.save({key: state[key] for key in ("model", "optimizer", "ema")}, checkpoint_id=f"{folder}/{k}")
        step.parallel.close()


def torchs_state_dicts(folder: str, mesh: str) -> None:
    """Those that torch makes of model and optimizer, and that of a submodule."""
    first, second = made(mesh, 0), made(mesh, 1)
    for step in (first, second):
        for number in range(STEPS):
            step(batch(number))

    def parts(step: Any) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(step.parallel),
            "optimizer": get_optimizer_state_dict(step.parallel, step.optimizer),
            "mix": step.parallel.mix.state_dict(),
        }

    dcp.save(parts(first), checkpoint_id=folder)
    loaded = parts(second)
    dcp.load(loaded, checkpoint_id=folder)
    for name, tensor in loaded["mix"].items():
        assert torch.equal(whole(tensor), whole(loaded["model"][f"mix.{name}"]))
    set_model_state_dict(second.parallel, loaded["model"])
    set_optimizer_state_dict(second.parallel, second.optimizer, loaded["optimizer"])
    second(batch(STEPS))
    check(second, STEPS + 1)
    second.parallel.mix.load_state_dict(first.parallel.mix.state_dict())
    assert torch.equal(whole(second.parallel.mix.qkv.weight), whole(first.parallel.mix.qkv.weight))
    for step in (first, second):
        step.parallel.close()


def full_state_dicts() -> list[str]:
    """What torch's full state dicts are refused for: none waits, and none is wrong. Then they work as the texts say."""
    sent, each = (StateDictOptions(full_state_dict=True, broadcast_from_rank0=sends) for sends in (True, False))
    step = made("pp2 tp2", 1)
    parallel, optimizer, wanted = step.parallel, step.optimizer, alone(STEPS)
    first = wanted if distributed.get_rank() == 0 else {}
    step(batch(99))

    def texts(*calls: Any) -> list[str]:
        return [refused(RuntimeError, call) for call in calls]

    found = texts(
        lambda: set_model_state_dict(parallel, dict(first), options=sent),
        lambda: get_model_state_dict(parallel, options=each),
        lambda: set_optimizer_state_dict(parallel, optimizer, {}, options=sent),
        lambda: get_optimizer_state_dict(parallel, optimizer, options=each),
    )
    set_model_state_dict(parallel, dict(wanted), options=each)
    parallel.leave_stages()
    found += texts(lambda: set_model_state_dict(parallel, dict(first), options=sent))
    for name, value in get_model_state_dict(parallel, options=each).items():
        assert torch.equal(value, wanted[name]), name
    parallel.close()
    return found
