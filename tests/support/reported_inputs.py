"""Inputs on which comparable systems were wrong or failed, small enough to train in every setting.

Each input is a part of one small model, which trains for three steps of SGD on a mesh of three axes, on stages, in
micro-batches, compiled, and with a piece of the batch on each rank; its losses and parameters are those of one device,
or it is refused.
"""

from __future__ import annotations

import copy
import math
import random
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from equality import relative
from torch import distributed, nn
from torch.nn import functional

import autopar
from autopar import Mesh

scale = 0  # a global with the name of an attribute that a forward reads
START = time.time()
MOST = 1e-9
WIDE, STEPS = 12, 3


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h * self.scale


class Draws(nn.Module):
    """Its own generator is advanced by each call."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = numpy.random.default_rng(0)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h * self.rng.uniform()


class Shuffles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(0)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h * self.rng.random()


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turns = iter(range(1, 1000))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h * next(self.turns)


class Clock(nn.Module):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h * (time.time() - START)


class Empty(nn.Module):
    """An adapter of rank 0, and a parameter without numbers."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that there is nothing to initialise
            self.down, self.up = nn.Linear(WIDE, 0), nn.Linear(0, WIDE)
        self.nothing = nn.Parameter(torch.empty(0))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.up(self.down(h)) + self.nothing.sum()


class Masked(nn.Module):
    """Rows that a mask names become a token, as in BERT; and one column of them."""

    def __init__(self, column: bool = False) -> None:
        super().__init__()
        self.token, self.column = nn.Parameter(torch.randn(WIDE)), column

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        h, mask = h.clone(), h[:, 0] > 0
        if self.column:
            h[mask, 0] = self.token[0]
        else:
            h[mask] = self.token
        return h


class Indexed(nn.Module):
    """A row and a column whose numbers are in a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, WIDE))
        self.register_buffer("index", torch.tensor(3))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h * self.table[self.index] + h[:, self.index][:, None]


class Chosen(nn.Module):
    """A function of the rows that a mask chooses."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.function(h[h[:, 0] > 0])


class Constant(nn.Module):
    """A mask that is a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.arange(WIDE) % 3 == 0)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + h[:, self.mask].sum(1, keepdim=True)


class Classes(nn.Module):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + functional.one_hot((h > 0).long().sum(1)).to(h.dtype).sum(1, keepdim=True)


class Bins(nn.Module):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + torch.bincount((h > 0).long().sum(1), minlength=WIDE + 1)[:WIDE].to(h.dtype)


class Equal(nn.Module):
    """Compares a value with a statistic of itself: one value must have one bit pattern."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return torch.where(h == h.amax(1, keepdim=True), h * 3, h) + (h >= h.median(1, keepdim=True).values) * h


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDE, WIDE) / WIDE**2)  # so that the training does not diverge

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return (h @ self.weight * 2j).abs() + (h / 2j).imag


class Framed(nn.Module):
    """The part between two layers; the loss is a mean."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.up, self.part, self.down = nn.Linear(8, WIDE), part, nn.Linear(WIDE, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.part(self.up(x).tanh())).square().mean()


class Summed(Framed):
    """The loss is a sum over a count that the model holds, or is passed."""

    def forward(self, x: torch.Tensor, count: float = 8.0) -> torch.Tensor:
        return self.down(self.part(self.up(x).tanh())).square().sum() / count


@dataclass(frozen=True)
class Input:
    """The number of its kind, what it is, and its part of the model."""

    kind: int
    what: str
    part: Callable[[], nn.Module]
    frame: type[Framed] = Framed

    def make(self) -> nn.Module:
        return self.frame(self.part())


def together(names: Sequence[str]) -> Callable[[], nn.Module]:
    """A model of several inputs, one after the other."""
    return lambda: Framed(nn.Sequential(*(INPUTS[name].part() for name in names)))


INPUTS: dict[str, Input] = {
    "named": Input(1, "a global with the name of an attribute", Named),
    "numpy": Input(2, "a generator of numpy", Draws),
    "random": Input(2, "a generator of random", Shuffles),
    "iterator": Input(2, "next of an iterator", Counts),
    "clock": Input(2, "time.time()", Clock),
    "between": Input(3, "values read and written between calls (also 4)", nn.Identity),
    "sum": Input(8, "a sum over a count", nn.Identity, Summed),
    "empty": Input(9, "an adapter of rank 0, a parameter without numbers", Empty),
    "mask": Input(10, "h[mask] = token", Masked),
    "column": Input(10, "h[mask, 0] = token[0]", lambda: Masked(True)),
    "index": Input(11, "table[t], h[:, t] with a 0-d tensor", Indexed),
    "constant": Input(11, "a constant boolean mask", Constant),
    "norm": Input(11, "norm of chosen rows", lambda: Chosen(torch.norm)),
    "logsumexp": Input(11, "logsumexp of chosen rows", lambda: Chosen(lambda h: h.logsumexp(0))),
    "one_hot": Input(11, "one_hot without classes", Classes),
    "bincount": Input(11, "bincount with minlength", Bins),
    "equal": Input(13, "h == h.amax(), h >= h.median()", Equal),
    "complex": Input(14, "a complex factor and divisor", Complex),
    "plain": Input(15, "two layers in pieces over tp, with biases", nn.Identity),
}
# those that have the values of one device in all settings; tests train them together
RIGHT = ("named", "between", "mask", "column", "index", "equal", "sum", "empty", "complex")
REFUSED = ("numpy", "random", "iterator", "clock")  # those that a capture cannot keep, in all settings
TENSOR = {"*up.weight": ("tp", None), "*down.weight": (None, "tp")}
BIAS = {"*up.bias": ("tp",)}


@dataclass(frozen=True)
class Setting:
    """How an input is trained; on as many processes as ``ranks``, or simulated where it is 0."""

    mesh: Mapping[str, int]
    plan: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    step: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 0


AXES = {"pod": 2, "dp": 2, "tp": 2}
SETTINGS: dict[str, Setting] = {
    "three axes": Setting(AXES, {"x": (("pod", "dp"), None)} | TENSOR | BIAS),
    "across": Setting(AXES, {"x": (("pod", "dp"), None)} | TENSOR, {"overlap": "today"}, {"across": True}),
    "stages": Setting({"pp": 2, "dp": 2}, None, {}, {"schedule": "1f1b", "microbatches": 2}),
    "micro-batches": Setting({"dp": 2}, "ddp", {}, {"microbatches": 2}),
    "compile": Setting({"dp": 1}, "ddp", {"compile": True}),
    "on processes": Setting({"pp": 2}, None, {}, {"schedule": "1f1b", "microbatches": 2}, ranks=2),
    "local": Setting({"dp": 2}, "ddp", {"inputs": "local"}, ranks=2),
}


def rows(k: int) -> torch.Tensor:
    return torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(k))


def trained(make: Callable[[], nn.Module], setting: Setting) -> Any:
    """Train on the mesh and on one device, and compare. Returns the step."""
    global scale
    torch.manual_seed(0)
    model = make().double()
    single = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(setting.mesh), setting.plan, cache=False, **setting.options)
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1), **setting.step)
    optimizer = torch.optim.SGD(single.parameters(), lr=0.1)
    for k in range(STEPS):
        scale = k
        x = rows(k)
        loss = _stepped(step, x, setting)
        optimizer.zero_grad()
        wanted = single(x)
        wanted.backward()
        optimizer.step()
        assert relative(loss.double(), wanted) <= MOST, f"loss {float(loss)} beside {float(wanted)}"
    step.finish()
    ours = dict((parallel if setting.ranks else model).named_parameters())
    for name, theirs in single.named_parameters():
        assert abs(ours[name].detach().norm().item() - theirs.detach().norm().item()) <= MOST, name
        assert not bool(ours[name].isnan().any())
        if not setting.ranks or "pp" not in setting.mesh:  # else a rank may hold nothing of it
            own: Any = ours[name].detach()
            whole = own.full_tensor() if setting.ranks else own
            assert relative(whole, theirs.detach()) <= MOST, name
    for either in (parallel if setting.ranks else model, single):
        torch.manual_seed(7)
        nn.init.normal_(either.get_parameter("up.weight"))
    assert relative(_stepped(step, x, setting).double(), single(x)) <= MOST, "the loss after a parameter was written"
    step.finish()
    assert step.captures == 1
    return step


def _stepped(step: Any, x: torch.Tensor, setting: Setting) -> torch.Tensor:
    if setting.options.get("inputs") == "local":
        x = x.chunk(setting.ranks)[distributed.get_rank()]
    alone = not setting.ranks and math.prod(setting.mesh.values()) > 1
    loss: torch.Tensor = (step.simulate if alone else step)(x)
    return loss.detach()


def verdict(name: str, setting: str) -> str:
    """What becomes of an input: ``equal``, ``refused``, or what is wrong."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            trained(INPUTS[name].make, SETTINGS[setting])
        except autopar.CaptureError as error:
            return f"refused: {' '.join(str(error).split())}"
        except AssertionError as error:
            said = [str(warning.message) for warning in seen if "micro-batches" in str(warning.message)]
            return f"warned: {' '.join(said[0].split())}" if said else f"WRONG: {error}"
        except Exception as error:
            return f"failed: {type(error).__name__}: {' '.join(str(error).split())}"
    return f"warned: {' '.join(str(seen[0].message).split())}" if seen else "equal"


def verdicts(names: list[str], setting: str) -> dict[str, str]:
    return {name: verdict(name, setting) for name in names}
