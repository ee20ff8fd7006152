"""Record where each captured node comes from: module path, the user's source line, phase.

make_fx records none of these. A dispatch mode sees every op before it becomes a node. In forward it notes the module
that is running and the user's innermost line. In backward it takes what it noted for the forward op with the same
autograd sequence number.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import linecache
import operator
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from autopar.capture.constrained import noted
from autopar.capture.kernel_dtypes import check_dtypes
from autopar.errors import CaptureError, at_line
from autopar.ir.dense import met_in
from autopar.ir.nodes import node_at
from autopar.ir.ops.seeded_random import FUNCTIONAL, FUSED_DROPOUT, REJECTING, RRELU, Random, Streams
from autopar.ir.record import Call
from autopar.torch_private import (
    DATA_DEPENDENT,
    TorchDispatchMode,
    as_functional,
    aten,
    autograd_sequence_number,
    draws_random,
    get_proxy_mode,
    is_random_composite,
    mutates,
    node_of,
    returns_alias,
    running_backward_of,
    writes_outside,
)

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_PASSES = os.path.join(os.path.dirname(os.path.dirname(_OURS)), "passes") + os.sep
_SYMPY = os.path.dirname(sympy.__file__) + os.sep  # which shuffles as torch computes with symbols
_LIBRARY = os.path.dirname(os.path.abspath(contextlib.__file__)) + os.sep
_SITE = os.path.join(_LIBRARY, "site-packages") + os.sep

LIFTED = aten.lift_fresh_copy.default  # makes a constant of the trace functional by itself
LINE = 100  # characters of a user's line that are quoted


@dataclass(frozen=True, slots=True)
class Origin:
    """Module path ("" is the root), the user's line, phase, and the call.

    A backward op has the call of its forward op.
    """

    module: str = ""
    source: str = ""
    phase: str = "forward"
    call: Call | None = None


def is_users(filename: str) -> bool:
    """Return whether a source file belongs to the user: not torch, sympy, autopar, the standard library."""
    if filename.startswith((_OURS, _TORCH, _SYMPY, _PASSES, "<")):
        return False
    return not filename.startswith(_LIBRARY) or filename.startswith(_SITE)


def user_line(*past: str) -> str:
    """Return ``model.py:41 self.act(self.up(x))`` for the innermost frame of the user; "" if there is none.

    The frame is outside torch, autopar and the packages ``past``.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users(file) and not (past and any(f"{os.sep}{package}{os.sep}" in file for package in past)):
            return quoted(file, frame.f_lineno)
        frame = frame.f_back
    return ""


def warn_user(message: str) -> None:
    """Warn at the innermost line of the user, however deep in autopar the reason is found."""
    frame: types.FrameType | None = sys._getframe(1)
    level = 2  # of the caller
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def quoted(filename: str, number: int) -> str:
    """Return ``model.py:41  self.act(self.up(x))`` for a line of a file."""
    text = linecache.getline(filename, number).strip()
    shown = text if len(text) <= LINE else text[: LINE - 1] + "…"
    return f"{os.path.basename(filename)}:{number}  {shown}".rstrip()


class Recorder(TorchDispatchMode):
    """Notes the origin of every node that is made while this mode is active."""

    def __init__(self, model: torch.nn.Module, random: Random = "parallel") -> None:
        super().__init__()
        self.origins: dict[fx.Node, Origin] = {}
        self.returned: dict[str, list[fx.Node]] = {}  # module path → the results of its calls, if they are one tensor
        self.constrained: list[tuple[fx.Node, Any, str, str]] = []  # value, layout, the user's line, axis of a default
        self.paths = {id(module): path for path, module in reversed(list(model.named_modules(remove_duplicate=False)))}
        self.calls: collections.Counter[str] = collections.Counter()  # module path → how often forward has called it
        self._running: list[str] = []
        self._forward: dict[int, Origin] = {}
        self._calls = itertools.count()
        self.newest: fx.Node | None = None  # the last node that was made
        self.written: dict[int, Origin] = {}
        self.current = Origin()
        self.refused: CaptureError | None = None  # kept, because the model may catch it
        self.dependent: tuple[Origin, Exception] | None = None  # where forward read the values of tensors
        self.streams: Streams | None = None  # of the trace that is running
        self.random = random
        self.elsewhere: tuple[str, str] | None = None  # module and line of ops that are made later than forward asks
        self.rows: list[tuple[str, int, int, int]] = []  # sums of rows that a mask selects: see ``note_rows``
        # what surrounds an op and its arguments; a trace with symbols needs other kernels than one with numbers
        self.kernels: Callable[[Any, Sequence[Any]], contextlib.AbstractContextManager[Any]] | None = None
        self.phase = "forward"  # set by the tracer and not detected: a capture may itself run inside a backward

    @contextlib.contextmanager
    def modules(self) -> Iterator[None]:
        """Follow which module is running, by hooks on all modules."""

        self.calls.clear()

        def enter(module: torch.nn.Module, args: Any) -> None:
            path = self.paths.get(id(module))
            if path is not None and self.phase == "forward":  # a checkpoint calls again in the backward
                self.calls[path] += 1
            self._running.append(self._running[-1] if path is None and self._running else path or "")

        def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
            path = self._running.pop()
            if self.phase == "forward" and id(module) in self.paths and isinstance(output, torch.Tensor):
                node = node_of(output)
                if node is not None:
                    self.returned.setdefault(path, []).append(node)

        handles = [
            torch.nn.modules.module.register_module_forward_pre_hook(enter),
            torch.nn.modules.module.register_module_forward_hook(leave, always_call=True),
        ]
        try:
            with noted(self):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def constrain(self, x: torch.Tensor, spec: Any) -> None:
        """Note the layout that forward gives to a value."""
        if get_proxy_mode() is None:  # a probe
            return
        source = user_line()
        node = node_of(x)
        if node is None:
            self.refused = self.refused or CaptureError(
                f"forward constrains a tensor that is no value of the step, as inside of a transform of torch.func\n"
                f"{at_line(source, self.running())}\n  constrain a value outside of the transform"
            )
            raise self.refused
        self.constrained.append((node, spec, source, ""))

    def come_from(self, module: str, line: str) -> None:
        """Note the next ops as those of a module and a line, as an exported program has them; ``""``: as forward runs.

        A program that was loaded has no lines.
        """
        self.elsewhere = (module, line) if module or line else None

    def returns(self, module: str, value: torch.Tensor) -> None:
        """Note what a module returns that runs as a part of an exported program."""
        node = None if get_proxy_mode() is None else node_of(value)
        if node is not None and self.phase == "forward":
            self.returned.setdefault(module, []).append(node)

    def spread(self, experts: torch.Tensor) -> None:
        """Note a value whose dim 0 are experts: an axis ``ep`` splits it, unless the plan says otherwise."""
        node = None if get_proxy_mode() is None else node_of(experts)
        if node is not None:
            source = self.elsewhere[1] if self.elsewhere else user_line()
            self.constrained.append((node, ("ep", *"?" * (experts.dim() - 1)), source, "ep"))

    @contextlib.contextmanager
    def placed(self, place: tuple[str, str]) -> Iterator[None]:
        """Note ops as those of another module and line, unless these are empty."""
        before, self.elsewhere = self.elsewhere, place if place[1] else self.elsewhere
        try:
            yield
        finally:
            self.elsewhere = before

    def note_rows(self, line: str, experts: int, rows: int, choices: int) -> None:
        """Note that experts are computed for all rows.

        Args:
            rows: the number of rows that all experts together compute.
            choices: the number of rows that they compute in eager, if each choice takes one expert.
        """
        if get_proxy_mode() is not None:  # no probe
            self.rows.append((line, experts, rows, choices))

    def running(self) -> str:
        """Return the path of the innermost module that is running."""
        return self._running[-1] if self._running else ""

    def origin_of(self, error: BaseException) -> Origin:
        """Return where an error comes from.

        In forward, that is the user's innermost line in the traceback, because torch refuses shapes before it calls an
        op. In backward, which has no line of the user, it is the op that was running.
        """
        if self.phase == "backward":
            return self.current
        source, module, trace = "", "", error.__traceback__
        while trace is not None:
            code = trace.tb_frame.f_code
            source = quoted(code.co_filename, trace.tb_lineno) if is_users(code.co_filename) else source
            module = self.paths.get(id(trace.tb_frame.f_locals.get("self")), module)
            trace = trace.tb_next
        return Origin(module, source or self.current.source)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":  # device queries: no node
            return func(*args, **(kwargs or {}))
        self.observe(func)
        self._check_dense(func, args)
        check_dtypes(func, args)
        if writes_outside(func, args):
            self.refused = self.refused or CaptureError(
                f"forward writes into a tensor that is neither a parameter, nor a buffer, nor an argument, nor made "
                f"in it\n"
                f"{at_line(self.current.source, self.current.module)}\n"
                f"  make it a buffer of the module, with register_buffer"
            )
            raise self.refused
        draw = func
        if draws_random(func, args, kwargs):
            self._check_random(func, kwargs or {})
            assert self.streams is not None
            draw = functools.partial(self._draw, func)
        elif is_random_composite(func):  # under inference_mode it arrives undecomposed
            with self:
                return func.decompose(*args, **(kwargs or {}))
        try:
            with self.kernels(func, args) if self.kernels else contextlib.nullcontext():
                result = draw(*args, **(kwargs or {}))
        except DATA_DEPENDENT as error:
            origin = Origin(self.current.module, self.current.source or user_line())
            self.dependent = self.dependent or (origin, error)
            raise
        self._check_dense(func, (), result if isinstance(result, (list, tuple)) else (result,))
        mode = get_proxy_mode()
        if mode is not None:
            self._note(mode.tracer.graph)
        return result

    def _check_dense(self, op: Any, args: Sequence[Any], results: Sequence[Any] = ()) -> None:
        """Refuse tensors that cannot be split into pieces, among the operands and the results."""
        if (refusal := met_in(op.__name__, args, results)) is not None:
            problem, remedy = refusal
            self.refused = self.refused or CaptureError(
                f"{problem}\n{at_line(self.current.source, self.current.module)}\n  {remedy}"
            )
            raise self.refused

    def _draw(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        assert self.streams is not None
        return self.streams.draw(op, args, kwargs)

    def _check_random(self, op: Any, kwargs: Mapping[str, Any]) -> None:
        """Refuse random ops whose numbers cannot come from a stream."""
        name = op.name().removeprefix("aten::")
        if kwargs.get("generator") is not None:
            why, remedy = (
                "draws from a generator of the model's own",
                "draw without generator=, after torch.manual_seed; or pass the random tensor in",
            )
        elif name in FUSED_DROPOUT and self.random == "single":
            why, remedy = (
                "draws its dropout inside one kernel, whose numbers depend on the whole operands",
                'leave random="parallel"; or choose torch.nn.attention.sdpa_kernel(SDPBackend.MATH), or set its '
                "dropout to 0",
            )
        elif "rnn" in name:
            why, remedy = "draws its dropout inside one kernel", "set its dropout to 0"
        elif mutates(op) and name not in FUNCTIONAL and name != RRELU:
            why, remedy = "draws random numbers into its argument", "use the op that returns a new tensor"
        elif self.streams is not None and self.streams.seeded_by_the_model():
            why, remedy = (
                "draws after forward has seeded the generator, which a captured step does not do again",
                "call torch.manual_seed before forward",
            )
        elif self.random == "single" and name.partition(".")[0] in REJECTING:
            why = (
                "takes a number of random numbers that depends on its values, so the later draws of a single device "
                "cannot be known"
            )
            remedy = 'leave random="parallel"'
        else:
            return
        self.refused = self.refused or CaptureError(
            f"{op.__name__} {why}\n{at_line(self.current.source, self.current.module)}\n  {remedy}"
        )
        raise self.refused

    def observe(self, func: Any) -> None:
        """Set ``current`` to the origin of the op that is being called."""
        if self.phase == "forward":
            call = Call(next(self._calls), func.name())
            self.current = Origin(*(self.elsewhere or (self.running(), user_line())), call=call)
            # later ops without a gradient share the number
            self._forward.setdefault(autograd_sequence_number(), self.current)
        else:
            number = running_backward_of()
            forward = Origin() if number is None else self._forward.get(number, Origin())
            self.current = Origin(forward.module, forward.source, self.phase, forward.call)

    def _note(self, graph: fx.Graph) -> None:
        newest = None
        for node in reversed(graph.nodes):
            if node is self.newest or node.op == "placeholder" or node in self.origins:
                break
            newest = newest or node
            self.origins[node] = self.current
        self.newest = newest or self.newest


class Replay(Recorder):
    """Runs a captured graph again, node by node; each new node has the origin of its captured node."""

    def __init__(self, model: torch.nn.Module, graph: fx.GraphModule, origins: dict[fx.Node, Origin]) -> None:
        super().__init__(model)
        self.new_nodes: dict[fx.Node, fx.Node | None] = {}  # node of the captured graph → the last node made for it
        self.written = _written(graph.graph, origins)
        self.interpreter = _Interpreter(graph, self, origins)

    def observe(self, func: Any) -> None:
        """Do nothing: the interpreter has set ``current``."""

    def run(self, *args: Any) -> Any:
        with self:
            return self.interpreter.run(*args)

    def follow(
        self,
        returned: dict[str, list[fx.Node]],
        constrained: Sequence[tuple[fx.Node, Any, str, str]],
        placeholders: Mapping[fx.Node, fx.Node],
    ) -> None:
        """Translate the values that modules returned, and that forward constrained, into the nodes made for them.

        Args:
            placeholders: those of the captured graph → those of the new one.
        """
        made = {**self.new_nodes, **placeholders}
        self.constrained = [(new, *rest) for node, *rest in constrained if (new := made.get(node))]
        self.returned = {
            path: [new for node in nodes if (new := self.new_nodes.get(node))] for path, nodes in returned.items()
        }


def _written(graph: fx.Graph, origins: Mapping[fx.Node, Origin]) -> dict[int, Origin]:
    """Map the position of each placeholder that is written to the origin of its last write.

    It may be written directly or through a view.
    """
    position_of: dict[fx.Node, int] = {node: k for k, node in enumerate(graph.find_nodes(op="placeholder"))}
    last_writes: dict[int, Origin] = {}
    for node in graph.nodes:
        if (
            node.op == "call_function"
            and node.args
            and node.args[0] in position_of
            and (mutates(node.target) or returns_alias(node.target))
        ):
            position_of[node] = position_of[node.args[0]]
            if mutates(node.target):
                last_writes[position_of[node]] = origins.get(node, Origin())
    return last_writes


class _Interpreter(fx.Interpreter):
    def __init__(self, graph: fx.GraphModule, replay: Replay, origins: dict[fx.Node, Origin]) -> None:
        super().__init__(graph)
        self.replay, self.origins = replay, origins

    def run_node(self, n: fx.Node) -> Any:
        self.replay.current = self.origins.get(n, self.replay.current)
        before = self.replay.newest
        value = super().run_node(n)
        if (
            n.op == "get_attr"
            and isinstance(value, torch.Tensor)
            and any(user.target is not LIFTED for user in n.users)
        ):
            value = as_functional(value)  # a constant of the model; the graph may write into copies of it
        if self.replay.newest is not before:
            self.replay.new_nodes[n] = self.replay.newest
        elif (
            n.target is operator.getitem and (last := self.replay.new_nodes.get(node_at(n))) is not None
        ):  # was made together with its op
            op = node_at(last) if last.target is operator.getitem else last
            self.replay.new_nodes[n] = next(
                (user for user in op.users if user.target is operator.getitem and user.args[1] == n.args[1]), None
            )
        return value
