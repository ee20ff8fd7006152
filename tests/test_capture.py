"""Capture: what becomes one static graph, what is kept of where it came from, and that nothing is changed by it."""

from __future__ import annotations

import concurrent.futures
import copy
from typing import Any

import pytest
import torch
from models import COLUMN_ROW, Block, Language, Residual
from test_equality import TOLERANCE, check_equal, relative
from torch import nn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar import Mesh
from autopar.capture import capture
from autopar.program import record_of

d = torch.float64


def names(program: autopar.Program, op: str = "call_function") -> list[str]:
    return [node.name for node in program.nodes if node.op == op]


def test_placeholders_have_roles_and_the_users_names() -> None:
    program = capture(Language(), (torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3, dtype=torch.long))).program
    rows = [(n.name, record_of(n).role, record_of(n).name) for n in program.placeholders]
    assert rows[0] == ("embed_weight", "param", "embed.weight")
    assert rows[-4:] == [("ids", "input", ""), ("labels", "input", ""), ("d_loss", "tangent", ""), ("d_logits", "tangent", "")]


def test_module_paths_and_source_lines() -> None:
    """Every op, the backward ones too."""
    program = capture(Residual(), (torch.randn(2, 8),)).program
    calls = [node for node in program.nodes if node.op == "call_function"]
    assert all("models.py:" in record_of(node).source for node in calls)
    gelu = next(n for n in calls if n.name == "gelu_backward")
    assert (record_of(gelu).phase, record_of(gelu).module) == ("backward", "blocks.1.act")
    assert record_of(gelu).source.endswith("return self.down(self.act(self.up(x)))")
    assert "  # blocks.1.act  models.py:" in program.text(comments=True)


def test_inserted_ops_say_whom_they_serve() -> None:
    """The line of the value they re-lay; where that is a parameter, the line of its use."""
    parallel = autopar.parallelize(Residual(), Mesh(tp=2), COLUMN_ROW, example=(torch.randn(2, 8),))
    program = parallel.program
    assert all(record_of(node).source for node in program.nodes if node.op == "call_function")
    assert record_of(program.node("blocks_0_down_bias_tp")).module == "blocks.0.down"


def test_the_program_of_a_rank_names_the_rank() -> None:
    parallel = autopar.parallelize(Residual(), Mesh(dp=2, tp=2), COLUMN_ROW, example=(torch.randn(5, 8),))
    heads = [str(parallel.local(rank)).splitlines()[0] for rank in range(4)]
    assert heads == [f"program local on dp=2 tp=2 at dp={r // 2} tp={r % 2}" for r in range(4)]
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
    parallel = check_equal(Everything().double(), Mesh(dp=2), {"inner.weight": (None, "dp")}, (x,), {"scale": 3.0, "more": extra})
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


def test_buffers_that_are_written_are_state() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros((), dtype=d))
            self.register_buffer("total", torch.zeros(4, dtype=d))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += 1
            self.total.add_(x.sum(0))
            return x * self.seen

    model = Counter()
    eager = copy.deepcopy(model)
    x = torch.randn(5, 4, dtype=d, requires_grad=True)
    parallel = autopar.parallelize(model, Mesh(dp=2), {"total": ("dp",), "x": ("dp",)}, example=(x,))
    assert torch.equal(model.seen, eager.seen), "capture changes nothing"
    assert "total : f64[4/dp] = state(" in str(parallel.program)
    for _ in range(3):
        assert torch.allclose(parallel.simulate(x), eager(x))
    assert torch.equal(model.seen, eager.seen) and torch.allclose(model.total, eager.total)


def test_no_grad_captures_the_forward_alone() -> None:
    model, x = Block().double(), torch.randn(4, 8, dtype=d)
    with torch.no_grad():
        parallel = autopar.parallelize(model, Mesh(dp=2), example=(x,))
        assert "backward" not in str(parallel.program) and "tangent" not in str(parallel.program)
        assert not parallel.simulate(x).requires_grad
    assert parallel.simulate(x).requires_grad
    assert "backward" in str(parallel.program)


def test_other_shapes_and_modes_are_captured_again_once() -> None:
    model = nn.Sequential(Block(), nn.Dropout(0.5)).double().eval()
    parallel = autopar.parallelize(model, Mesh(dp=2))
    for batch in (4, 5, 4, 5):
        x = torch.randn(batch, 8, dtype=d)
        assert torch.allclose(parallel.simulate(x), model(x))
    assert len(parallel._compiled) == 2
    first = parallel.program
    parallel.simulate(torch.randn(5, 8, dtype=d))
    assert parallel.program is first


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return x * scale * self.weight if isinstance(scale, float) else x + scale * self.weight


def test_what_changes_the_step_is_captured_again() -> None:
    """Equal numbers of other types, freezing and unfreezing, other dtypes, autocast."""
    model, x = Scaled(), torch.randn(4, 3)
    parallel = autopar.parallelize(model, Mesh(dp=2))
    for scale in (1, 1.0, True, 2.0):
        assert torch.equal(parallel.simulate(x, scale), model(x, scale))
    assert len(parallel._compiled) == 4
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
    assert len(mixed._compiled) == 2


def test_capture_leaves_model_and_arguments_alone() -> None:
    model, x = Block(), torch.randn(4, 8)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    kept, random = x.clone(), torch.get_rng_state()
    capture(model, (x,))
    assert torch.equal(x, kept) and all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters()) and torch.equal(torch.get_rng_state(), random)


def test_nothing_fake_stays_in_the_program() -> None:
    for node in capture(Block(), (torch.randn(4, 8),)).program.nodes:
        assert set(node.meta) == {"autopar"}


def test_a_model_on_meta_is_captured_without_memory() -> None:
    with torch.device("meta"):
        model, x = Block(2**14, 2**16), torch.randn(2**10, 2**14)
    parallel = autopar.parallelize(model, Mesh(dp=4, tp=8), {"*.up.weight": ("tp",), "*.down.weight": (None, "tp")}, example=(x,))
    assert "f32[1024/dp 65536/tp]" in str(parallel.program)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Block(), Block()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a(x), self.b(x)


def test_an_output_without_a_gradient_gives_none() -> None:
    """Not zeros: an optimizer with weight decay would change a parameter whose gradient is zero."""
    model, x = Both().double(), torch.randn(4, 8, dtype=d)
    eager = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(dp=2), example=(x,))
    for _ in range(2):
        parallel.simulate(x)[0].sum().backward()
        eager(x)[0].sum().backward()
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert theirs.grad is None or torch.allclose(ours.grad, theirs.grad)
    assert len(parallel._compiled) == 1
    assert str(parallel.program).count("= tangent(") == 2, "the program is that of the call, not of its special case"


class Mixed(nn.Module):
    """Two outputs whose gradients meet: in a sum, and broadcast, and where one is scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = torch.tanh(self.a(x))
        left, right = h.chunk(2, dim=-1)
        return {"p": self.b(h), "q": h * self.c, "r": left - right, "s": left.sum()}


@pytest.mark.parametrize("given", ["p", "q", "r", "s", "pq", "rs", "ps", "pqr"])
def test_every_choice_of_gradients(given: str) -> None:
    model, x = Mixed().double(), torch.randn(6, 8, dtype=d, requires_grad=True)
    eager, y = copy.deepcopy(model), x.detach().clone().requires_grad_()
    outputs = autopar.parallelize(model, Mesh(dp=2), {"a.weight": (None, "dp")}, example=(x,)).simulate(x)
    sum(outputs[k].square().sum() for k in given).backward()
    expected = eager(y)
    sum(expected[k].square().sum() for k in given).backward()
    for ours, theirs in zip([x, *model.parameters()], [y, *eager.parameters()], strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert theirs.grad is None or relative(ours.grad, theirs.grad) <= TOLERANCE


def test_gradients_of_gradients_are_refused() -> None:
    model, x = Block().double(), torch.randn(4, 8, dtype=d, requires_grad=True)
    y = autopar.parallelize(model, Mesh(dp=2), example=(x,)).simulate(x)
    with pytest.raises(RuntimeError, match=r"differentiated once.*create_graph=True is refused"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_a_module_with_two_names_keeps_its_weights() -> None:
    shared = nn.Linear(8, 8)
    model = nn.Sequential(shared, nn.ReLU(), shared).double()
    weight = shared.weight
    check_equal(model, Mesh(dp=2, tp=2), {"0.weight": ("tp", None)}, (torch.randn(4, 8, dtype=d),))
    assert shared.weight is weight and type(shared.weight) is nn.Parameter


def test_a_buffer_that_is_given_a_new_tensor_is_state() -> None:
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.register_buffer("ema", torch.zeros(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            self.ema = self.ema * 0.9 + y.detach().mean(0)
            return y - self.ema

    model, x = Average().double(), torch.randn(5, 8, dtype=d)
    eager = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(dp=2), example=(x,))
    assert not model.ema.any()
    for _ in range(3):
        assert relative(parallel.simulate(x), eager(x)) <= TOLERANCE
    assert relative(model.ema, eager.ema) <= TOLERANCE


def test_recurrent_weights_are_not_constants() -> None:
    """A module may list its parameters once more in a plain list, as recurrent ones do."""

    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.also = [self.inner.weight]
            self.pair = (self.inner.bias, "why")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.also[0] + self.pair[0]

    model = Listed().double()
    model.also, model.pair = [model.inner.weight], (model.inner.bias, "why")
    parallel = autopar.parallelize(model, Mesh(dp=2), example=(x := torch.randn(4, 8, dtype=d),))
    parallel.simulate(x).sum().backward()
    assert torch.allclose(model.inner.weight.grad, x.sum(0)[:, None].expand(8, 8))
    assert model.also[0] is model.inner.weight and model.pair[0] is model.inner.bias


def test_a_number_that_forward_changes_is_reported_and_put_back() -> None:
    class Counts(Block):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x)

    model = Counts()
    parallel = autopar.parallelize(model, Mesh(dp=2), example=(torch.randn(4, 8),))
    assert model.calls == 0
    assert "forward changes calls; the captured step keeps the values of the first call" in str(parallel.reports)


def test_captures_in_threads() -> None:
    model = Block().double()
    parallel = autopar.parallelize(model, Mesh(dp=2))
    inputs = [torch.randn(k + 2, 8, dtype=d) for k in range(6)]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        outputs = list(pool.map(parallel.simulate, inputs))
    for x, y in zip(inputs, outputs, strict=True):
        assert relative(y, model(x)) <= TOLERANCE


def test_training_equals_training_on_one_device() -> None:
    model = Residual().double()
    eager = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(dp=2, tp=2), COLUMN_ROW)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1) for m in (model, eager))
    for step in range(20):
        x = torch.randn(4 + step % 3, 8, dtype=d)
        for optimizer, call in ((ours, parallel.simulate), (theirs, eager)):
            optimizer.zero_grad()
            call(x).square().mean().backward()
            optimizer.step()
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        assert relative(a, b) <= 1e-9


def test_backward_twice() -> None:
    """As in eager: with ``retain_graph`` the saved values serve again, without it torch refuses."""
    model, x = Block().double(), torch.randn(4, 8, dtype=d)
    eager = copy.deepcopy(model)
    y = autopar.parallelize(model, Mesh(dp=2), example=(x,)).simulate(x)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    (2 * eager(x).sum()).backward()
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()


def test_a_parameter_changed_before_backward_is_refused() -> None:
    model, x = Block().double(), torch.randn(4, 8, dtype=d)
    y = autopar.parallelize(model, Mesh(dp=2), example=(x,)).simulate(x)
    with torch.no_grad():
        model.up.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


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


def test_a_mesh_of_any_size_needs_no_process_group() -> None:
    parallel = check_equal(Block().double(), Mesh(dp=64, tp=8), {"*.up.*": ("tp",), "*.down.weight": (None, "tp")},
                           (torch.randn(130, 8, dtype=d),))  # fmt: skip
    assert len(set(map(id, parallel._latest.local.values()))) < 20, "ranks with equal pieces share a program"
    assert not torch.distributed.is_initialized()
    with torch.device("meta"):
        model, x = Block(), torch.randn(2**14, 8)
    huge = autopar.parallelize(model, Mesh(dp=4096), example=(x,))
    assert "f32[16384/dp 8]" in str(huge.program)


class Recomputed(nn.Module):
    """A checkpointed block with a trained layer and a buffer: its backward reads them again."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(8, 8)
        self.register_buffer("b", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda t: torch.tanh(self.w(t) * self.b), x, use_reentrant=False)


def test_what_the_backward_reads_is_no_constant() -> None:
    model, x = Recomputed().double(), torch.randn(6, 8, dtype=d)
    parallel = check_equal(model, Mesh(dp=2), None, (x,))
    model.b = torch.full((8,), 3.0, dtype=d)
    model.zero_grad()
    eager = copy.deepcopy(model)
    for call in (parallel.simulate, eager):
        call(x).square().sum().backward()
    assert relative(model.w.weight.grad, eager.w.weight.grad) <= TOLERANCE


def test_tying_anew_is_captured_anew() -> None:
    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(8, 8, bias=False) for _ in range(3))
            self.c.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.a(x), self.b(x), self.c(x)

    model, x = Three().double(), torch.randn(4, 8, dtype=d)
    parallel = autopar.parallelize(model, Mesh(dp=2), example=(x,))
    model.c.weight = model.b.weight
    assert relative(parallel.simulate(x)[2], model(x)[2]) <= TOLERANCE


def test_parameters_in_nested_containers() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(8, 8)
            self.held = {"a": [(self.w.weight, "why")]}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.held["a"][0][0]

    model = Nested()
    held = model.held["a"][0]
    check_equal(model.double(), Mesh(dp=2), None, (torch.randn(4, 8, dtype=d),))
    assert model.held["a"][0] is held and held[0] is model.w.weight


@pytest.mark.parametrize("order", [(0, 2, 1), (1, 0, 2), (2, 1, 0)])
def test_results_that_are_not_contiguous(order: tuple[int, ...]) -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(4, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.w(x).permute(order) * 2

    check_equal(Turned().double(), Mesh(dp=2, tp=2), {"w.weight": ("tp",)}, (torch.randn(3, 5, 4, dtype=d),))


def test_views_of_what_was_written_in_place() -> None:
    """Functionalizing makes the views late, behind the backward: they belong to the forward."""

    class Assigned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.u = nn.Linear(6, 6), nn.Parameter(torch.randn(6, 1))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            h = self.a(x)
            h[:, 0] = self.u[:, 0]
            return h[:, 0], h[:, 1:], h

    check_equal(Assigned().double(), Mesh(dp=2), None, (torch.randn(6, 6, dtype=d),))
