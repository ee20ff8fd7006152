"""A line for each inserted transfer, and the bound that its bytes are measured by."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import attrs, meshes, shapes
from torch import nn
from transition_runs import read

import autopar
from autopar import Mesh
from autopar.costs.machine import machine
from autopar.ir import transfers
from autopar.ir.boxes import most_lacked
from autopar.ir.layout import Layout
from autopar.ir.record import TensorType
from autopar.report.lines import lines_of
from autopar.report.transfers import transfers_of
from autopar.transitions import cost
from autopar.transitions.lower_bound import least_bytes

BOUNDS = {  # elements of f32[8192 8192] on 8 × 8, in MiB
    ("8192/a 8192/b", "8192/b 8192/a"): 4.0,
    ("8192/a 8192", "8192/b 8192"): 32.0,
    ("8192/b 8192] +a", "8192/a 8192"): 62315376 / 2**20,  # 8 of 64 ranks want what they hold
    ("8192 8192] +a +b", "8192 8192"): 504.0,
    ("8192 8192] +a +b", "8192/a 8192/b"): 252.0,
    ("8192 8192] +a", "8192 8192"): 280.0,
    ("8192 8192] +a", "8192/a 8192"): 56.0,
    ("8192 8192] +a +b", "8192 8192] +a"): 448.0,
    ("8192 8192", "8192 8192] +a"): 0.0,
    ("8192/a 8192", "8192 8192] +a"): 0.0,
    ("8192/b 8192] +a", "8192 8192/b] +a"): 28.0,
}


@pytest.mark.parametrize(("before", "after"), BOUNDS)
def test_bounds(before: str, after: str) -> None:
    source, target = (read(f"f32[{text}" + "]" * ("]" not in text), "a=8 b=8") for text in (before, after))
    assert least_bytes(source, target) == BOUNDS[before, after] * 2**20
    assert cost(source, target) <= 1.05 * least_bytes(source, target)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("f32[12/b/a]", "f32[12] +a +b"),  # made of pieces, in any order
        ("f32[4/c]", "f32[4/a] +max:c"),
        ("f32[5/b] +a", "f32[5/b/a]"),  # where the first pieces are larger
        ("f32[8/a]", "f32[(2 4)] +a"),  # written in another way
    ],
)
def test_bounds_that_are_reached(before: str, after: str) -> None:
    source, target = (read(text, "a=2 b=3 c=4") for text in (before, after))
    assert least_bytes(source, target) == cost(source, target)


@pytest.mark.simulated
@settings(max_examples=80, deadline=None)
@given(st.data())
def test_no_transition_is_below_its_bound(data: st.DataObject) -> None:
    """And those between splits are at it."""
    mesh, shape = data.draw(meshes(max_ranks=12)), data.draw(shapes())
    pending = data.draw(st.sampled_from([(), ("sum",)]))
    source, target = (
        TensorType(
            shape, torch.float32, Layout(mesh, data.draw(attrs(mesh, shape, pending=pending)).normalize(shape, mesh))
        )
        for _ in range(2)
    )
    least = least_bytes(source, target)
    assert cost(source, target) >= least
    if not pending:
        assert cost(source, target) == least == 4 * most_lacked(source.layout, target.layout, shape)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))) + x


def test_a_line_tells_what_it_serves_and_what_it_costs() -> None:
    plan = {"*.up.weight": ("tp", None), "*.down.weight": (None, "tp")}
    parallel = autopar.parallelize(Block(), Mesh(dp=2, tp=2), plan, example=(torch.randn(4, 8),))
    lines = parallel.transfers.lines
    assert len(lines) == sum(node.target in transfers.BY_FUNCTION for node in parallel.program.nodes)
    assert sum(line.bytes for line in lines) == sum(row.bytes for row in parallel.transfers)
    first = lines[0]
    assert (first.name, first.transfer, first.value, first.users) == ("mm_1_tp", "all_reduce", "mm_1", ("add",))
    assert (first.before, first.after, first.bytes, first.ratio) == ("f32[4/dp 8] +tp", "f32[4/dp 8]", 64, 1.0)
    assert first.seconds > 0 and first.phase == "forward" and first.module == "down"
    assert first.source.startswith("test_transfer_lines.py:") and "self.down" in first.source
    text = str(lines)
    for cell in ("mm_1", "add", "f32[4/dp 8] +tp", "all_reduce", "1.00", "prices are those of cpu"):
        assert cell in text, text


def test_a_way_of_several_transfers_has_one_ratio() -> None:
    program = autopar.ir.program.Program.parse(
        "program explicit on dp=2 tp=2\n  x : f32[8/dp 8/tp] = input\nforward:\n  x_dp : f32[8 8/tp] = all_gather(x, "
        "0, dp)\n"
        "  x_dp_tp : f32[8 8] = all_gather(x_dp, 1, tp)\n  relu : f32[8 8] = relu(x_dp_tp)\n  x_tp : f32[8/dp 8] = "
        "all_gather(x, 1, tp)\n"
        "  x_tp_dp : f32[8/dp 8] = relu(x_tp)\n  return (relu, x_tp_dp)\n"
    )
    lines = lines_of([program], machine("generic"))
    assert [(line.value, line.users, line.bytes, line.ratio) for line in lines] == [
        ("x", (), 64, None), ("x", ("relu",), 128, 1.0), ("x", ("x_tp_dp",), 64, 1.0),
    ]  # fmt: skip


def test_an_unknown_device_is_priced_as_generic_and_named() -> None:
    program = autopar.ir.program.Program.parse(
        "program explicit on dp=2\n  x : f32[8] +dp = input\nforward:\n  y : f32[8] = all_reduce(x, dp)\n  return y\n"
    )
    text = str(transfers_of(program, "Some Accelerator X1").lines)
    assert "prices are those of generic (" in text and "Some Accelerator X1" in text
