"""Liveness: the predicted peak is what the allocator counts, and what a brute-force run of the program holds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import loops
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import COLUMN_ROW, Residual
from recomputing import Dropping, Loss, recomputing
from shared_captures import shared_captures  # noqa: F401
from torch import nn
from transformers_models import gpt2, llama

import autopar
from autopar import Mesh
from autopar.examples.peak import peak_bytes
from autopar.ir.nodes import operands, record_of
from autopar.ir.program import Program
from autopar.report.arena import arena
from autopar.report.liveness import Storage, liveness
from autopar.report.memory import memory_of
from autopar.runtime.simulation.simulate import ANY_STRIDES
from autopar.torch_private import pytree

# -- beside the allocator's own count --------------------------------------------------------------------------------

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]] = {
    "mlp": (lambda: Residual(64, 256, layers=4), lambda: {"x": torch.randn(256, 64)}),
    "llama": (lambda: llama(heads=4, kv=2, head=16, hidden=176, layers=3).float(), lambda: loops.text(0, 4, 32)),
    "gpt2": (lambda: gpt2(layers=3).float(), lambda: loops.text(0, 4, 12)),
}


def predicted_and_measured(loss: nn.Module, batch: dict[str, Any]) -> tuple[int, int]:
    """Bytes beyond those held by the caller, of one step of one process."""
    parallel = autopar.parallelize(loss, Mesh(dp=1), "ddp", example=batch)

    def step() -> None:
        parallel(**batch).backward()

    for _ in range(2):
        step()
        parallel.zero_grad()
    return memory_of(parallel.local(0)).made, peak_bytes(step)


@pytest.mark.long
@pytest.mark.usefixtures("shared_captures")
@pytest.mark.parametrize(
    "name", ["mlp", "llama", pytest.param("gpt2", marks=pytest.mark.sweep("llama has blocks of attention too"))]
)
def test_the_peak_is_that_of_the_allocator(name: str) -> None:
    """And it falls as predicted where blocks are computed again."""
    make, batch = MODELS[name]
    model, given, peaks = Loss(make()), batch(), {}
    for what in (None, "blocks"):
        with recomputing(what):
            peaks[what] = predicted, measured = predicted_and_measured(model, given)
        assert abs(predicted - measured) <= 0.02 * measured, what
    assert peaks["blocks"][1] < 0.56 * peaks[None][1]


# -- beside a run that looks at every tensor ---------------------------------------------------------------------------


def held_by_a_run(program: Program, given: dict[str, torch.Tensor], kept: set[str]) -> list[int]:
    """Bytes in use while each op runs: all tensors are kept that are still read, each memory is counted once."""
    ops = [node for node in program.nodes if node.op == "call_function"]
    end = len(ops)
    last = {value: k for k, node in enumerate(ops) for value in operands(node)}
    results = set(operands(program.output))
    values: dict[Any, Any] = {node: given[node.name] for node in program.placeholders}
    values |= {node: program.constants[str(node.target)].tensor for node in program.nodes if node.op == "get_attr"}
    found = []
    for k, node in enumerate(ops):
        args, kwargs = pytree.tree_map_only(torch.fx.Node, values.__getitem__, (tuple(node.args), dict(node.kwargs)))
        values[node] = ANY_STRIDES.get(node.target, node.target)(*args, **kwargs)
        alive = [
            value
            for value in values
            if value is node
            or last.get(value, -1) >= k
            or value in results
            or value.op == "get_attr"
            or (value.op == "placeholder" and value.name in kept)
        ]
        leaves = pytree.tree_leaves([values[value] for value in alive])
        storages = {
            one.untyped_storage()._cdata: one.untyped_storage().nbytes()
            for one in leaves
            if isinstance(one, torch.Tensor)
        }
        found.append(sum(storages.values()))
    assert end == len(found)
    return found


def check_beside_a_run(program: Program) -> None:
    """At every op; of a program without states, whose next values would lie in their memory."""
    given = {}
    for node in program.placeholders:
        type = record_of(node).type
        make = torch.rand if type.dtype.is_floating_point else torch.ones
        given[node.name] = make(type.shape, dtype=type.dtype)
    kept = {name for name, node in zip(given, program.placeholders, strict=True) if record_of(node).role != "tangent"}
    assert liveness(program).held() == held_by_a_run(program, given, kept)
    assert liveness(program, {"x"} & kept).held() == held_by_a_run(program, given, {"x"})


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]] = {
    "dropout": (Dropping, lambda: {"x": torch.randn(4, 8)}),
    "llama": (lambda: llama(kv=2, layers=1).float(), lambda: loops.text(0)),
    "gpt2": (lambda: gpt2(layers=1).float(), lambda: loops.text(0)),
    "gru": (lambda: nn.GRU(4, 8), lambda: {"input": torch.randn(3, 2, 4)}),
    "conv": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        lambda: {"input": torch.randn(2, 3, 9, 9)},
    ),
}


@pytest.mark.usefixtures("shared_captures")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.sweep("llama has blocks of attention too") if name == "gpt2" else ())
        for name in CASES
    ],
)
def test_what_a_run_holds(name: str) -> None:
    make, batch = CASES[name]
    model, given = make(), batch()
    for what in (None, "*"):
        with recomputing(what):
            check_beside_a_run(autopar.parallelize(model, Mesh(dp=1), "ddp", example=given).local(0))


class Parts(nn.Module):
    """Views of views, of several kinds, and copies."""

    def __init__(self, ways: list[int]) -> None:
        super().__init__()
        self.ways = ways

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for way in self.ways:
            a, b = x.chunk(2, -1)
            x = (torch.cat([b, a.exp()], -1), x.transpose(0, 1).reshape(x.shape), x.flatten().view(x.shape),
                 x[:, :1].expand(x.shape), x * a.sum(), torch.stack([a, b], -1).flatten(1),
                 x.t().contiguous().t().sin())[way]  # fmt: skip
        return x.square().mean()


@pytest.mark.long
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ways=st.lists(st.integers(0, 6), min_size=1, max_size=6), what=st.sampled_from([None, "*", "min-cut"]))
def test_random_views(ways: list[int], what: str | None) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Parts(ways))
    with recomputing(what):
        check_beside_a_run(autopar.parallelize(model, Mesh(dp=1), "ddp", example=(torch.randn(4, 4),)).local(0))


# -- what is no tensor of its own --------------------------------------------------------------------------------------

MICRO = """\
program local on dp=2 tp=2 at dp=0 tp=0
  w : f32[8 4] = param
  w_grad : f32[8 4] = state(w_grad_sum, 'w.grad')
  x : f32[6 4] = input
forward:
  t : f32[4 8] = t(w)
  y : f32[6 8] = mm(x, t)
  y_tp : f32[6 8] = all_reduce(y, tp)
  s : f32[] = sum(y_tp)
backward:
  g : f32[6 8] = expand(s, [6, 8])
  g_t : f32[8 6] = t(g)
  g_tp : f32[8 12] = all_gather(g_t, 1, tp, sizes=[6, 6])
  g_own : f32[4 12] = slice(g_tp, 0, tp, sizes=[4, 4])
  wide : f32[12 4] = t(g_own)
  d_w : f32[8 4] = mm(g_t, x)
  w_grad_sum : f32[8 4] = add.Tensor(w_grad, d_w)
  z : f32[12 4] = relu(wide)
  flat : f32[48] = _unsafe_view(z, [48])
  return flat
"""


def test_states_transfers_and_views() -> None:
    """A state's next value lies in the state, an all-reduce of what nobody else reads in that, a slice of dim 0 in its
    operand."""
    found = liveness(Program.parse(MICRO))
    w, x, y, one = 8 * 4 * 4, 6 * 4 * 4, 6 * 8 * 4, 4
    gathered, z = 8 * 12 * 4, 12 * 4 * 4
    held = 2 * w + x
    assert found.held() == [held + n for n in (0, y, y, y + one, one, one, one + gathered, one + gathered,
                                               one + gathered,
                                              one + gathered + w, gathered + w, gathered + z, z)]  # fmt: skip
    kinds = {storage.node.name: storage.kind for storage in found.storages}
    assert kinds == {"w": "parameters", "w_grad": "gradients", "x": "inputs", "y": "activations", "s": "activations",
                     "g_tp": "transfers", "d_w": "activations", "z": "activations"}  # fmt: skip


UPDATE = """\
program local on dp=1 at dp=0
  w : f32[8 4] = state(w_new)
  w_grad : f32[8 4] = state(w_grad_zero, 'w.grad')
  w_exp_avg : f32[8 4] = state(m, 'w.exp_avg')
  lr : f32[] = input
update:
  m : f32[8 4] = add.Tensor(w_exp_avg, w_grad)
  scaled : f32[8 4] = mul.Tensor(m, lr)
  w_new : f32[8 4] = sub.Tensor(w, scaled)
  w_grad_zero : f32[8 4] = mul.Scalar(w_grad, 0)
"""


def test_an_update() -> None:
    report = memory_of(Program.parse(UPDATE), kinds={"lr": "optimizer state"})
    (row,) = report
    assert row.kinds == {"parameters": 128, "gradients": 128, "optimizer state": 132, "activations": 128}
    assert (report.held, report.made, report.peak, row.phase) == (388, 128, 516, "update")
    assert row.line.startswith("scaled : ") and row.values == (("scaled", 128),)
    (row,) = memory_of(Program.parse(UPDATE), in_place=False)  # what is new takes the place of what is old
    assert row.kinds == {"parameters": 256, "gradients": 128, "optimizer state": 128, "inputs": 4, "activations": 128}
    assert row.line.startswith("w_new : ")


def test_ranks_of_a_mesh() -> None:
    """Each rank of tp holds half of what is split; what the caller gives up is let go."""
    example = (torch.randn(4, 8),)
    whole, half = (
        memory_of(
            autopar.parallelize(Residual(8, 64, 1), Mesh(tp=n), COLUMN_ROW if n > 1 else {}, example=example).local(0)
        )
        for n in (1, 2)
    )
    assert half.phase("forward").kinds["activations"] < 0.7 * whole.phase("forward").kinds["activations"]
    assert half.phase("backward").kinds["gradients"] < 0.7 * whole.phase("backward").kinds["gradients"]


def test_the_report() -> None:
    parallel = autopar.parallelize(Loss(Residual(8, 64, 2)), Mesh(dp=1), "ddp", example={"x": torch.randn(64, 8)})
    report = memory_of(parallel.local(0))
    assert [row.phase for row in report] == ["forward", "backward"] and report.peak == report.phase("backward").bytes
    row = report.phase("backward")
    assert row.line == "gelu_backward : f32[64 64] = gelu_backward(mm, addmm_2)" and row.module == "model.blocks.1.act"
    assert row.source.startswith("models.py:") and row.source.endswith("self.down(self.act(self.up(x)))")
    assert sum(row.kinds.values()) == row.bytes and sum(dict(row.modules).values()) <= report.made
    text = str(report)
    for shown in (f"{report.peak:,}", "gelu_backward : f32[64 64]", "models.py:", "model.blocks.0.act 16,384",
                  "addmm 16,384", f"bytes of one rank, {report.held:,} of them held by the caller"):  # fmt: skip
        assert shown in text, text
    with pytest.raises(KeyError, match="no phase 'update' in the program; it has forward, backward"):
        report.phase("update")


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 5), st.integers(0, 6)), max_size=12),
    align=st.sampled_from([1, 4]),
)
def test_fixed_places(rows: list[tuple[int, int, int]], align: int) -> None:
    """What is in use together does not overlap; the whole is at least the peak, and at most all together."""
    x = Program.parse(UPDATE).node("m")
    storages = [Storage(x, size, "activations", born, born + more) for size, born, more in rows]
    found = arena(storages, align)

    def end(one: Storage) -> int:
        return found.offsets[one] + -(-one.bytes // align) * align

    for a, b in itertools.combinations(storages, 2):
        if a.bytes and b.bytes and a.born <= b.dies and b.born <= a.dies:
            assert end(a) <= found.offsets[b] or end(b) <= found.offsets[a]
    loads = [
        sum(end(one) - found.offsets[one] for one in storages if one.born <= time <= one.dies) for time in range(12)
    ]
    assert (
        max(loads)
        <= found.bytes
        == max((end(one) for one in storages if one.bytes), default=0)
        <= sum(end(one) - found.offsets[one] for one in storages)
    )
    assert all(offset % align == 0 for offset in found.offsets.values())


@pytest.mark.long
def test_fixed_places_of_a_step() -> None:
    """They cost little: those of a Llama's step are within a tenth of the peak."""
    parallel = autopar.parallelize(Loss(llama(layers=2).float()), Mesh(dp=1), "ddp", example=loops.text(0))
    report = memory_of(parallel.local(0))
    assert report.made <= report.arena <= 1.1 * report.made
    assert f"the {report.made:,} that are made and in use at the peak take {report.arena:,}" in str(report)


def test_errors() -> None:
    parallel = autopar.parallelize(Residual(8, 12), Mesh(dp=1), "ddp", example={"x": torch.randn(4, 8)})
    with pytest.raises(
        ValueError,
        match="takes the program of one rank, in the shapes of its pieces; this one is explicit: localize it",
    ):
        liveness(parallel.program)
    with pytest.raises(ValueError, match="the program has no placeholder 'y'; it has norms_0_weight"):
        liveness(parallel.local(0), kept=["x", "y"])
