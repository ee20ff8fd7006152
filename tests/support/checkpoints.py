"""States of a step on several meshes, and what ranks do with their checkpoints."""

from __future__ import annotations

import ctypes
import gc
import resource
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import processes
import torch
from torch import distributed, nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor

import autopar
from autopar import Mesh, checkpoint
from autopar.torch_private import strided_shard

# name → the axes of a mesh of four ranks, or none, and how parameters and the state of an optimizer lie there:
# over dp both are replicated as in data parallelism, or the optimizer's are split, as in ZeRO
MESHES: dict[str, dict[str, int]] = {
    "dp=2 tp=2": {"dp": 2, "tp": 2},
    "tp=4": {"tp": 4},
    "one process": {},
    "zero dp=4": {"dp": 4},
    "zero dp=2 tp=2": {"dp": 2, "tp": 2},
}

SHAPES = {
    "up.weight": (12, 8),
    "down.weight": (8, 12),
    "qkv.weight": (3 * 8, 8),
    "uneven": (7, 5),
    "few": (2, 3),
    "scale": (),
    "none": (0, 4),
}
SPLIT = {"up.weight": 0, "down.weight": 1, "uneven": 0, "few": 1}  # over tp
DTYPES = {"up.weight": torch.bfloat16, "uneven": torch.float64, "few": torch.int64}


def whole(step: int) -> dict[str, Any]:
    """The state of a step in one process; each step has other values everywhere."""
    torch.manual_seed(step)
    parameters = {name: (8 * torch.randn(shape)).to(DTYPES.get(name, torch.float32)) for name, shape in SHAPES.items()}
    moments = {
        name: {"exp_avg": torch.randn(shape), "step": torch.tensor(float(step))} for name, shape in SHAPES.items()
    }
    groups = [{"lr": 10.0**-step, "betas": (0.9, 0.99), "params": list(SHAPES)}]
    return {
        "model": parameters,
        "optimizer": {"state": moments, "param_groups": groups},
        "scaler": {"scale": torch.tensor(2.0**step), "growth": step},
        "rng": {"torch": torch.get_rng_state(), 0: b"\x00\xff", "none": None},
        "step": step,
        "data": {"seen": [step, step + 1], "path": "a/b"},
    }


def placed(step: int, mesh: str) -> dict[str, Any]:
    """The same on a mesh."""
    state, axes = whole(step), MESHES[mesh]
    if not axes:
        return state
    device_mesh = processes.device_mesh(Mesh(axes))
    zero = mesh.startswith("zero")

    def laid(name: str, tensor: torch.Tensor, split_over_dp: bool) -> torch.Tensor:
        over_tp: Placement = Shard(SPLIT[name]) if name in SPLIT else Replicate()
        if name == "qkv.weight" and not split_over_dp:
            over_tp = strided_shard(0, 3)
        over_dp: Placement = Shard(0) if split_over_dp and tensor.dim() else Replicate()
        return distribute_tensor(tensor, device_mesh, [over_dp if axis == "dp" else over_tp for axis in axes])

    for name in SHAPES:
        state["model"][name] = laid(name, state["model"][name], False)
        moment = state["optimizer"]["state"][name]
        moment["exp_avg"] = laid(name, moment["exp_avg"], zero)
    return state


def empty(step: int, mesh: str) -> dict[str, Any]:
    """A state whose values are all others, to be filled."""
    state = placed(step + 100, mesh)
    state["rng"]["torch"] = torch.zeros_like(state["rng"]["torch"])
    return state


def check(loaded: Any, step: int, mesh: str) -> None:
    """A state is that of a step, to the bit: on this rank's pieces."""
    same(loaded, placed(step, mesh))


def same(one: Any, other: Any) -> None:
    assert type(one) is type(other), (one, other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            same(a, b)
    elif isinstance(one, torch.Tensor):
        a, b = (t.to_local() if hasattr(t, "to_local") else t for t in (one, other))
        assert a.dtype == b.dtype and torch.equal(a, b), (one, other)
    else:
        assert one == other


# -- on ranks -----------------------------------------------------------------------------------------------------


def saved(folder: str, step: int, mesh: str) -> str:
    return str(checkpoint.save(folder, placed(step, mesh)))


def loaded(folder: str, step: int, mesh: str) -> None:
    state = empty(step, mesh)
    found = checkpoint.load(folder, state)
    check(found, step, mesh)
    assert found["model"]["up.weight"] is state["model"]["up.weight"]


def loaded_with_warnings(folder: str, seeing: int | None) -> tuple[int, list[str]]:
    """The step that was loaded, exactly, and what was warned of. The rank ``seeing`` finds the newest one damaged, and
    no other rank does."""
    from autopar.checkpoint import newest
    from autopar.checkpoint.manifest import DamageError

    verify = newest.verify

    def misread(checkpoint: Path, files: Any) -> None:
        if checkpoint.name == "checkpoint-000002":
            raise DamageError("seen by rank 2")
        verify(checkpoint, files)

    if seeing == distributed.get_rank():
        newest.verify = misread
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            found = checkpoint.load(folder, empty(2, "dp=2 tp=2"))
    finally:
        newest.verify = verify
    check(found, found["step"], "dp=2 tp=2")
    return found["step"], [str(one.message) for one in warned if "taken" in str(one.message)]


Spec = tuple[tuple[int, ...], dict[str, int], tuple[Placement, ...], dict[str, int], tuple[Placement, ...]]


def relaid(folder: str, specs: list[Spec]) -> None:
    """Each tensor is saved in one way and loaded in another."""
    tensors, targets, wanted = {}, {}, {}
    for k, (shape, axes, placements, others, to) in enumerate(specs):
        value = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
        tensors[f"t{k}"] = distribute_tensor(value, processes.device_mesh(Mesh(axes)), placements)
        mesh = processes.device_mesh(Mesh(others))
        targets[f"t{k}"] = distribute_tensor(torch.full_like(value, -1), mesh, to)
        wanted[f"t{k}"] = distribute_tensor(value, mesh, to)
    checkpoint.save(folder, tensors)
    checkpoint.load(folder, targets)
    same(targets, wanted)


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down(self.up(x).relu()) - x).pow(2).sum()


def trained(folder: str) -> None:
    """A model and its optimizer are saved on one mesh and go on on another, as if nothing had been."""
    torch.manual_seed(1)
    x = torch.randn(8, 6, dtype=torch.float64)

    def made(axes: dict[str, int], seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        plan = {"up.weight": ("tp", None), "up.bias": ("tp",), "down.weight": (None, "tp")}
        parallel = autopar.parallelize(Loss().double(), Mesh(axes), plan)
        return parallel, torch.optim.AdamW(parallel.parameters(), lr=0.05)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()

    def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    model, optimizer = made({"dp": 2, "tp": 2}, 2)
    for _ in range(2):
        step(model, optimizer)
    checkpoint.save(folder, state(model, optimizer))
    step(model, optimizer)
    wanted = {name: p.full_tensor() for name, p in model.named_parameters()}

    other, fresh = made({"tp": 4}, 3)
    step(other, fresh)  # so that its state is there
    read = checkpoint.load(folder, state(other, fresh))
    other.load_state_dict(read["model"])
    fresh.load_state_dict(read["optimizer"])
    step(other, fresh)
    for name, p in other.named_parameters():
        torch.testing.assert_close(p.full_tensor(), wanted[name], rtol=1e-12, atol=1e-12)


def told(function: Callable[[], Any]) -> tuple[str, str]:
    """The class and text of the error."""
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error)
    return "none", ""


def refused(folder: str) -> dict[str, tuple[str, str]]:
    """States that cannot be saved or loaded, each wrong on rank 2 alone, or on all; no rank waits forever."""
    rank, mesh = distributed.get_rank(), processes.device_mesh(Mesh(dp=4))
    bad = rank == 2
    good = {"w": distribute_tensor(torch.ones(8), mesh, [Shard(0)]), "step": 1}
    checkpoint.save(folder, good)
    found = {
        "a key": told(lambda: checkpoint.save(folder, good | ({"more": torch.ones(2)} if bad else {}))),
        "a value": told(lambda: checkpoint.save(folder, good | {"step": 1 + bad})),
        "a generator": told(lambda: checkpoint.save(folder, good | {"rng": torch.tensor([rank])})),
        "no data": told(lambda: checkpoint.save(folder, good | ({"step": object()} if bad else {}))),
        "pending": told(
            lambda: checkpoint.save(
                folder, {"g": torch.distributed.tensor.DTensor.from_local(torch.ones(2), mesh, [Partial()])}
            )
        ),
        "a folder": told(lambda: checkpoint.load(folder + "x" * bad, good)),
        "a load": told(lambda: checkpoint.load(folder, {"w": torch.ones(8)} if bad else good)),
        "nothing": told(lambda: checkpoint.load(folder + "/none", good)),
        "no fit": told(lambda: checkpoint.load(folder, good | {"v": torch.ones(2)})),
        "no folder": told(lambda: checkpoint.save(folder + "/latest/in", good)),
    }
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if bad:  # as if the disk were full, on this rank alone
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        found["full"] = told(lambda: checkpoint.save(folder, good))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    again = {"w": distribute_tensor(torch.zeros(8), mesh, [Shard(0)]), "step": 0}
    assert checkpoint.load(folder, again)["step"] == 1
    assert torch.equal(again["w"].to_local(), torch.ones(2))
    return found


def in_a_thread(folder: str) -> tuple[str, str]:
    """While a state is written, a step uses the same ranks and changes it; saves do not overtake each other."""
    from autopar.checkpoint import writing

    mesh, write, gates = (
        processes.device_mesh(Mesh(dp=4)),
        writing._write,
        {step: threading.Event() for step in (1, 2, 3)},
    )
    writing._write = lambda path, *args: gates[int(path.parent.name.split("-")[1])].wait() and write(path, *args)
    gates[3].set()
    state = {"w": distribute_tensor(torch.ones(1024), mesh, [Shard(0)]), "b": torch.ones(3), "step": 1}
    saves = []
    for step in (1, 2):
        state["step"] = step
        saves.append(checkpoint.async_save(folder, state, keep=None))
        assert all(save.done() for save in saves[:-1])  # one copy at a time
        for _ in range(20):
            total = state["w"].to_local()[:1].clone()
            distributed.all_reduce(total)
            assert total == 4 * step
        state["w"].to_local().add_(1)
        state["b"].add_(1)
        threading.Timer(0.2, gates[step].set).start()  # the next save comes before that
    path = checkpoint.save(folder, state | {"step": 3}, keep=None)
    writing._write = write
    for step, saved in enumerate([*(save.result() for save in saves), path], 1):
        assert saved.name == f"checkpoint-{step:06}"
        again = {"w": distribute_tensor(torch.zeros(1024), mesh, [Shard(0)]), "b": torch.zeros(3), "step": 0}
        assert checkpoint.load(saved, again)["step"] == step
        assert (again["w"].to_local() == step).all() and (again["b"] == step).all()
    assert told(lambda: checkpoint.async_save(folder, {"step": object()}))[0] == "TypeError"
    return told(lambda: checkpoint.async_save(folder + "/latest/in", state).result())


def elsewhere(folder: str) -> tuple[str, str]:
    """Rank 1 has a file system of its own: what it writes is not where rank 0 looks."""
    from autopar.checkpoint import writing

    write = writing._write
    if distributed.get_rank() == 1:
        Path(folder + "-own").mkdir()
        writing._write = lambda path, items, planner: write(Path(folder + "-own") / path.name, items, planner)
    try:
        mesh = processes.device_mesh(Mesh(dp=4))
        return told(lambda: checkpoint.save(folder, {"w": distribute_tensor(torch.ones(8), mesh, [Shard(0)])}))
    finally:
        writing._write = write


# -- memory -------------------------------------------------------------------------------------------------------


def peak(function: Callable[[], Any]) -> int:
    """Bytes of memory that a call takes at most, beyond those that were there before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before is not there any more
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is that of now
    before = _memory("VmRSS")
    function()
    return _memory("VmHWM") - before


def _memory(which: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(which))
    return int(line.split()[1]) * 1024


def extra_memory(folder: str, rows: int) -> tuple[int, int]:
    """Of a save and a load of a tensor of ``rows`` × 4 KiB, from rows that are split to columns that are."""
    mesh = processes.device_mesh(Mesh(dp=4))
    small = {"w": distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])}
    checkpoint.save(folder, small)
    checkpoint.load(folder, small)  # whatever is made once
    local = torch.full((rows // 4, 1024), float(distributed.get_rank()))
    whole = {"w": torch.distributed.tensor.DTensor.from_local(local, mesh, [Shard(0)])}
    saving = peak(lambda: checkpoint.save(folder, whole))
    columns = torch.zeros(rows, 256)
    columns += 1
    target = {"w": torch.distributed.tensor.DTensor.from_local(columns, mesh, [Shard(1)])}
    loading = peak(lambda: checkpoint.load(folder, target))
    for rank in range(4):
        assert (columns[rank * rows // 4 : (rank + 1) * rows // 4] == rank).all()
    return saving, loading


class Malicious:
    """Unpickled, it leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)
