"""Compile the graph of a lowered function, and register its source: for tracebacks, and for the op of each line."""

from __future__ import annotations

import itertools
import linecache
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import fx

from autopar.ir.program import Program
from autopar.runtime import current_op
from autopar.runtime.lowering.waits import wait_of
from autopar.runtime.simulation.simulate import line_of
from autopar.runtime.spans import OpenSpans, Path, Paths, with_spans
from autopar.torch_private import OpOverload, kernel_of, profiler_is_on

T = TypeVar("T")
Run = Callable[[list[torch.Tensor]], list[torch.Tensor]]

OP_CALL = re.compile(r"(?<= = )torch\.ops\.([\w.]+)(?=\()")  # in a line ``y = torch.ops.aten.relu.default(x)``

_NUMBERS = itertools.count()


def compiled(graph: fx.Graph, title: str, program: Program, origins: Mapping[str, fx.Node]) -> Run:
    """Compile a function.

    Args:
        title: what it is, for tracebacks.
        origins: name of a value of the function → the node of the program whose line an error quotes.
    """
    code = graph.python_code("self")
    scope = dict(code.globals)
    lines = with_bound_ops(code.src, graph, scope).splitlines(keepends=True)
    shown = code.src.splitlines(keepends=True)
    nodes = {
        number: origins[name]
        for number, line in enumerate(lines, 1)
        if (name := line.strip().partition(" ")[0].partition(":")[0]) in origins
    }
    made = _Made(f"autopar {title} {next(_NUMBERS)}", scope, shown, program, nodes)
    function = made.function("".join(lines))
    spanned: list[tuple[Callable[..., list[torch.Tensor]], list[Path]]] = []  # none, until a profiler is on

    def run_in_spans(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if not spanned:
            paths = dict(zip(nodes, Paths(program).of(nodes.values()), strict=True))
            source, entered = with_spans(lines, paths.get)
            spanned.append((made.function(source, " in spans"), entered))
        own, entered = spanned[0]
        spans = OpenSpans(entered)
        try:
            return own(spans, tensors)
        finally:
            spans.close()

    def run(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        try:
            return run_in_spans(tensors) if profiler_is_on() else function(None, tensors)
        except Exception as error:
            current_op.add_op(error)
            raise

    return run


@dataclass(frozen=True)
class _Made:
    """Makes a function of its source, and registers it.

    Attributes:
        name: what it is, in tracebacks.
        scope: what its source refers to.
        shown: the lines that tracebacks show.
        nodes: number of a line → the node of the program whose line an error quotes.
    """

    name: str
    scope: dict[str, Any]
    shown: list[str]
    program: Program
    nodes: Mapping[int, fx.Node]

    def function(self, source: str, words: str = "") -> Callable[..., list[torch.Tensor]]:
        """Compile a source whose lines have the numbers of ``nodes``. ``words``: added to the name."""
        file = f"<{self.name}{words}>"
        scope = dict(self.scope)
        exec(compile(source, file, "exec"), scope)
        function: Callable[..., list[torch.Tensor]] = scope["forward"]
        linecache.cache[file] = (sum(map(len, self.shown)), None, self.shown, file)
        texts, waits = _OfLines(line_of, self.program, self.nodes), _OfLines(wait_of, self.program, self.nodes)
        current_op.register(function.__code__, texts, waits=waits)
        return function


def with_bound_ops(source: str, graph: fx.Graph, scope: dict[str, Any]) -> str:
    """Bind the kernel of each op in ``scope``, and return the source with these names, line for line.

    A call then looks up one name, and not the five of ``torch.ops.aten.relu.default``, and calls no Python function.
    """
    names: dict[str, str] = {}
    for node in graph.nodes:
        if isinstance(node.target, OpOverload) and str(node.target) not in names:
            names[str(node.target)] = name = f"op_{len(names)}_{node.target.__name__.replace('.', '_')}"
            scope[name] = kernel_of(node.target)
    return OP_CALL.sub(lambda call: names.get(call[1], call[0]), source)


class _OfLines(Mapping[int, T]):
    """Line of generated code → what ``about`` says of its node. It is asked on demand, because most lines never are."""

    def __init__(self, about: Callable[[Program, fx.Node], T], program: Program, nodes: Mapping[int, fx.Node]) -> None:
        self._about, self._program, self._nodes = about, program, nodes

    def __getitem__(self, number: int) -> T:
        return self._about(self._program, self._nodes[number])

    def __iter__(self) -> Iterator[int]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)
