"""``autopar.constrain`` in a model's forward: nothing in eager, the layout of the value in every captured step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from equality import check_equal
from searched import SLOW
from torch import nn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar import CaptureError, Mesh, PlanError
from autopar.capture import Captured, capture
from autopar.ir.layout import DistAttr
from autopar.ir.nodes import record_of
from autopar.plan.boundary import OPEN
from autopar.plan.constraints import constraints

MESH = Mesh(a=2, b=2)
X = torch.randn(4, 6, 8, dtype=torch.float64)


class Hidden(nn.Module):
    """Constrains the value between two products."""

    def __init__(self, spec: Any = None) -> None:
        super().__init__()
        self.up, self.down, self.spec = nn.Linear(8, 12), nn.Linear(12, 8), spec

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        if self.spec is not None:
            h = autopar.constrain(h, self.spec)
        return self.down(torch.relu(h))


def of(model: nn.Module, *args: Any) -> Captured:
    return capture(model, args or (X.to(next(model.parameters()).dtype),))


def read_by_relu(parallel: Any) -> DistAttr:
    """The layout in which the forward reads the constrained value."""
    (need,) = record_of(parallel.program.node("relu")).uses
    return need.placed.attr


def test_in_eager_it_returns_the_tensor_itself() -> None:
    x = torch.randn(3, requires_grad=True)
    y = x * 2
    assert autopar.constrain(y, ("dp",)) is y
    autopar.constrain(y, ["?"]).sum().backward()
    assert x.grad is not None
    model = Hidden(("a", None, ("b",)))
    plain = Hidden()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(X.float()), plain(X.float()))


NO_SPEC = "constrain takes an axis, None or '?' for each dim, as in autopar.constrain(x, (\"dp\", None))"


@pytest.mark.parametrize(("x", "spec", "text"), [
    (3, ("a",), "constrain takes a tensor, not an int"),
    (X, "a", f"{NO_SPEC}, not 'a'"),
    (X, None, f"{NO_SPEC}, not None"),
])  # fmt: skip
def test_arguments_that_are_refused(x: Any, spec: Any, text: str) -> None:
    with pytest.raises(TypeError) as caught:
        autopar.constrain(x, spec)
    assert str(caught.value) == text


def test_the_program_looks_the_same() -> None:
    torch.manual_seed(0)
    with_it, plain = of(Hidden((None, "a"))), of(Hidden())
    assert str(with_it.program) == str(plain.program) and plain.constrained == ()
    ((value, spec, source, axis),) = with_it.constrained
    assert axis == "" and value == with_it.modules["up"][0] and spec == (None, "a")
    assert source.endswith("h = autopar.constrain(h, self.spec)") and source.startswith("test_constrain.py:")


SPECS: list[tuple[Any, ...]] = [
    ("a", "b", None), (None, None, "a"), ("?", "a"), ("?", "?", ("b", "a")), (("a", "b"), None, "?"), (),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("plan", [{}, "search", ["search", {"up.weight": ("?", None)}]], ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_value_has_the_layout_and_the_numbers_are_those_of_a_single_device(spec: Any, plan: Any) -> None:
    parallel = check_equal(Hidden(spec).double(), MESH, plan, (X.clone().requires_grad_(),))
    wanted = [OPEN if entry == "?" else ((None, (entry,) if isinstance(entry, str) else tuple(entry or ()))
                                         ,) for entry in (*spec, *[None] * (3 - len(spec)))]  # fmt: skip
    attr = read_by_relu(parallel)
    assert not attr.pending and all(asked in (OPEN, mine) for mine, asked in zip(attr.dims, wanted, strict=True)), attr


@pytest.mark.long
def test_a_constraint_costs_what_it_costs() -> None:
    """The search knows it, and finds the rest."""
    free = autopar.parallelize(Hidden(), MESH, example=(X.float(),), machine=SLOW).solution
    asked = autopar.parallelize(Hidden((None, "a", "b")), MESH, example=(X.float(),), machine=SLOW).solution
    assert free is not None and asked is not None and free.exact and asked.nanoseconds > free.nanoseconds


class Given(nn.Module):
    """Constrains its input."""

    def __init__(self, spec: Any) -> None:
        super().__init__()
        self.up, self.spec = nn.Linear(8, 12), spec

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(autopar.constrain(x, self.spec))


@pytest.mark.long
def test_an_input_gets_the_layout() -> None:
    for plan in ({}, "search"):
        parallel = check_equal(Given((None, "a")).double(), MESH, plan, (X,))
        assert "x : f64[4 6/a 8] = input" in str(parallel.program)
    text = str(check_equal(Given(("?", "b")).double(), MESH, {}, (X,)).program)
    assert "x : f64[4/a 6/b 8] = input" in text  # by default a splits the batch
    with pytest.raises(PlanError) as caught:
        autopar.parallelize(Given((None, "a")).double(), MESH, {"x": ("b",)}, example=(X,))
    line = "return self.up(autopar.constrain(x, self.spec))"
    number = str(caught.value).partition("test_constrain.py:")[2].partition(" ")[0]
    assert str(caught.value) == (
        f"two constraints contradict each other on x : f64[4 6 8]: x says [4/b 6 8], constrain at "
        f"test_constrain.py:{number}  {line} says [4 6/a 8]; leave one of them out"
    )


def refused(model: nn.Module, plan: Any = None, mesh: Mesh = MESH) -> str:
    with pytest.raises((PlanError, CaptureError)) as caught:
        autopar.parallelize(model, mesh, {} if plan is None else plan, example=(X.float(),))
    return str(caught.value)


def test_layouts_that_do_not_fit_name_the_users_line() -> None:
    where = "h = autopar.constrain(h, self.spec)"
    text = refused(Hidden(("dp",)))
    assert text.startswith("constrain(add") or text.startswith("constrain(")
    assert where in text and text.endswith("the mesh (a=2 b=2) has no axis 'dp'; its axes are a, b")
    assert where in (text := refused(Hidden(("a", "a")), "search")) and "uses the axis 'a' twice" in text
    assert where in (text := refused(Hidden((None, None, None, "a")))) and "splits dim 3" in text
    text = refused(Hidden(("a", "?")), {"up()": ("b", None)})
    assert "two constraints contradict each other on" in text and "up() says [4/b 6 12], constrain at test_con" in text


def test_a_parameter_belongs_into_the_plan() -> None:
    class Weight(Hidden):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ autopar.constrain(self.up.weight, (None, "a")).t()

    text = refused(Weight())
    assert text.endswith("has the parameter up.weight, which no op of forward computes; give it a layout in the plan")
    assert "return x @ autopar.constrain(self.up.weight" in text


def test_a_value_that_no_op_can_read_so() -> None:
    class Sums(Hidden):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = autopar.constrain(self.up(x), (None, None, "a"))
            return torch.cumsum(h, -1)

    text = refused(Sums(), "search")
    assert text.startswith("no strategy of cumsum reads ") and "as the plan has constrain at test_constrain.py" in text


@pytest.mark.long
def test_modes_and_regions() -> None:
    """Without gradients, in a checkpoint, under autocast, after a write in place, and in a compiled part."""

    class Regions(Hidden):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                mask = autopar.constrain(x * 2, ("?", "b")) > 0
            h = checkpoint(lambda x: autopar.constrain(self.up(x), ("?", "a", None)), x, use_reentrant=False)
            h = h * 1
            h += 1  # a write: the graph is made functional by another trace
            h = autopar.constrain(h, ("a", "?"))
            return self.down(torch.relu(h)).masked_fill(mask, 0)

    model = Regions().double()
    captured = of(model)
    assert len(captured.constrained) >= 3
    for plan in ({}, "search"):
        check_equal(copy.deepcopy(model), MESH, plan, (X.clone().requires_grad_(),))
    with torch.no_grad():
        parallel = autopar.parallelize(model, MESH, {}, example=(X,))
        torch.testing.assert_close(parallel.simulate(X), model(X))
        attrs, _ = constraints({}, model, MESH, capture(model, (X,)))
        assert any(OPEN in attr.dims for attr in attrs.values())


def test_inside_of_a_transform_it_is_refused() -> None:
    class Mapped(Hidden):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.func.vmap(lambda row: autopar.constrain(self.up(row), ("a",)))(x)

    text = refused(Mapped())
    assert text.startswith(
        "forward constrains a tensor that is no value of the step, as inside of a transform of torch"
    )
    assert text.endswith("constrain a value outside of the transform")


@pytest.mark.long
def test_in_a_training_step() -> None:
    class WithLoss(Hidden):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).square().mean()

    for plan in ({}, "search"):
        torch.manual_seed(0)
        model, single = WithLoss((None, "a", "?")).double(), WithLoss().double()
        single.load_state_dict(model.state_dict())
        parallel = autopar.parallelize(model, MESH, plan)
        step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1))
        optimizer = torch.optim.SGD(single.parameters(), lr=0.1)
        for _ in range(2):
            loss, expected = step.simulate(X), single(X)
            optimizer.zero_grad()
            expected.backward()
            optimizer.step()
            torch.testing.assert_close(loss.detach(), expected.detach())
