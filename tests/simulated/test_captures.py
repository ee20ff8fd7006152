"""What goes in and comes out of a captured step: structures, modes, devices; and that nothing else is changed by it."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from captured import Apply, returned, same
from equality import TOLERANCE, relative
from hypothesis import given, settings
from hypothesis import strategies as st
from models import COLUMN_ROW, Block, Language
from torch import nn

import autopar
from autopar import CaptureError, Mesh
from autopar.capture import capture
from autopar.ir.nodes import record_of
from autopar.ir.structure import flatten, flatten_with_path, unflatten

d = torch.float64


def check(model: nn.Module, *args: Any, mesh: Mesh | None = None, **kwargs: Any) -> autopar.Parallel:
    """Simulated outputs are those of eager; the program (verified, and parsed back, by the fixtures) is given back."""
    expected = copy.deepcopy(model)(*copy.deepcopy(args), **copy.deepcopy(kwargs))
    parallel = autopar.parallelize(model, mesh or Mesh(dp=2))
    same(parallel.simulate(*args, **kwargs), expected)
    return parallel


# -- structures -----------------------------------------------------------------------------------------------------


@dataclass
class Out:
    loss: Any
    h: Any = None


@dataclass(frozen=True)
class Base:
    loss: Any
    h: Any = None


@dataclass(frozen=True)
class Frozen(Base):
    more: tuple[Any, ...] = ()
    late: Any = dataclasses.field(init=False, default=3)
    never: Any = dataclasses.field(init=False)


@dataclass(slots=True)
class Slots:
    x: Any
    given: dataclasses.InitVar[int] = 1
    made: int = dataclasses.field(init=False)

    def __post_init__(self, given: int) -> None:
        self.made = given + 1


@dataclass
class Counted:
    """Its post-init runs once for each instance, and what it adds beside the fields is kept."""

    x: Any

    def __post_init__(self) -> None:
        self.x, self.twice = self.x + 1, self.x * 2


class Pair(NamedTuple):
    a: Any
    b: Any


class Color(enum.IntEnum):
    RED = 1


torch.utils._pytree.register_pytree_node(
    collections.UserList, lambda v: (v.data, None), lambda parts, _: collections.UserList(parts)
)

OUTPUTS = {  # a function of y → what is printed
    "dataclass": (lambda y: Out(y.sum(), y), "Out(loss=sum_1_dp, h=addmm)"),
    "frozen": (
        lambda y: Frozen(y, {"k": 1.5}, (y, None, True)),
        "Frozen(loss=addmm, h={'k': 1.5}, more=(addmm, None, True))",
    ),
    "slots": (lambda y: [Slots(y, given=4)], "[Slots(x=addmm, made=5)]"),
    "post-init": (lambda y: {"c": (Counted(y),)}, "{'c': (Counted(x=add, twice=mul),)}"),
    "nested": (
        lambda y: Out(Out(y, None), [Out({}, ()), "it's"]),
        'Out(loss=Out(loss=addmm, h=None), h=[Out(loss={}, h=()), "it\'s"])',
    ),
    "named tuple": (lambda y: Pair(y, Pair(1, "two")), "Pair(a=addmm, b=Pair(a=1, b='two'))"),
    "keys": (lambda y: {1: y, None: 2, (1, 2): y}, "{1: addmm, None: 2, '(1, 2)': addmm}"),
    "enum": (lambda y: Out(y, Color.RED), "Out(loss=addmm, h=1)"),
    "ordered": (lambda y: collections.OrderedDict(b=y, a=y), "OrderedDict(b=addmm, a=addmm)"),
    "registered, without keys": (lambda y: collections.UserList([y, 1]), "UserList(_0=addmm, _1=1)"),
    "none": (lambda y: (None, y), "(None, addmm)"),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_structures_out(case: str) -> None:
    function, printed = OUTPUTS[case]
    parallel = check(Apply(function), torch.randn(4, 4, dtype=d))
    assert returned(parallel) == f"return {printed}"


def test_structures_in() -> None:
    """Opened, named after their fields, and part of what a capture is keyed by."""
    model = Apply(lambda y, o, *, s: y * o.h + o.loss["n"] + s[0].made * s[0].x)
    x, h = torch.randn(4, 4, dtype=d), torch.randn(4, 4, dtype=d)
    parallel = check(model, x, Out({"n": 2}, h), s=[Slots(h, given=5)])
    assert {r.name or n.name for n in parallel.program.placeholders if (r := record_of(n)).role == "input"} == {
        "x",
        "rest_h",
        "s_0_x",
    }
    for n, s in ((2, 5), (3, 5), (3, 6), (2, 5)):
        same(
            parallel.simulate(x, Out({"n": n}, h), s=[Slots(h, given=s)]),
            model(x, Out({"n": n}, h), s=[Slots(h, given=s)]),
        )
    assert parallel.captures == 3
    same(
        parallel.simulate(x, Frozen({"n": 2}, h), s=[Slots(h, given=5)]),
        model(x, Out({"n": 2}, h), s=[Slots(h, given=5)]),
    )
    assert parallel.captures == 4, "another class is another structure"


def test_tangents_are_named_after_fields() -> None:
    program = capture(Apply(lambda y: Out(y.sum(), [y])), (torch.randn(4, 4, dtype=d),)).program
    assert [n.name for n in program.placeholders][-2:] == ["d_loss", "d_h_0"]


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=3)
    | st.builds(lambda n: torch.full((n,), float(n)), st.integers(0, 3))
)
values = st.recursive(leaves,
                      lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=2), v, max_size=3)
                      | st.builds(Out, v, v) | st.builds(Pair, v, v) | st.tuples(v) | st.builds(Frozen, v, v)
                      | st.builds(Slots, v))  # fmt: skip


@given(values)
@settings(max_examples=25)
def test_flattened_and_rebuilt(value: Any) -> None:
    found, spec = flatten(value)
    again, other = flatten(unflatten(found, spec))
    assert spec == other and hash(spec) == hash(other)
    assert len(again) == len(found) and all(a is b for a, b in zip(again, found, strict=True))
    assert [leaf for _, leaf in flatten_with_path(value)[0]] == found or any(
        isinstance(leaf, torch.Tensor) for leaf in found
    )
    assert not any(isinstance(leaf, (list, dict, tuple, Out, Slots)) for leaf in found)
    same(unflatten(found, spec), value)


def test_what_holds_itself_is_a_leaf() -> None:
    out = Out(1)
    out.h = [out]
    assert flatten(out)[0] == [1, out]


CHANGED = {
    "list": (
        lambda y, a: a.append(y) or y,
        [1],
        r"forward changes its argument a, a list, which the caller would see changed\n  change a copy of it",
    ),
    "field": (lambda y, a: setattr(a, "h", y) or y, Out(1), r"forward changes its argument a, an Out, .*\n.*"),
}


@pytest.mark.parametrize("case", CHANGED)
def test_arguments_that_forward_changes(case: str) -> None:
    function, argument, text = CHANGED[case]
    before = copy.deepcopy(argument)
    with pytest.raises(CaptureError, match=text):
        autopar.parallelize(
            Apply(function), Mesh(dp=2), "ddp", example=((torch.randn(4, 4, dtype=d),), {"a": argument})
        )
    assert argument == before


# -- the same tensor, several times ---------------------------------------------------------------------------------


def test_a_tensor_that_comes_and_goes_several_times() -> None:
    ids = torch.randint(0, 11, (4, 3))
    parallel = check(Language().double(), ids, labels=ids)
    assert {"ids", "labels"} <= {n.name for n in parallel.program.placeholders}
    model = Apply(None)
    model.function = lambda y, x: (y, y, x, model.w.weight, model.w.weight)
    x = torch.randn(4, 4, dtype=d)
    outputs = autopar.parallelize(model, Mesh(dp=2)).simulate(x, x)
    (outputs[1].sum() + outputs[3].sum() + outputs[4].sum()).backward()
    expected = torch.autograd.grad(model.w(x).sum() + 2 * model.w.weight.sum(), model.w.weight)[0]
    assert relative(model.w.weight.grad, expected) <= TOLERANCE and torch.equal(outputs[2], x)


# -- modes and keys --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_forward_only(mode: Any) -> None:
    model = nn.Sequential(Block(4, 4), nn.Dropout(0.5)).double().eval()
    with mode():
        parallel = check(model, torch.randn(4, 4, dtype=d), mesh=Mesh(dp=2, tp=2))
        records = [record_of(node) for node in parallel.program.nodes]
    assert all(r.role != "tangent" and r.phase == "forward" for r in records)
    assert {result.kind for r in records for result in r.results} == {"return"}


def test_what_a_capture_is_keyed_by() -> None:
    model = nn.Sequential(Block(4, 4), nn.Dropout(0.0))
    parallel = autopar.parallelize(model, Mesh(dp=2))
    for count, change in enumerate(
        [
            lambda: None,
            lambda: model.eval(),
            lambda: model.double(),
            lambda: torch.set_grad_enabled(False),
            lambda: model[0].up.weight.requires_grad_(False),
        ],
        start=1,
    ):
        try:
            change()
            for _ in range(2):
                parallel.simulate(torch.randn(4, 4, dtype=model[0].up.weight.dtype))
        finally:
            torch.set_grad_enabled(True) if count > 4 else None
        assert parallel.captures == count
    parallel.simulate(torch.randn(6, 4, dtype=d))
    assert parallel.captures == 6


def test_another_default_dtype_is_another_capture() -> None:
    """Forward makes tensors of it."""

    class Made(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.float() * torch.full((), 1.1)

    parallel, x = autopar.parallelize(Made(), Mesh(dp=2)), torch.randn(4, 4)
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            assert torch.equal(parallel.simulate(x), Made()(x))
    finally:
        torch.set_default_dtype(before)
    assert parallel.captures == 2


class Running(nn.Module):
    """A buffer written in place, one that is given a new tensor, one that is only read."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(4, 4)
        for name in ("seen", "last", "scale"):
            self.register_buffer(name, torch.full((4,), 2.0))

    def forward(self, x: torch.Tensor) -> Any:
        y = self.w(x) * self.scale
        self.seen.add_(y.detach().sum(0))
        self.last = y.detach().sum(0)
        return Out(y, self.seen + 0)


def kept(*things: Any) -> Iterator[torch.Tensor]:
    for thing in things:
        yield from thing.state_dict().values() if isinstance(thing, nn.Module) else flatten(thing)[0]


@pytest.mark.parametrize("model, args, states", [
    (Running, lambda: (torch.randn(4, 4, dtype=d),), {"seen", "last"}),
    (Block, lambda: (torch.randn(4, 8, dtype=d),), set()),
    (lambda: Apply(lambda y, o: y + o.h), lambda: (torch.randn(4, 4, dtype=d), Out(None, torch.randn(4, 4, dtype=d))),
     set()),
])  # fmt: skip
def test_a_run_changes_state_as_eager_and_nothing_else(model: Any, args: Any, states: set[str]) -> None:
    """Thrice, backward included: no argument, parameter or other buffer gets another value, or another version."""
    model, args = model().double(), args()
    eager, parallel = (
        copy.deepcopy(model),
        autopar.parallelize(model, Mesh(dp=2, tp=2), COLUMN_ROW if isinstance(model, Block) else None),
    )
    for _ in range(3):
        fixed = [t for t in kept(args) if isinstance(t, torch.Tensor)] + [
            t for n, t in model.state_dict(keep_vars=True).items() if n not in states
        ]
        before = [(t, t.clone(), t._version) for t in fixed]
        outputs = parallel.simulate(*args)
        same(outputs, eager(*args))
        (outputs.loss if isinstance(outputs, Out) else outputs).sum().backward()
        assert all(torch.equal(t, value) and t._version == version for t, value, version in before)
        for ours, theirs in zip(kept(model), kept(eager), strict=True):
            assert relative(ours, theirs) <= TOLERANCE


class Cut(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.tensor(min(x.shape[1], 3))
        return x[:, 0 * first : first + 1] * 2


def test_constants_stay_known() -> None:
    """Nothing that makes or views a constant is taken apart, so that a number can be read from it."""
    x = torch.randn(4, 8)
    assert torch.equal(autopar.parallelize(Cut(), Mesh(dp=2)).simulate(x), Cut()(x))


# -- an index by all rows, in their order ------------------------------------------------------------------------------

LOOKS = {  # how a mask of 4 rows of 6 is looked into → whether the rows are those of the batch, each where it is
    "rows and places": (lambda m, r, k: m[r[:, None, None, None], k[None, None, None]], True),
    "rows and as many places": (lambda m, r, k: m[r[:, None], k[None, :4]], True),
    "three indices": (
        lambda m, r, k: m[..., None][r[:, None, None], k[None, :, None], torch.zeros(1, dtype=torch.int64)],
        True,
    ),
    "rows and places of each": (lambda m, r, k: m[r[:, None], (k[None] + r[:, None]) % 6], False),
    "rows beside places": (lambda m, r, k: m[r, k[:4]], False),
    "rows last": (lambda m, r, k: m[r[None], k[:, None]], False),
    "some rows": (lambda m, r, k: m[r[:2, None], k[None]], False),
    "rows from the second": (lambda m, r, k: m[(r[:, None] + 1) % 4, k[None]], False),
}


@pytest.mark.parametrize("name", LOOKS)
def test_an_index_by_all_rows_is_none(name: str) -> None:
    """It gives what it gives, and where rows are looked into where they are, nothing is gathered."""
    look, own = LOOKS[name]

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

        def forward(self, m: torch.Tensor) -> torch.Tensor:
            return look(m, torch.arange(len(m)), torch.arange(6)) * self.scale

    model, m = Looks(), torch.randn(4, 6, dtype=torch.float64)
    parallel = autopar.parallelize(model, autopar.Mesh(dp=2), {"m": ("dp", None)})
    assert torch.equal(parallel.simulate(m), model(m))
    forward = str(parallel.program).partition("backward:")[0]
    assert ("[None, " in forward) == own
    assert ("all_gather(" not in forward) == own, forward
