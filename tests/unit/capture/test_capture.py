"""Capture: what becomes one static graph, what is kept of where it came from, and that nothing is changed by it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equality import TOLERANCE, check_equal, relative
from models import COLUMN_ROW, Block, Language, Residual
from torch import nn

import autopar
from autopar import Mesh
from autopar.capture import capture
from autopar.ir.nodes import record_of

d = torch.float64


def names(program: autopar.Program, op: str = "call_function") -> list[str]:
    return [node.name for node in program.nodes if node.op == op]


@pytest.mark.simulated
def test_placeholders_have_roles_and_the_users_names() -> None:
    program = capture(Language(), (torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3, dtype=torch.long))).program
    rows = [(n.name, record_of(n).role, record_of(n).name) for n in program.placeholders]
    assert rows[0] == ("embed_weight", "param", "embed.weight")
    assert rows[-4:] == [
        ("ids", "input", ""),
        ("labels", "input", ""),
        ("d_loss", "tangent", ""),
        ("d_logits", "tangent", ""),
    ]


def test_module_paths_and_source_lines() -> None:
    """Every op, the backward ones too."""
    program = capture(Residual(), (torch.randn(2, 8),)).program
    calls = [node for node in program.nodes if node.op == "call_function"]
    assert all("models.py:" in record_of(node).source for node in calls)
    gelu = next(n for n in calls if n.name == "gelu_backward")
    assert (record_of(gelu).phase, record_of(gelu).module) == ("backward", "blocks.1.act")
    assert record_of(gelu).source.endswith("return self.down(self.act(self.up(x)))")
    assert "  # blocks.1.act  models.py:" in program.text(comments=True)


@pytest.mark.simulated
def test_inserted_ops_say_whom_they_serve() -> None:
    """The line of the value they re-lay; where that is a parameter, the line of its use."""
    parallel = autopar.parallelize(Residual(), Mesh(tp=2), COLUMN_ROW, example=(torch.randn(2, 8),))
    program = parallel.program
    assert all(record_of(node).source for node in program.nodes if node.op == "call_function")
    assert record_of(program.node("blocks_0_down_bias_tp")).module == "blocks.0.down"


@pytest.mark.simulated
def test_the_program_of_a_rank_names_the_rank() -> None:
    parallel = autopar.parallelize(Residual(), Mesh(dp=2, tp=2), COLUMN_ROW, example=(torch.randn(5, 8),))
    heads = [str(parallel.local(rank)).splitlines()[0] for rank in range(4)]
    assert heads == [f"program scheduled on dp=2 tp=2 at dp={r // 2} tp={r % 2}" for r in range(4)]
    assert parallel.local(0).graph is parallel.local(1).graph and parallel.local(0).graph is not parallel.local(2).graph
    for rank in range(4):
        parallel.local(rank).verify()


def test_the_same_tensor_passed_twice_is_two_inputs() -> None:
    class Product(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x.tanh() * y

    x = torch.randn(4, 3, dtype=d, requires_grad=True)
    assert [n for n in names(capture(Product(), (x, x)).program, "placeholder")] == ["x", "y", "d_out"]
    check_equal(Product(), Mesh(dp=2), None, (x, x))


def test_tied_parameters_are_one() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.tanh(self.a(x)))

    model = Tied().double()
    parallel = check_equal(model, Mesh(dp=2, tp=2), {"a.weight": ("tp",)}, (torch.randn(4, 4, dtype=d),))
    assert str(parallel.program).count("= param") == 1
    parallel = check_equal(Tied().double(), Mesh(tp=2), {"b.weight": (None, "tp")}, (torch.randn(4, 4, dtype=d),))
    assert "a_weight : f64[4 4/tp] = param('a.weight')" in str(parallel.program), "any of its names will do"


class Everything(nn.Module):
    """Keywords, a constant, numbers and None among the results, a parameter and an input returned as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.unused = nn.Linear(2, 2)
        self.constant = torch.arange(4.0, dtype=d)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0, more: Any = ()) -> Any:
        y = self.inner(x) * scale + self.constant
        for extra in more:
            y = y + extra
        return [y, None, (x, {"k": 3, "why": "it's", "mask": y > 0}), self.inner.weight]


def test_structures_in_and_out() -> None:
    x, extra = torch.randn(5, 4, dtype=d), [torch.randn(4, dtype=d), torch.randn(5, 1, dtype=d)]
    parallel = check_equal(
        Everything().double(), Mesh(dp=2), {"inner.weight": (None, "dp")}, (x,), {"scale": 3.0, "more": extra}
    )
    text = str(parallel.program)
    assert "  return [add_2, None, (x, {'k': 3, 'why': \"it's\", 'mask': gt}), inner_weight]\n" in text
    assert "constant((0.0, 1.0, 2.0, 3.0))" in text


def test_writes_in_place_are_functionalized() -> None:
    class Inplace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.act = nn.Linear(4, 4), nn.ReLU(inplace=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            y += 1
            y.mul_(2)
            return self.act(y)

    x = torch.randn(4, 4, dtype=d)
    kept = x.clone()
    program = check_equal(Inplace().double(), Mesh(dp=2), None, (x,)).program
    assert torch.equal(x, kept)
    assert "_(" not in str(program)
    lines = {record_of(n).source.partition("  ")[2] for n in program.nodes if n.op == "call_function"}
    assert {"y += 1", "y.mul_(2)", "return self.act(y)"} <= lines


def test_no_grad_captures_the_forward_alone() -> None:
    model, x = Block().double(), torch.randn(4, 8, dtype=d)
    with torch.no_grad():
        parallel = autopar.parallelize(model, Mesh(dp=2), "ddp", example=(x,))
        assert "backward" not in str(parallel.program) and "tangent" not in str(parallel.program)
        assert not parallel.simulate(x).requires_grad
    assert parallel.simulate(x).requires_grad
    assert "backward" in str(parallel.program)


@pytest.mark.simulated
def test_other_shapes_and_modes_are_captured_again_once() -> None:
    model = nn.Sequential(Block(), nn.Dropout(0.5)).double().eval()
    parallel = autopar.parallelize(model, Mesh(dp=2))
    for batch in (4, 5, 4, 5):
        x = torch.randn(batch, 8, dtype=d)
        assert torch.allclose(parallel.simulate(x), model(x))
    assert parallel.captures == 2
    first = parallel.program
    parallel.simulate(torch.randn(5, 8, dtype=d))
    assert parallel.program is first


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return x * scale * self.weight if isinstance(scale, float) else x + scale * self.weight


@pytest.mark.simulated
def test_what_changes_the_step_is_captured_again() -> None:
    """Equal numbers of other types, freezing and unfreezing, other dtypes, autocast."""
    model, x = Scaled(), torch.randn(4, 3)
    parallel = autopar.parallelize(model, Mesh(dp=2))
    for scale in (1, 1.0, True, 2.0):
        assert torch.equal(parallel.simulate(x, scale), model(x, scale))
    assert parallel.captures == 4
    model.weight.requires_grad_(False)
    assert not parallel.simulate(x, 1.0).requires_grad
    model.weight.requires_grad_(True)
    parallel.simulate(x, 1.0).sum().backward()
    assert torch.allclose(model.weight.grad, x.sum(0))
    model.double()
    assert parallel.simulate(x, 1.0).dtype == d
    linear = nn.Linear(3, 3)
    mixed = autopar.parallelize(linear, Mesh(dp=2))
    for enabled in (False, True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            assert mixed.simulate(x).dtype == linear(x).dtype
    assert mixed.captures == 2


def test_nothing_fake_stays_in_the_program() -> None:
    for node in capture(Block(), (torch.randn(4, 8),)).program.nodes:
        assert set(node.meta) == {"autopar"}


def test_a_model_on_meta_is_captured_without_memory() -> None:
    with torch.device("meta"):
        model, x = Block(2**14, 2**16), torch.randn(2**10, 2**14)
    parallel = autopar.parallelize(
        model, Mesh(dp=4, tp=8), {"*.up.weight": ("tp",), "*.down.weight": (None, "tp")}, example=(x,)
    )
    assert "f32[1024/dp 65536/tp]" in str(parallel.program)


def test_an_input_named_like_a_parameter() -> None:
    class Clash(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.x

    parallel = check_equal(Clash().double(), Mesh(dp=2), {"x": (None, "dp")}, (torch.randn(4, 4, dtype=d),))
    text = str(parallel.program)
    assert "x : f64[4 4/dp] = param" in text and "x_1 : f64[4/dp 4] = input('x')" in text


@pytest.mark.simulated
def test_a_mesh_of_any_size_needs_no_process_group() -> None:
    parallel = check_equal(Block().double(), Mesh(dp=64, tp=8), {"*.up.*": ("tp",), "*.down.weight": (None, "tp")},
                           (torch.randn(130, 8, dtype=d),))  # fmt: skip
    assert len(set(map(id, parallel._calls.captures.latest.local.values()))) < 20, (
        "ranks with equal pieces share a program"
    )
    assert not torch.distributed.is_initialized()
    with torch.device("meta"):
        model, x = Block(), torch.randn(2**14, 8)
    huge = autopar.parallelize(model, Mesh(dp=4096), "ddp", example=(x,))
    assert "f32[16384/dp 8]" in str(huge.program)


def test_tying_anew_is_captured_anew() -> None:
    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(8, 8, bias=False) for _ in range(3))
            self.c.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.a(x), self.b(x), self.c(x)

    model, x = Three().double(), torch.randn(4, 8, dtype=d)
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp", example=(x,))
    model.c.weight = model.b.weight
    assert relative(parallel.simulate(x)[2], model(x)[2]) <= TOLERANCE
