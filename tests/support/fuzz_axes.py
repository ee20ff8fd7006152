"""Give random cases what reports of others were about: one axis of the fuzzer is one kind of addition to a case."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from model_cases import Case

NAMES = ("step", "scale", "losses", "count")


def _real(case: Case) -> str | None:
    """The latest value of forward that is a plain real tensor."""
    fits = [name for name, made in case.shapes.items() if made.startswith(("real(", "shaped(")) and name in case.result]
    return fits[-1] if fits else None


def _with(case: Case, value: str, lines: tuple[str, ...], result: str, init: tuple[str, ...] = ()) -> Case:
    return replace(case, lines=(*case.lines, *lines), result=f"[{case.result}, {result}]", init=(*case.init, *init),
                   given=None)  # fmt: skip


def _statistic(case: Case, value: str, r: random.Random) -> Case:
    """A comparison of a value with a statistic of itself; reductions add in random orders."""
    of = r.choice(["max()", "min()", "amax(-1, keepdim=True)", "amin(0, keepdim=True)", "median()",
                   "aminmax(dim=0, keepdim=True).max"])  # fmt: skip
    sign = r.choice(["==", ">=", "<="])
    return _with(case, value, (f"z = torch.tanh({value}) * 1.5", f"y = torch.where(z {sign} z.{of}, z, z * 0.5)"), "y")


def _mask(case: Case, value: str, r: random.Random) -> Case:
    """Rows that a mask chooses get the values of a tensor."""
    mask = f"z.detach(){r.choice(['.sum(-1)', '[..., 0]', ''])} > {r.choice(['0.1', '-0.2'])}"
    token = r.choice(["self.token", "self.token * 2", "z.mean()"])
    return _with(case, value, (f"z = {value}[None] * 1.0", f"m = {mask}", f"z[m] = {token}"), "z",
                 ("self.token = nn.Parameter(torch.tensor(0.3))",))  # fmt: skip


def _empty(case: Case, value: str, r: random.Random) -> Case:
    """A parameter without elements."""
    line = r.choice(["y = x @ self.down @ self.up", "y = x + self.none.sum()", "y = torch.cat([x, x @ self.down], -1)"])
    init = ("self.down = nn.Parameter(torch.randn(3, 0))", "self.up = nn.Parameter(torch.randn(0, 3))",
            "self.none = nn.Parameter(torch.empty(0))")  # fmt: skip
    return _with(case, value, (f"x = {value}.sum() * torch.ones(4, 3, dtype={value}.dtype)", line), "y", init)


def _count(case: Case, value: str, r: random.Random) -> Case:
    """A sum over a count that is passed in."""
    counted = _with(case, value, (f"y = {value}.square().sum() / n",), "y")
    return replace(counted, inputs={**case.inputs, "n": r.choice(["7.0", "torch.tensor(7.0, dtype=torch.float64)"])},
                   keywords=(*case.keywords, "n"))  # fmt: skip


def _writes(case: Case, value: str, r: random.Random) -> Case:
    """Parameters that are written between calls."""
    change = r.choice(["self.w.data.mul_(2)", "self.w.data.fill_(0.5)", "self.w.data[0] = 3.0", "self.w.data.zero_()"])
    written = _with(case, value, (f"y = {value}.sum() * self.w",), "y", ("self.w = nn.Parameter(torch.randn(4))",))
    return replace(written, calls=3, changes=(change, r.choice([change, "self.w.data.add_(1)"])))


def _generator(case: Case, value: str, r: random.Random) -> Case:
    """Forward draws from a generator of its own, which is refused."""
    made = r.choice(['__import__("numpy").random.default_rng(0)', '__import__("random").Random(0)'])
    drawn = _with(case, value, (f"y = {value} * self.rng.random()",), "y", (f"self.rng = {made}",))
    return replace(drawn, calls=2)


def _globals(case: Case, value: str, r: random.Random) -> Case:
    """An attribute with the name of a global that changes between calls."""
    name = r.choice(NAMES)
    changed = _with(case, value, (f"y = {value} * self.{name}",), "y", (f"self.{name} = 2.0",))
    return replace(changed, calls=3, changes=tuple(f"import builtins; builtins.{name} = {k}" for k in (3, 5)))


AXES: dict[str, Callable[[Case, str, random.Random], Case]] = {
    "statistic": _statistic, "mask": _mask, "empty": _empty, "count": _count, "writes": _writes, "globals": _globals,
    "generator": _generator,
}  # fmt: skip


def on_axis(axis: str, case: Case, r: random.Random) -> Case | None:
    """The case with the addition of an axis; ``None`` where it has no value to which it can be added."""
    value = _real(case)
    return None if value is None else AXES[axis](case, value, r)
