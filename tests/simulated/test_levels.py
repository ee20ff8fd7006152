"""Collectives level by level, on simulated ranks: equal to the reduction at once, and to what one device computes."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import attrs

import autopar
from autopar import Mesh, Program
from autopar.costs.machine import Level, Link, Machine
from autopar.costs.ways import BY_LEVELS, ways
from autopar.ir import transfers
from autopar.ir.layout import DistAttr, Layout
from autopar.ir.record import TensorType
from autopar.ir.text.printer import print_type
from autopar.passes import Levels, run_passes
from autopar.report.hosts import bytes_between_hosts
from autopar.runtime.localize import LocalPrograms
from autopar.transitions.by_levels import _chains
from autopar.transitions.chain import TransferStep
from autopar.verify.levels import verify

# bytes between hosts decide, so that nearly all collectives over several hosts go level by level
FAR = Machine("far hosts", "any", 4, Link(1e-9, 1e12), Link(1e-9, 1e6), Link(1e-9, 1e12))
MESHES = [
    (Mesh(dp=8), 4),
    (Mesh(dp=8), 2),
    (Mesh(dp=4, tp=2), 4),
    (Mesh(dp=2, tp=4), 2),
    (Mesh(dp=6), 3),
    (Mesh(a=2, b=2, c=3), 6),
]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.complex128]


def on(per_host: int, racks: int = 0) -> Machine:
    levels = (Level("rack", racks, Link(1e-9, 1e5)),) if racks else ()
    return replace(FAR, ranks_per_node=per_host, levels=levels)


KINDS = ("sum", "sum", "avg", "max", "min", "prod")


def applies(kind: str, dtype: torch.dtype) -> bool:
    try:
        transfers.check_kind(kind, dtype)
    except transfers.LayoutMismatch:
        return False
    return True


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal up to the order of additions: in bfloat16 each of up to eight rounds."""
    rounding = 8 * torch.finfo(want.dtype).eps if want.dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(got, want, atol=rounding, rtol=rounding)


@st.composite
def collectives(draw: st.DrawFn) -> tuple[TensorType, str, dict[str, Any], int]:
    """A collective over axes that cross hosts, of any value that it applies to, and the ranks of a host."""
    mesh, per_host = draw(st.sampled_from(MESHES))
    shape = draw(st.sampled_from([(48,), (24, 48), (13, 7), (5,), (9, 16), (4, 6, 10)]))
    dtype = draw(st.sampled_from(DTYPES))
    kind = draw(st.sampled_from([kind for kind in KINDS if applies(kind, dtype)]))
    attr = draw(attrs(mesh, shape, pending=(kind,), max_parts=2))
    value = TensorType(shape, dtype, Layout(mesh, attr.normalize(shape, mesh)))
    pending = [axis for axis, _ in attr.pending]
    op = {} if kind == "sum" else {"op": kind}
    whole = all(len(dim) == 1 for dim in value.attr.dims)
    split = [(d, axes[-1]) for d, ((_, axes), *_) in enumerate(value.attr.dims) if axes and whole]
    possible = {"all_reduce": bool(pending), "all_gather": bool(split), "reduce_scatter": bool(pending) and whole}
    assume(any(possible.values()))
    name = draw(st.sampled_from([name for name in BY_LEVELS if possible[name]]))
    if name == "all_reduce":
        some = draw(st.lists(st.sampled_from(pending), min_size=1, unique=True))
        return value, name, {"axis": some[0] if len(some) == 1 else tuple(sorted(some)), **op}, per_host
    if name == "reduce_scatter":
        return value, name, {"dim": draw(st.integers(0, len(shape) - 1)), "axis": pending[0], **op}, per_host
    dim, axis = draw(st.sampled_from(split))
    return value, name, {"dim": dim, "axis": axis}, per_host


def program_of(value: TensorType, name: str, arguments: dict[str, Any], *more: TransferStep) -> Program:
    """A program of one collective, or of some steps in its place."""
    function = transfers.TRANSFERS[name].function
    result = transfers.TRANSFERS[name].infer(value, arguments, {})
    steps = more or (TransferStep(function, tuple(arguments.items()), result, 0),)
    lines = [f"program explicit on {value.mesh}", f"  x0 : {print_type(value)} = input", "forward:"]
    for k, step in enumerate(steps):
        (_, *args), kwargs = transfers.call(step.function, None, dict(step.arguments))
        words = [f"x{k}", *map(bare, args), *(f"{key}={bare(value)}" for key, value in kwargs.items())]
        lines.append(f"  x{k + 1} : {print_type(step.type)} = {step.function.__name__}({', '.join(words)})")
    program = Program.parse("\n".join([*lines, f"  return x{len(steps)}"]) + "\n")
    verify(program)
    return program


def bare(value: Any) -> str:
    return str(value).replace("'", "")


def data(value: TensorType) -> torch.Tensor:
    if value.dtype is torch.int64:
        return torch.randint(-9, 9, value.shape)
    return torch.randn(value.shape, dtype=torch.complex128 if value.dtype.is_complex else torch.float64).to(value.dtype)


@settings(max_examples=150, deadline=None)
@given(collectives(), st.booleans())
def test_a_collective_by_levels_is_that_at_once(
    drawn: tuple[TensorType, str, dict[str, Any], int], racks: bool
) -> None:
    """The values of all ranks, the text, the channels of all ranks, and the bytes between hosts."""
    value, name, arguments, per_host = drawn
    machine = on(per_host, 2 * per_host if racks and value.mesh.size > 2 * per_host else 0)
    once = program_of(value, name, arguments)
    levels = once.copy()
    run_passes(levels, [Levels(machine)])
    verify(levels)
    assert str(Program.parse(str(levels))) == str(levels)
    LocalPrograms(levels, lambda local: verify(local))[0]  # it also checks the channels of all ranks
    x = data(value)
    (want,), (got,) = autopar.simulate(once, [x]), autopar.simulate(levels, [x])
    same(got, want)
    assert bytes_between_hosts(levels, machine) <= bytes_between_hosts(once, machine)


@settings(max_examples=100, deadline=None)
@given(collectives())
def test_every_way_has_the_value(drawn: tuple[TensorType, str, dict[str, Any], int]) -> None:
    """Not only the cheapest: each way, over each part of the value."""
    value, name, arguments, per_host = drawn
    once = program_of(value, name, arguments)
    x = data(value)
    result = transfers.TRANSFERS[name].infer(value, arguments, {})
    (want,) = autopar.simulate(once, [x])
    step = TransferStep(transfers.TRANSFERS[name].function, tuple(arguments.items()), result, 0)
    for chain in _chains(step, value, on(per_host)):
        program = program_of(value, name, arguments, *chain.steps)
        (got,) = autopar.simulate(program, [x])
        same(got, want)


@pytest.mark.parametrize(("mesh", "per_host"), MESHES, ids=str)
@pytest.mark.parametrize("name", BY_LEVELS)
def test_bytes_between_hosts_are_those_at_once_over_the_ranks_of_a_host(name: str, mesh: Mesh, per_host: int) -> None:
    axis = mesh.names[0]
    (digits,) = ways(name, (axis,), mesh, (("host", per_host),)) or [()]
    if not digits:
        return
    (inside,) = {mesh.count(part.axes) for part in digits if "within" in part.axes[0]}
    dim = DistAttr.split(axis, None) if name == "all_gather" else DistAttr.split(None, None, pending=[axis])
    value = TensorType((48, 64), torch.float32, Layout(mesh, dim))
    once = program_of(value, name, {"axis": axis} | ({} if name == "all_reduce" else {"dim": 0}))
    levels = once.copy()
    (report,) = run_passes(levels, [Levels(on(per_host))])
    payload = 48 * 64 * 4 * (2 if name == "all_reduce" else 1)
    assert bytes_between_hosts(once, on(per_host)) == payload
    assert bytes_between_hosts(levels, on(per_host)) == payload // inside
    assert report.notes[1] == (
        f"1 collective goes level by level, within hosts first: {payload // inside:,} bytes of a rank's collectives "
        f"are between hosts, in the place of {payload:,}"
    )


class Net(torch.nn.Module):
    """Sizes that no number of ranks divides, too."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(24, 37)
        self.norm = torch.nn.LayerNorm(37)
        self.down = torch.nn.Linear(37, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(torch.relu(self.up(x)))).square().mean()


STEPS = [{}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"across": True}, {"microbatches": 2, "zero": 1, "across": True}]


@pytest.mark.parametrize("racks", [0, 4], ids=["hosts of 4", "hosts of 2 and racks of 4"])
@pytest.mark.parametrize("options", STEPS, ids=str)
def test_training_over_hosts_is_that_of_one_device(options: dict[str, Any], racks: int) -> None:
    torch.manual_seed(0)
    plain = Net().double()
    model = copy.deepcopy(plain)
    machine = on(2, 4) if racks else on(4)
    batches = [torch.randn(16, 24, dtype=torch.float64) for _ in range(2)]
    parallel = autopar.parallelize(model, Mesh(dp=8), "ddp", machine=machine)
    step = parallel.train_step(torch.optim.AdamW(parallel.parameters(), lr=1e-2), clip_norm=0.1, **options)
    losses = [step.simulate(x).item() for x in batches]
    step.finish()
    optimizer, wanted = torch.optim.AdamW(plain.parameters(), lr=1e-2), []
    for x in batches:
        loss = plain(x)
        wanted.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
    assert losses == pytest.approx(wanted, abs=1e-12)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=0)
    text = f"{step.program.micro}{step.program.update}"
    assert "dp.within" in text and math.prod(text.count(word) for word in ("reduce_scatter", "all_gather"))
