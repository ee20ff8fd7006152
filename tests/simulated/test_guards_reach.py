"""Whatever way forward reaches a Python value: where it has changed, a call captures anew, and gives the numbers of
eager."""

from __future__ import annotations

import array
import collections
import cProfile
import functools
import importlib
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import guards_imported as helpmod
import numpy as np
import pytest
import torch
from equality import TOLERANCE, relative
from torch import nn

import autopar
from autopar import Mesh

d = torch.float64
# each is read by one case, so that cases can lie in one model
BY_METHOD = BY_AUTOGRAD = BY_BACKWARD = BY_HOOK = BY_PARTIAL = BY_PROPERTY = BY_LIST = BY_DICT = 2.0
HERE = sys.modules[__name__]
Code = Callable[["Reader", torch.Tensor], torch.Tensor]


class Ops:
    K = 2.0

    @staticmethod
    def scale(h: torch.Tensor) -> torch.Tensor:
        return h * BY_METHOD

    @classmethod
    def times(cls, h: torch.Tensor) -> torch.Tensor:
        return h * cls.K


class Fn(torch.autograd.Function):
    """Both its forward and its backward read a global; the second cannot be told from the loss."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
        return h * BY_AUTOGRAD

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * BY_AUTOGRAD * 3


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
        return h * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * BY_BACKWARD


class Cfg:
    beta = 2.0
    inner = types.SimpleNamespace(b=2.0)


class Value:
    """A config object."""

    def __init__(self) -> None:
        self.b = 2.0

    @property
    def computed(self) -> float:
        return self.b * BY_PROPERTY

    def scale(self, h: torch.Tensor) -> torch.Tensor:
        return h * self.b


class Other(Value):
    def scale(self, h: torch.Tensor) -> torch.Tensor:
        return h * 7.0


class ODict(dict[str, float]):
    beta = 2.0


def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * BY_HOOK


def keyed(h: torch.Tensor, k: float = 2.0) -> torch.Tensor:
    return h * k * BY_PARTIAL


def with_attribute(h: torch.Tensor) -> torch.Tensor:
    return h * with_attribute.k


def with_default(h: torch.Tensor, k: float = 2.0) -> torch.Tensor:
    return h * k


def with_keyword(h: torch.Tensor, *, k: float = 2.0) -> torch.Tensor:
    return h * k


def with_object(h: torch.Tensor, value: Value = Value()) -> torch.Tensor:  # noqa: B008
    return h * value.b


def closing_over(value: Any) -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[Any], None]]:
    def function(h: torch.Tensor) -> torch.Tensor:
        return h * value

    def change(now: Any) -> None:
        nonlocal value
        value = now

    return function, change


class Meta(type):
    gain = 2.0


class OfMeta(metaclass=Meta):
    pass


LOCAL, SHARED = threading.local(), Value()
LOCAL.b = 2.0
FOUND_BY_NAME = {"scale": lambda h: h * BY_DICT}

INSIDE = {"b": 2.0}


class Held:
    """Holds functions where nothing looks for them."""

    __slots__ = ("functions",)


HELD = Held()


class Reader(nn.Module):
    """A layer and some code."""

    GAIN = 2.0

    def __init__(self, code: Code, **attributes: Any) -> None:
        super().__init__()
        self.l, self.act, self.code = nn.Linear(4, 4, dtype=d), nn.Identity(), code
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.code(self, self.act(self.l(x))).square().mean()


def hooked() -> Reader:
    model = Reader(lambda m, h: h)
    model.act.register_forward_hook(hook)
    return model


def nested(value: Any, levels: int) -> Any:
    for _ in range(levels):
        value = [value]
    return value


def innermost(value: Any) -> Any:
    while isinstance(value, list):
        value = value[0]
    return value


def closed() -> Reader:
    HELD.functions = [closing_over(2.0)]
    return Reader(lambda m, h: next(iter(HELD.functions))[0](h))


def set_global(name: str) -> Callable[[Reader], None]:
    return lambda model: setattr(HERE, name, 5.0)


def another_scale(h: torch.Tensor) -> torch.Tensor:
    return h * 9.0


CASES: dict[str, tuple[Callable[[], Reader], Callable[[Reader], Any]]] = {
    "a module's function that reads its "
    "global": (lambda: Reader(lambda m, h: helpmod.scale(h)), lambda m: setattr(helpmod, "BETA", 5.0)),
    "a module's function that is "
    "replaced": (lambda: Reader(lambda m, h: helpmod.scale(h)), lambda m: setattr(helpmod, "scale", another_scale)),
    "a module's global": (lambda: Reader(lambda m, h: h * helpmod.BETA), lambda m: setattr(helpmod, "BETA", 5.0)),
    "a class of a "
    "module": (lambda: Reader(lambda m, h: h * helpmod.Options.gain), lambda m: setattr(helpmod.Options, "gain", 5.0)),
    "a static method that reads a global": (lambda: Reader(lambda m, h: Ops.scale(h)), set_global("BY_METHOD")),
    "a static method that is "
    "replaced": (lambda: Reader(lambda m, h: Ops.scale(h)),
                 lambda m: setattr(Ops, "scale", staticmethod(another_scale))),
    "a class method that reads an "
    "attribute": (lambda: Reader(lambda m, h: Ops.times(h)), lambda m: setattr(Ops, "K", 3.0)),
    "a function of autograd": (lambda: Reader(lambda m, h: Fn.apply(h)), set_global("BY_AUTOGRAD")),
    "the backward of a function of "
    "autograd": (lambda: Reader(lambda m, h: Backward.apply(h)), set_global("BY_BACKWARD")),
    "a class as config": (lambda: Reader(lambda m, h: h * m.cfg.beta, cfg=Cfg), lambda m: setattr(Cfg, "beta", 3.0)),
    "a class as config, by a "
    "name": (lambda: Reader(lambda m, h: h * getattr(m.cfg, "beta"), cfg=Cfg),  # noqa: B009
             lambda m: setattr(Cfg, "beta", 3.0)),
    "an object of a class as "
    "config": (lambda: Reader(lambda m, h: h * m.cfg.inner.b, cfg=Cfg), lambda m: setattr(Cfg.inner, "b", 3.0)),
    "a module as "
    "config": (lambda: Reader(lambda m, h: h * m.cfg.BETA, cfg=helpmod), lambda m: setattr(helpmod, "BETA", 4.0)),
    "an attribute of the type": (lambda: Reader(lambda m, h: h * type(m).GAIN), lambda m: setattr(Reader, "GAIN", 3.0)),
    "an attribute of "
    "__class__": (lambda: Reader(lambda m, h: h * m.__class__.GAIN), lambda m: setattr(Reader, "GAIN", 3.0)),
    "a hook that reads a global": (hooked, set_global("BY_HOOK")),
    "a partial whose function reads a "
    "global": (lambda: Reader(lambda m, h: m.g(h), g=functools.partial(keyed, k=1.0)), set_global("BY_PARTIAL")),
    "a partial's "
    "keywords": (lambda: Reader(lambda m, h: m.g(h), g=functools.partial(keyed, k=1.0)),
                 lambda m: m.g.keywords.update(k=5.0)),
    "a partial's "
    "object": (lambda: Reader(lambda m, h: m.g(h), g=functools.partial(with_object, value=Value())),
               lambda m: setattr(m.g.keywords["value"], "b", 5.0)),
    "an object far back in a "
    "list": (lambda: Reader(lambda m, h: h * m.cs[80].b, cs=[Value() for _ in range(100)]),
             lambda m: setattr(m.cs[80], "b", 5.0)),
    "an object deep in "
    "lists": (lambda: Reader(lambda m, h: h * innermost(m.cs).b, cs=nested(Value(), 6)),
              lambda m: setattr(innermost(m.cs), "b", 5.0)),
    "the class of a module": (lambda: Reader(lambda m, h: h), lambda m: setattr(m.act, "__class__", nn.Tanhshrink)),
    "the class of an "
    "object": (lambda: Reader(lambda m, h: m.v.scale(h), v=Value()), lambda m: setattr(m.v, "__class__", Other)),
    "a property that reads a "
    "global": (lambda: Reader(lambda m, h: h * m.v.computed, v=Value()), set_global("BY_PROPERTY")),
    "a bound method": (lambda: Reader(lambda m, h: m.g(h), g=Value().scale), lambda m: setattr(m.g.__self__, "b", 5.0)),
    "functions in a list": (lambda: Reader(lambda m, h: m.fs[0](h), fs=[lambda h: h * BY_LIST]), set_global("BY_LIST")),
    "functions in a dict that is a "
    "global": (lambda: Reader(lambda m, h: FOUND_BY_NAME["scale"](h)), set_global("BY_DICT")),
    "an attribute of a "
    "function": (lambda: Reader(lambda m, h: with_attribute(h)), lambda m: setattr(with_attribute, "k", 5.0)),
    "a "
    "default": (lambda: Reader(lambda m, h: with_default(h)), lambda m: setattr(with_default, "__defaults__", (5.0,))),
    "a default by "
    "keyword": (lambda: Reader(lambda m, h: with_keyword(h)), lambda m: with_keyword.__kwdefaults__.update(k=5.0)),
    "all defaults by "
    "keyword": (lambda: Reader(lambda m, h: with_keyword(h)),
                lambda m: setattr(with_keyword, "__kwdefaults__", {"k": 5.0})),
    "an object that is a "
    "default": (lambda: Reader(lambda m, h: with_object(h)), lambda m: setattr(with_object.__defaults__[0], "b", 5.0)),
    "a closure that is found nowhere": (closed, lambda m: HELD.functions[0][1](5.0)),
    "an attribute of a "
    "dict": (lambda: Reader(lambda m, h: h * m.c.beta, c=ODict()), lambda m: setattr(m.c, "beta", 5.0)),
    "an entry of a "
    "UserDict": (lambda: Reader(lambda m, h: h * m.c["b"], c=collections.UserDict(b=2.0)), lambda m: m.c.update(b=5.0)),
    "an entry of a "
    "ChainMap": (lambda: Reader(lambda m, h: h * m.c["b"], c=collections.ChainMap({}, {"b": 2.0})),
                 lambda m: m.c.maps[1].update(b=5.0)),
    "an entry of a "
    "UserList": (lambda: Reader(lambda m, h: h * m.c[0], c=collections.UserList([2.0])),
                 lambda m: m.c.__setitem__(0, 5.0)),
    "an entry of a mapping that is read "
    "only": (lambda: Reader(lambda m, h: h * m.c["b"], c=types.MappingProxyType(INSIDE)),
             lambda m: INSIDE.update(b=5.0)),
    "an entry of an "
    "array": (lambda: Reader(lambda m, h: h * float(m.c[0]), c=np.array([2.0, 3.0])),
              lambda m: m.c.__setitem__(0, 5.0)),
    "an entry of an array in a "
    "dict": (lambda: Reader(lambda m, h: h * float(m.c["a"][0]), c={"a": np.array([2.0])}),
             lambda m: m.c["a"].__setitem__(0, 5.0)),
    "an entry of an array of "
    "Python's": (lambda: Reader(lambda m, h: h * m.c[0], c=array.array("d", [2.0])),
                 lambda m: m.c.__setitem__(0, 5.0)),
    "a byte": (lambda: Reader(lambda m, h: h * m.c[0], c=bytearray(b"\2")), lambda m: m.c.__setitem__(0, 5)),
    "an attribute of a "
    "thread": (lambda: Reader(lambda m, h: h * LOCAL.b), lambda m: setattr(LOCAL, "b", 5.0)),
    "an object that is referred to "
    "weakly": (lambda: Reader(lambda m, h: h * m.c().b, c=weakref.ref(SHARED)), lambda m: setattr(SHARED, "b", 5.0)),
    "an attribute of a "
    "metaclass": (lambda: Reader(lambda m, h: h * OfMeta.gain), lambda m: setattr(Meta, "gain", 5.0)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def put_back() -> Any:
    """What changes change beside the model."""
    scale = vars(Ops)["scale"]
    with_attribute.k = 2.0
    yield
    importlib.reload(helpmod)
    for name in [name for name in vars(HERE) if name.startswith("BY_")]:
        setattr(HERE, name, 2.0)
    Ops.K = Cfg.beta = Cfg.inner.b = Reader.GAIN = Meta.gain = LOCAL.b = SHARED.b = 2.0
    Ops.scale = scale
    with_default.__defaults__, with_keyword.__kwdefaults__ = (2.0,), {"k": 2.0}
    with_object.__defaults__[0].b = INSIDE["b"] = 2.0


RATE = 1e-4  # so small that no step goes too far


def steps_as_eager(model: nn.Module, parallel: autopar.Parallel | None, step: Any, x: torch.Tensor) -> None:
    """Loss and parameters after a step."""
    loss = model(x)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    expected = [
        parameter.detach() - RATE * gradient for parameter, gradient in zip(model.parameters(), gradients, strict=True)
    ]
    assert parallel is None or relative(parallel.simulate(x), loss) <= TOLERANCE
    assert relative(step.simulate(x), loss) <= TOLERANCE
    assert all(
        relative(parameter, after) <= TOLERANCE for parameter, after in zip(model.parameters(), expected, strict=True)
    )


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.sweep("it is there beside others")) for case in CASES]
)
def test_what_is_changed_alone_is_captured_anew(case: str) -> None:
    build, change = CASES[case]
    model, x = build(), torch.randn(4, 4, dtype=d)
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp")
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=RATE))
    before = model(x)
    for captures in (1, 2):
        for _ in range(2):
            steps_as_eager(model, parallel, step, x)
        assert (parallel.captures, step.captures) == (captures, captures)
        if captures == 1:
            change(model)
    assert relative(model(x), before) > 1e-6


class Several(nn.Module):
    """The codes of several readers, one on what another returns."""

    def __init__(self, readers: list[Reader]) -> None:
        super().__init__()
        self.l, self.readers = nn.Linear(4, 4, dtype=d), nn.ModuleList(readers)
        for reader in readers:
            reader.l = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.l(x)
        for reader in self.readers:
            h = reader.code(reader, reader.act(h))
        return (h / 1000).square().mean()


def seen(model: Several, x: torch.Tensor) -> list[torch.Tensor]:
    """The gradient that each reader alone gives the layer."""
    return [torch.autograd.grad(reader(model.l(x)), model.l.weight)[0] for reader in model.readers]


def groups(count: int) -> list[list[str]]:
    """Cases in groups, of which each changes another thing than the others of its group."""
    alike = sorted(CASES, key=lambda case: next((k for k, words in enumerate(ALIKE) if re.search(words, case)), -1))
    return [alike[k::count] for k in range(count)]


ALIKE = ("a module's|a module as", "a static method", "a class as", "the type|__class__", "by keyword")  # change one


@pytest.mark.long
@pytest.mark.parametrize("cases", groups(7), ids=", ".join)
def test_what_is_changed_is_captured_anew(cases: list[str]) -> None:
    """One change after the other, each of what one of the readers sees."""
    model, x = Several([CASES[case][0]() for case in cases]), torch.randn(4, 4, dtype=d)
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp")
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=RATE))
    steps_as_eager(model, parallel, step, x)
    for captures, (case, reader) in enumerate(zip(cases, model.readers, strict=True), 2):
        before = seen(model, x)
        CASES[case][1](reader)
        assert [k for k, (a, b) in enumerate(zip(before, seen(model, x), strict=True)) if relative(a, b) > 1e-6] == [
            captures - 2
        ], "readers see what others change"
        for _ in range(2):
            steps_as_eager(model, None, step, x)
        assert step.captures == captures, case
    steps_as_eager(model, parallel, step, x)
    assert parallel.captures == 2


REFUSED = {
    "a module's function that reads its global": "the global BETA of guards_imported is 5.0, it was 2.0",
    "a class as config": "Cfg.beta is 3.0, it was 2.0",
    "the class of a module": "module 2 of the model is a Tanhshrink, it was a Identity",
    "a default": "the defaults of with_default is (5.0), it was (2.0)",
    "an entry of an array": "c is an ndarray with other contents, it was an ndarray",
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_change_is_refused_without_recapture(case: str) -> None:
    build, change = CASES[case]
    model, x = build(), torch.randn(4, 4, dtype=d)
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp", example=(x,), recapture=False)
    assert relative(parallel.simulate(x), model(x)) <= TOLERANCE
    change(model)
    with pytest.raises(RuntimeError) as caught:
        parallel.simulate(x)
    assert str(caught.value) == (
        f"forward was captured with other values, and recapture=False: {REFUSED[case]}; restore these values, or "
        f"allow recapture=True"
    )


def profiles_of_python() -> Any:
    calls = []
    sys.setprofile(lambda frame, event, arg: calls.append(frame.f_code.co_name))
    return lambda: (sys.setprofile(None), calls)[1]


def profiles_of_c() -> Any:
    profiler = cProfile.Profile()
    profiler.enable()

    def ended() -> list[str]:
        profiler.disable()
        return [entry.code.co_name for entry in profiler.getstats() if isinstance(entry.code, types.CodeType)]

    return ended


@pytest.mark.parametrize("begin", [profiles_of_python, profiles_of_c])
@pytest.mark.parametrize(
    "case",
    ["a static method that reads a global", "a hook that reads a global", "the backward of a function of autograd"],
)
def test_a_profiler_of_the_users_goes_on(case: str, begin: Callable[[], Any]) -> None:
    """It sees the forward of a capture and what comes after it; and guards are found."""
    build, change = CASES[case]
    model, x = build(), torch.randn(4, 4, dtype=d)
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp")
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=RATE))
    ended = begin()
    try:
        steps_as_eager(model, parallel, step, x)
        another_scale(x)
    finally:
        seen = ended()
    assert {"forward", "another_scale"} <= set(seen)
    change(model)
    steps_as_eager(model, parallel, step, x)
    assert (parallel.captures, step.captures) == (2, 2)


def test_what_forward_writes_and_what_it_makes_are_no_guards() -> None:
    """A cache of a module's, a counter of a class, an object and a function that forward makes: one capture."""

    class Counts:
        calls = 0
        cache: dict[int, float] = {}  # noqa: RUF012

    def code(model: Reader, h: torch.Tensor) -> torch.Tensor:
        Counts.calls += 1
        value, (function, _) = Value(), closing_over(3.0)
        return function(value.scale(h)) * Counts.cache.setdefault(1, 2.0)

    model, x = Reader(code), torch.randn(4, 4, dtype=d)
    parallel = autopar.parallelize(model, Mesh(dp=2))
    for _ in range(3):
        assert relative(parallel.simulate(x), model(x)) <= TOLERANCE
    assert parallel.captures == 1
