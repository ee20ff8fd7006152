"""A step whose optimizer's state is in host memory has the bits of one without, and copies what it should when it
should."""

from __future__ import annotations

import copy
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
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree

import autopar
from autopar import Mesh, checkpoint
from autopar.ir.hosts import Hosts
from autopar.ir.layout import DistAttr
from autopar.ir.record import TensorType
from autopar.model.dtensor_parameters import local_of
from autopar.optimizers import AVERAGED, IN_PLACE, OFFLOADED, offload, register_optimizer
from autopar.optimizers.definition import DEFINITIONS
from autopar.optimizers.ops import SCHEDULED, SIGNATURES, TRUTHS, UPDATES, states_of
from autopar.plan.loss_scaling import LossScaling
from autopar.runtime.dtensors import is_dtensor
from autopar.runtime.processes.job import Job
from autopar.step.states.average import Averages
from autopar.step.states.optimizer_state import OptimizerState

Batches = Callable[[int], Mapping[str, torch.Tensor]]

OVERFLOWS = LossScaling(initial=2.0**30, growth=2.0**8, backoff=2.0**-8, interval=3)
FULL = {"microbatches": 2, "clip_norm": 0.5, "ema": 0.9}


def made(
    sizes: dict[str, int],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    low: bool = False,
    **options: Any,
) -> tuple[Any, Batches]:
    torch.manual_seed(0)
    make, batches, plan = steps.MODELS["mlp"]
    model = make().float() if low else make()
    parallel = autopar.parallelize(model, Mesh(sizes), plan if "tp" in sizes else "ddp")
    return parallel.train_step(optimizer(parallel), **options), (lambda k: narrow(batches(k))) if low else batches


def everything(step: Any) -> dict[str, torch.Tensor]:
    """This rank's pieces of parameters, of the optimizer's state, and of averages; copies."""
    named = dict(step.parallel.named_parameters())
    found = {name: local_of(parameter) for name, parameter in named.items()}
    found |= {
        f"{name}.{key}": local_of(value)
        for name, parameter in named.items()
        for key, value in step.optimizer.state[parameter].items()
    }
    found |= {f"{name}.ema": local_of(average) for name, average in (step.ema or {}).items()}
    return {name: tensor.clone() for name, tensor in found.items()}


def check_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])] == []


class Travels:
    """How many tensors went to the host, call by call, inside of the block."""

    def __enter__(self) -> list[int]:
        self.real, found = offload.to_host, []
        offload.to_host = lambda tensors: (found.append(len(tensors)), self.real(tensors))[1]
        return found

    def __exit__(self, *_: Any) -> None:
        offload.to_host = self.real


def alike(sizes: dict[str, int], optimizer: Callable[[nn.Module], torch.optim.Optimizer], options: Mapping[str, Any],
          low: bool = False, count: int = 10, called: bool = False) -> tuple[list[int], list[bool]]:  # fmt: skip
    """After each step losses, norms and all that is kept are, bit for bit, those of the same step without. What
    travelled, what was skipped."""
    (without, batches), (step, _) = (made(sizes, optimizer, low, offload=one, **options) for one in (False, True))
    travelled, skipped = [], []
    for k in range(count):
        theirs = run(without, batches(k), promoted=not low, called=called)
        with Travels() as found:
            ours = run(step, batches(k), promoted=not low, called=called)
        travelled += found
        assert torch.equal(ours, theirs) and (
            step.grad_norm is None or step.grad_norm.allclose(without.grad_norm, rtol=0, atol=0, equal_nan=True)
        ), k
        check_same(everything(step), everything(without))
        skipped.append(bool(step.skipped))
    return travelled, skipped


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def on_processes(zero: int, optimizer: Callable[[nn.Module], torch.optim.Optimizer], count: int) -> None:
    travelled, _ = alike({"dp": 2}, optimizer, {**FULL, "zero": zero, "overlap": "today"}, count=count)
    assert len(travelled) == count * 3, "two groups of parameters, and all averages"


def overflows_on_processes(zero: int) -> None:
    _, skipped = alike(
        {"dp": 2}, adamw, {**FULL, "zero": zero, "amp": "fp16-O2", "loss_scale": OVERFLOWS}, low=True, count=8
    )
    assert skipped == [True, True, False, False, False, True, False, False]


def without_state() -> None:
    travelled, _ = alike({"dp": 2}, plain_sgd, {"zero": 1}, count=2)
    assert travelled == []


EACH = pytest.mark.sweep("each stage of ZeRO and each optimizer occurs in another case, and ten steps when simulated")


@pytest.mark.processes
@pytest.mark.parametrize(("zero", "optimizer", "count"), [
    (0, sgd, 3), (1, adamw, 3), (3, adamw, 3),
    *(pytest.param(zero, optimizer, 10, marks=EACH) for zero in (0, 1, 3) for optimizer in (adamw, sgd)),
])  # fmt: skip
def test_steps_on_processes(zero: int, optimizer: Any, count: int) -> None:
    ranks(2).run(on_processes, zero, optimizer, count)


@pytest.mark.processes
@pytest.mark.parametrize("zero", [1, *(pytest.param(zero, marks=EACH) for zero in (0, 3))])
def test_steps_that_overflow_on_processes(zero: int) -> None:
    ranks(2).run(overflows_on_processes, zero)


@pytest.mark.processes
def test_an_optimizer_without_state_on_processes() -> None:
    ranks(2).run(without_state)


def test_one_process() -> None:
    travelled, _ = alike({"dp": 1}, adamw, FULL, count=3, called=True)
    assert len(travelled) == 3 * 3


@pytest.mark.long
def test_simulated() -> None:
    """There is one memory, so there is nothing to bring anywhere."""
    travelled, _ = alike({"dp": 2, "tp": 2}, adamw, {**FULL, "zero": 1})
    assert travelled == []


# -- where states are ------------------------------------------------------------------------------------------------


def values(step: Any) -> dict[str, torch.Tensor]:
    """Parameters, the optimizer's state and averages, whole."""
    named = dict(step.parallel.named_parameters())
    found = {
        f"{name}.{key}": value
        for name, parameter in named.items()
        for key, value in step.optimizer.state[parameter].items()
    }
    found |= {**named, **{f"{name}.ema": average for name, average in step.ema.items()}}
    return {name: loops.whole(value).clone() for name, value in found.items()}


def moved(folder: str, others: list[tuple[dict[str, int], int]]) -> None:
    """The state of a step that offloads, from a checkpoint or given as it is, goes on as the step does; in other stages
    of ZeRO and on another mesh as it would without."""
    step, batches = made({"dp": 2}, offload=True, zero=1, ema=0.9)
    for k in range(2):
        run(step, batches(k))
    states = [value for one in step.optimizer.state.values() for value in one.values()]
    assert any(is_dtensor(value) and value.placements[0].is_shard() for value in states)
    checkpoint.save(folder, step.state_dict())
    state = copy.deepcopy(step.state_dict())
    run(step, batches(2))
    for sizes, zero in others:
        found = []
        for away, saved in ((True, True), (False, True), (True, False), (False, False)):
            other, _ = made(sizes, ema=0.9, offload=away, zero=zero)
            other.capture(batches(9))
            other.load_state_dict(checkpoint.load(folder, other.state_dict()) if saved else copy.deepcopy(state))
            run(other, batches(2))
            found.append(values(other))
        for one in found[1:]:
            check_same(found[0], one)
        if zero == 1:
            check_same(found[0], values(step))


@pytest.mark.processes
@pytest.mark.parametrize("others", [
    [({"dp": 2}, 1), ({"dp": 1, "tp": 2}, 0)],
    pytest.param([({"dp": 2}, 0), ({"dp": 2}, 3)], marks=pytest.mark.sweep("the same stage and no stage are loaded")),
], ids=str)  # fmt: skip
def test_checkpoints(others: list[tuple[dict[str, int], int]], tmp_path: Path) -> None:
    ranks(2).run(moved, str(tmp_path), others)


@pytest.fixture
def accelerators() -> Iterator[DeviceMesh]:
    """A device mesh of accelerators that are not there."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield DeviceMesh("cuda", torch.arange(2), mesh_dim_names=("dp",), _init_backend=False)
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("away", [True, False])
def test_states_beside_an_accelerator(accelerators: DeviceMesh, away: bool) -> None:
    """They are DTensors of its mesh whose pieces are on the CPU: those that begin, and those that were loaded to the
    device. Nothing is computed."""
    job = Job(0, accelerators, {}, set(), torch.device("cuda", 0), distributed.group.WORLD, Hosts(("here",), (0,)))
    type, attr = TensorType((6, 4), torch.float32), DistAttr.split("dp", None)
    with FakeTensorMode(), torch.no_grad():
        split = DTensor.from_local(
            torch.empty(3, 4, device="cuda"), accelerators, [Shard(0)], run_check=False, shape=(6, 4), stride=(4, 1)
        )
        parameter = nn.Parameter(split)
        optimizer_state = OptimizerState(
            torch.optim.SGD([parameter], lr=0.1, momentum=0.9), [("w", parameter)], Mesh(dp=2), job, away
        )
        wanted = "cpu" if away else "cuda"
        for known in ({}, {"momentum_buffer": split.clone()}):
            optimizer_state.optimizer.state[parameter] = known
            optimizer_state.trained({"w": type}, {"w": type}, {"w": attr})
            state = optimizer_state.optimizer.state[parameter]["momentum_buffer"]
            assert (
                is_dtensor(state)
                and state.device_mesh == accelerators
                and state.placements == (Shard(0),)
                and state.shape == (6, 4)
            )
            assert {
                tensor.device.type for tensor in (state, state.to_local(), optimizer_state.pieces["w.momentum_buffer"])
            } == {wanted}
            assert optimizer_state.pieces["w.momentum_buffer"] is state.to_local()
        averages = Averages(optimizer_state, 0.9, torch.device("cuda", 0))
        averages.place(optimizer_state.trained({"w": type}, {"w": type}, {"w": attr}))
        assert (
            averages.tensors["w"].device.type == averages.pieces["w.ema"].device.type == wanted
            and local_of(parameter).device.type == "cuda"
        )


# -- what travels, and when ------------------------------------------------------------------------------------------


class Noted(TorchFunctionMode):
    """Notes what is copied where; what would be written to an accelerator is not."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.empty:
            self.events.append(f"{'pinned' if kwargs['pin_memory'] else 'pageable'} on {kwargs['device']}")
        if function is torch.Tensor.copy_:
            self.events.append(
                f"{args[1].device.type} to {args[0].device.type}{', waits' * (not kwargs.get('non_blocking'))}"
            )
            if args[0].device.type == "cuda":
                return args[0]
        return function(*args, **kwargs)


def test_the_order_of_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tensors on an accelerator: all copies begin, then the device is waited for, once, and then the host reads."""
    events: list[str] = []
    stream = type("Stream", (), {"synchronize": lambda self: events.append("wait")})()
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: stream)
    for op in (UPDATES["adamw"], AVERAGED):
        monkeypatch.setitem(IN_PLACE, op, lambda *args, **options: events.append(" ".join(_devices([args, options]))))
    with FakeTensorMode(), Noted(events):
        params, grads = ([torch.zeros(2, device="cuda") for _ in range(2)] for _ in range(2))
        states, step, number = (
            [[torch.zeros(2)] * 2] * 2,
            torch.zeros((), device="cuda"),
            torch.zeros((), device="cuda"),
        )
        OFFLOADED[UPDATES["adamw"]](
            params, grads, [*states, [step, step]], number, None, number, eps=1e-8, beta1=torch.zeros(())
        )
        assert events == ["pinned on cpu"] * 6 + ["cuda to cpu"] * 6 + ["wait", "cpu", "cpu to cuda", "cpu to cuda"], (
            "of two pairs, a count and a number"
        )
        events.clear()
        OFFLOADED[AVERAGED]([torch.zeros(2)] * 2, params, [], step, None, decay=0.9)
        assert events == ["pinned on cpu"] * 3 + ["cuda to cpu"] * 3 + ["wait", "cpu"]


def _devices(values: Any) -> set[str]:
    return {leaf.device.type for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)}


@settings(deadline=None, max_examples=25)
@given(
    name=st.sampled_from([*UPDATES, "averaged"]), seed=st.integers(0, 9),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    scale=st.sampled_from([None, 8.0]), found=st.sampled_from([None, 0.0, 1.0]), columns=st.booleans(),
)  # fmt: skip
def test_kernels_on_the_host(
    name: str, seed: int, dtype: torch.dtype, scale: float | None, found: float | None, columns: bool
) -> None:
    """Bit for bit what is done in place, into the same memory; gradients stay as they are."""

    def number(value: float | None) -> torch.Tensor | None:
        return None if value is None else torch.tensor(value)

    given = [drawn([(3, 4), (5,), (0, 3)], 10 * seed + k, dtype) for k in range(5)]
    if columns:
        given[0] = [x.t().contiguous().t() if x.dim() == 2 else x for x in given[0]]
    lying, _, options = SIGNATURES.get(name, ("", "", ""))
    states = [[x.abs() for x in some] for some in given[2 : 2 + len(lying.split())]] + [[torch.tensor(3.0)] * 3] * (
        "step" in states_of(name) if name in UPDATES else 0
    )
    shared = (
        (torch.tensor(4), number(found))
        if name == "averaged"
        else (torch.tensor(0.01, dtype=torch.float64), number(scale), number(found))
    )
    said: dict[str, Any] = {
        key: True if key in TRUTHS else torch.tensor(0.5, dtype=torch.float64) if key in SCHEDULED else 0.5
        for key in options.split()
    }
    said |= {"decay": 0.9} if name == "averaged" else {}
    op, made = AVERAGED if name == "averaged" else UPDATES[name], []
    for table in (IN_PLACE, OFFLOADED):
        params, grads, own = pytree.tree_map(torch.clone, (given[0], given[1], states))
        places = [x.data_ptr() for x in (*params, *grads)]
        table[op](params, grads, own, *shared, **said)
        assert places == [x.data_ptr() for x in (*params, *grads)]
        made.append([*params, *(x for some in own for x in some)])
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))
    assert name == "sgd" or all(torch.equal(a, b) for a, b in zip(grads, given[1], strict=True))


# -- what is told ----------------------------------------------------------------------------------------------------


def test_memory() -> None:
    """What is on the host is in no row, and told below; the rest is as it was."""
    found = []
    for away in (False, True):
        step, batches = made({"dp": 2}, offload=away, zero=1, ema=0.9)
        step.capture(batches(0))
        found.append(step.memory())
    without, memory = found
    pieces = sum(value.nbytes for name, value in step.optimizer_state.pieces.items() if not name.startswith(".")) + sum(
        value.nbytes for value in step.ema.values()
    )
    assert without.host == 0 and "host" not in str(without)
    assert 0 < memory.host == without.held - memory.held < pieces, "ZeRO has split it over two"
    for before, row in zip(without, memory, strict=True):
        assert before.bytes - row.bytes == memory.host and row.kinds.get("optimizer state", 0) < 100, "counters"
    assert (
        f"of them between steps too; beside them, {memory.host:,} of the optimizer's state are in host memory\n"
        in str(memory)
    )


@pytest.mark.parametrize("value", [1, "cpu", 0])
def test_wrong_values(value: Any) -> None:
    with pytest.raises(ValueError) as caught:
        made({"dp": 2}, offload=value)
    assert (
        str(caught.value)
        == f"offload={value!r}: True keeps the optimizer's state in host memory, False beside the parameters"
    )


class Sign(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise NotImplementedError


def test_plain_ops_are_not_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    known = dict(DEFINITIONS)
    for module in ("register", "lookup"):
        monkeypatch.setattr(f"autopar.optimizers.{module}.DEFINITIONS", known)
    register_optimizer(Sign, update=lambda param, grad, state, lr: (param - lr * grad.sign(), state))
    sign = lambda parallel: Sign(parallel.parameters(), lr=0.1)  # noqa: E731
    made({"dp": 2}, sign)
    with pytest.raises(ValueError) as caught:
        made({"dp": 2}, sign, offload=True)
    assert str(caught.value) == (
        "offload=True updates parameters on the host by torch's fused kernels, and there is none for the step of Sign, "
        "which runs where its parameters are: leave offload out"
    )
