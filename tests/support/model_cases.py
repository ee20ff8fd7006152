"""A model as text on a mesh: simulated ranks against eager, and what came of it."""

from __future__ import annotations

import linecache
import math
import pprint
import random
import re
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from payload_mutations import accepted

import autopar
from autopar import Mesh
from autopar.errors import AutoparError, CaptureError, PlanError, RuleError
from autopar.ir.structure import flatten
from autopar.ir.transfers import BY_FUNCTION

TOLERANCE = 1e-10
FILE = "model_of_case.py"  # whose lines refusals quote
FAILED = "failed"
OTHER = "other numbers"  # how the reason begins where one device has others
SMALL = 1e-4  # what is smaller than this altogether is compared to it, since sums that are zero are so but for rounding

HEAD = """import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass
class Out:
    first: Any
    second: Any = None


def real(*shape, grad=False):
    return torch.randn(shape, dtype=torch.float64).requires_grad_(grad)


def whole(low, high, *shape):
    return torch.randint(low, high, shape)


def truth(*shape):
    return torch.rand(shape) < 0.5


def shaped(low, high, *shape):
    return low + (high - low) * torch.rand(shape, dtype=torch.float64)


def turned(*shape, grad=False):  # not contiguous
    return real(*shape).transpose(0, -1).contiguous().transpose(0, -1).requires_grad_(grad)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3 * 0.1

    @staticmethod
    def backward(ctx, gradient):
        return 0.3 * ctx.saved_tensors[0] ** 2 * gradient

"""


@dataclass(frozen=True)
class Case:
    """One model, mesh, plan and way to call it; its repr is what a test of it says.

    Attributes:
        lines: of forward.
        result: the expression that forward returns.
        inputs: name → the expression that makes it.
        init: lines of ``__init__``.
        keywords: the inputs passed by keyword.
        loss: ``"weights"``, each element of the outputs has its own; or ``"sum"``, so that gradients arrive expanded.
        given: the positions of outputs that the loss is of; all where it is ``None``.
        options: of ``parallelize``.
        changes: what is done to the model's Python attributes before the second call, the third, …
        shapes: value → an input that could stand in its place, for making the case smaller.
    """

    lines: tuple[str, ...]
    result: str
    inputs: Mapping[str, str]
    mesh: Mapping[str, int]
    plan: Any = None
    init: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    training: bool = True
    grad: bool = True
    calls: int = 1
    loss: str = "weights"
    given: tuple[int, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    changes: tuple[str, ...] = ()
    shapes: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def source(self) -> str:
        """The model and its arguments, as code."""
        init = "".join(f"        {line}\n" for line in self.init)
        forward = "".join(f"        {line}\n" for line in (*self.lines, f"return {self.result}"))
        inputs = "".join(f"        {name}={text},\n" for name, text in self.inputs.items())
        return (
            f"{HEAD}\nclass Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n{init}\n"
            f"    def forward(self, {', '.join(self.inputs)}):\n{forward}\n\ndef arguments():\n    return "
            f"dict(\n{inputs}    )\n"
        )

    def script(self) -> str:
        """All of it, to be run by itself."""
        options = "".join(f", {key}={value!r}" for key, value in self.options.items())
        call = "parallel.simulate(**arguments())"
        notes = [f"training={self.training}"] * (not self.training) + ["under no_grad"] * (not self.grad)
        notes += [f"{self.calls} calls"] * (self.calls > 1) + [f"the loss is of the outputs {self.given}"] * (
            self.given is not None
        )
        return (
            f"{self.source()}\n\nimport autopar\n\ntorch.manual_seed(0)\nmodel = "
            f"Model().double(){'' if self.training else '.eval()'}\n"
            f"mesh = autopar.Mesh({dict(self.mesh)})\nplan = {pprint.pformat(self.plan, width=120, sort_dicts=False)}\n"
            f"parallel = autopar.parallelize(model, mesh, "
            f"plan{options})\nprint({call}){'  # ' + ', '.join(notes) if notes else ''}\n"
            + "".join(f"self = model\n{change}\nprint({call})\n" for change in self.changes[: self.calls - 1])
        )

    def literal(self) -> str:
        """Only what is not by default."""
        default = Case((), "", {}, {})
        said = {key: getattr(self, key) for key in self.__dataclass_fields__ if key != "shapes"}
        shown = [
            f"{key}={value!r}"
            for key, value in said.items()
            if key in ("lines", "result", "inputs", "mesh") or value != getattr(default, key)
        ]
        return f"Case({', '.join(shown)})"


@dataclass(frozen=True)
class Outcome:
    """``kind`` is equal, refused, failed, sensitive (rounding alone changes the numbers as much) or invalid (eager
    raises); ``reason`` is alike for like cases. ``ops`` are the overloads of the program, ``whole`` those without a
    rule, ``tried`` those whose rule was found by running them; ``transfers`` what was inserted."""

    kind: str
    reason: str = ""
    text: str = ""
    ops: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    tried: frozenset[str] = frozenset()
    transfers: tuple[str, ...] = ()
    seconds: float = 0.0


class Made:
    """The model and arguments of a case, made anew each time from one seed."""

    def __init__(self, case: Case) -> None:
        self.case = case
        source = case.source()
        linecache.cache[FILE] = (len(source), None, source.splitlines(keepends=True), FILE)
        self.scope: dict[str, Any] = {}
        exec(compile(source, FILE, "exec"), self.scope)

    def model(self) -> torch.nn.Module:
        torch.manual_seed(0)
        return self.scope["Model"]().double().train(self.case.training)

    def arguments(self, call: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        torch.manual_seed(1 + call)
        made = self.scope["arguments"]()
        keywords = {name: made.pop(name) for name in self.case.keywords}
        return tuple(made.values()), keywords


def loss_of(leaves: Sequence[Any], given: Sequence[int] | None, kind: str = "weights") -> torch.Tensor | None:
    """A scalar that the given outputs take part in."""
    terms = []
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and (given is None or position in given):
            flat = (torch.view_as_real(leaf) if leaf.is_complex() else leaf).double().reshape(-1)
            if kind == "sum":
                terms.append((leaf.real if leaf.is_complex() else leaf).sum().double())
                continue
            terms.append((flat * torch.linspace(0.5, 1.5, flat.numel(), dtype=torch.float64)).square().sum())
    return sum(terms[1:], terms[0]) if terms else None


def numbers(made: Made, model: torch.nn.Module, call: Callable[..., Any], noise: float = 0.0) -> dict[str, Any]:
    """All that a step shows: outputs and their structure, gradients, buffers."""
    found: dict[str, Any] = {}
    _disturb([*model.parameters(), *model.buffers()], noise)
    for k in range(made.case.calls):
        if 0 < k <= len(made.case.changes):
            exec(made.case.changes[k - 1], {"self": model})
        args, kwargs = made.arguments(k)
        tensors = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        _disturb(tensors, noise)
        torch.manual_seed(100 + k)
        with torch.set_grad_enabled(made.case.grad):
            leaves, found[f"the structure of call {k}"] = flatten(call(*args, **kwargs))
        for position, leaf in enumerate(leaves):
            tensor = isinstance(leaf, torch.Tensor)
            found[f"output {position} of call {k}"] = leaf.detach().clone() if tensor else leaf
            # else an argument itself
            found[f"requires_grad of output {position} of call {k}"] = tensor and leaf.requires_grad and made.case.grad
        loss = loss_of(leaves, made.case.given, made.case.loss) if made.case.grad else None
        if loss is not None:
            loss.backward()
        found |= {
            f"the gradient of input {position} of call {k}": t.grad for position, t in enumerate(tensors) if t.is_leaf
        }
    found |= {f"the gradient of {name}": p.grad for name, p in model.named_parameters()}
    return found | {f"the buffer {name}": b for name, b in model.named_buffers()}


def _disturb(tensors: Sequence[torch.Tensor], noise: float) -> None:
    with torch.no_grad():
        for tensor in tensors if noise else ():
            if tensor.is_floating_point():
                tensor.mul_(1 + noise * torch.randn_like(tensor))


def distance(ours: Any, theirs: Any) -> float:
    """Largest difference relative to the largest value; infinite where they are not of one kind."""
    if not (isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor)):
        return 0.0 if not isinstance(ours, torch.Tensor) and ours == theirs else math.inf
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return math.inf
    if not theirs.numel():
        return 0.0
    if not (theirs.is_floating_point() or theirs.is_complex()):
        return 0.0 if torch.equal(ours, theirs) else 1.0
    ours, theirs = ours.detach(), theirs.detach()
    odd = ~theirs.isfinite()
    if odd.any():
        if not torch.equal(ours[odd].nan_to_num(0.125), theirs[odd].nan_to_num(0.125)):
            return math.inf
        ours, theirs = ours[~odd], theirs[~odd]
        if not theirs.numel():
            return 0.0
    far = float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(SMALL))
    far = math.inf if math.isnan(far) else far
    return far * 1e-6 if theirs.dtype in (torch.float32, torch.complex64) else far


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any], tolerance: float = TOLERANCE) -> dict[str, float]:
    found = {what: distance(ours[what], theirs[what]) if what in ours else math.inf for what in theirs}
    return {what: far for what, far in found.items() if far > tolerance}


def check(case: Case, mutations: int = 0) -> Outcome:
    """Run a case on one device and on the simulated ranks.

    Args:
        mutations: of what the local programs' collectives send so many things are changed on one rank, each of which is
            to be refused.
    """
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = _check(case, mutations)
    return replace(outcome, seconds=time.perf_counter() - start)


def _check(case: Case, mutations: int) -> Outcome:
    try:
        made = Made(case)
        model = made.model()
        expected = numbers(made, model, model)
    except Exception as error:
        return Outcome("invalid", type(error).__name__, str(error))
    parallel = None
    try:
        model = made.model()
        parallel = autopar.parallelize(model, Mesh(dict(case.mesh)), case.plan, **case.options)
        found = numbers(made, model, parallel.simulate)
    except (PlanError, CaptureError, RuleError) as error:
        lacks = lacking(error)
        reason = " ".join(_without_names(str(error).splitlines()[0]).split()[:9])
        if lacks:
            return Outcome(FAILED, f"an unclear {type(error).__name__}, {lacks}: {reason}", str(error))
        return Outcome("refused", f"{type(error).__name__}: {reason}", str(error))
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        own = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if "autopar" in frame.filename or "/passes/" in frame.filename
        ]
        at = own[-1] if own else where
        said = _without_names((str(error).splitlines() or [""])[0])[:90]
        reason = f"{type(error).__name__} in {at.filename.rsplit('/', 1)[-1]} {at.name}: {said}"
        return Outcome(FAILED, reason, "".join(traceback.format_exception(error, limit=-12)))
    targets = {
        node.target for node in parallel.program.nodes if isinstance(node.target, torch.ops.aten.add.Tensor.__class__)
    }
    ops = frozenset(map(str, targets))
    notes = [note for report in parallel.reports for note in report.notes if "has no sharding rule" in note]
    whole = frozenset(note.split()[0] for note in notes if "computes all of it" in note)
    tried = frozenset(note.split()[0] for note in notes) - whole
    inserted = tuple(BY_FUNCTION[node.target].name for node in parallel.program.nodes if node.target in BY_FUNCTION)
    wrong = differences(found, expected)
    if wrong and (excess := _beyond_rounding(made, expected, wrong)):
        what = max(excess, key=excess.__getitem__)
        text = "\n".join(f"{w}: {f:.3g}" for w, f in excess.items())
        return Outcome(FAILED, f"{OTHER}: {_without_names(what)}", text, ops, whole, tried, inserted)
    if mutations:
        programs = {rank: parallel.local(rank) for rank in parallel.mesh.ranks}
        if missed := accepted(programs, mutations, random.Random(repr(case))):
            return Outcome(
                FAILED,
                f"a change of a payload is accepted: {_without_names(missed[0])}",
                "\n".join(missed),
                ops,
                whole,
                tried,
                inserted,
            )
    return Outcome("sensitive" if wrong else "equal", ops=ops, whole=whole, tried=tried, transfers=inserted)


def _beyond_rounding(made: Made, expected: Mapping[str, Any], wrong: Mapping[str, float]) -> dict[str, float]:
    """What is still wrong where the changes that rounding makes are allowed for, a thousand times those of noise in the
    last digit."""
    moved = dict.fromkeys(wrong, 0.0)
    for _ in range(3):
        model = made.model()
        for what, far in differences(numbers(made, model, model, noise=1e-14), expected, 0.0).items():
            if what in moved:
                moved[what] = max(moved[what], far)
    return {what: far for what, far in wrong.items() if far > 1e3 * moved[what]}


def _without_names(text: str) -> str:
    return re.sub(r"\d+", "N", text)


def lacking(error: AutoparError) -> str:
    """What a refusal does not say: the user's line or the name, and the remedy; "" where it says all."""
    text = str(error)
    named = (
        FILE in text
        or isinstance(error, PlanError)
        or re.search(r"\b(argument|buffer|attribute|keeps a tensor in|checkpoints with)\b", text)
    )
    if not named:
        return "without the user's line"
    return "" if len(text.splitlines()) > 1 or ";" in text else "without a remedy"
