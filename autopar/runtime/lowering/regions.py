"""Compile what is computed between two exchanges with Inductor, once for all that is equal.

    mm = mm(x, w)                                      ┐
    relu = relu(mm)                                    ┘  →  region_0 = region_0(x, w);  relu = region_0[0]
    y_start = start_all_gather(relu, …)                      y_start = start_all_gather(relu, …)
    …
    y = finish_all_gather(y_start, …)                        y = finish_all_gather(y_start, …)

A region is a maximal run of lines that only compute, in one phase and one block of the model. Starts, waits, random
ops, updates and whatever else writes memory stay where they are, so the order of collectives does not change. Blocks
that are alike have one canonical graph, which is compiled once, for the strides that its first call brings.
"""

from __future__ import annotations

import operator
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.capture.blocks import block_of
from autopar.errors import CompileError
from autopar.ir.nodes import map_operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.report.progress import doing
from autopar.rules.registry import rule_of
from autopar.runtime import current_op
from autopar.torch_private import BoxedCodeGen, OpOverload, changes_operands, import_inductor, returns_alias

OPTIONS: dict[str, Any] = {"emulate_precision_casts": True}  # low precision is rounded where torch rounds it
FEWEST = 2  # ops of a region that compute; a single one is a kernel already
PURE = frozenset({"aten", "prims"})  # namespaces whose ops Inductor knows

Compiled = Callable[..., Sequence[torch.Tensor]]


@dataclass
class Regions:
    """The regions that were compiled for a model. Prints as a sentence.

    Attributes:
        count: how many regions the functions have that were lowered.
        seconds: what compiling took.
    """

    count: int = 0
    seconds: float = 0.0
    _compiled: dict[tuple[Any, ...], Compiled] = field(default_factory=dict)

    @property
    def distinct(self) -> int:
        """How many graphs were compiled."""
        return len(self._compiled)

    def __str__(self) -> str:
        return f"{self.count} regions, of which {self.distinct} were compiled in {self.seconds:.1f} s"

    def of(self, graph: fx.Graph, text: str, tensors: Sequence[torch.Tensor], where: str) -> Compiled:
        """Return the compiled function of a graph for such tensors.

        Args:
            text: the graph, in a form that equal graphs share.
            where: what the region is, in errors.

        Raises:
            CompileError: Inductor cannot compile it.
        """
        key = text, *((tuple(t.shape), t.stride(), t.dtype, t.device) for t in tensors)
        if key not in self._compiled:
            begin = time.perf_counter()
            current_op.tick()  # a rank that compiles makes progress
            import_inductor()
            module = fx.GraphModule(torch.nn.Module(), graph)
            made: Compiled = torch.compile(module, fullgraph=True, dynamic=False, options=OPTIONS)
            with doing(f"compile {where}"):
                try:
                    made(*tensors)
                except Exception as error:
                    raise CompileError(
                        f"Inductor cannot compile {where}: {str(error).splitlines()[0]}\n"
                        f"  leave compile=True out; the model then runs as it is"
                    ) from error
            self._compiled[key] = made
            self.seconds += time.perf_counter() - begin
            current_op.tick()
        return self._compiled[key]


def check_compiler(device: torch.device) -> None:
    """Raise ``CompileError`` if Inductor has no C++ compiler, which it needs for a CPU."""
    default = "clang++" if sys.platform == "darwin" else "g++"
    name = os.environ.get("CXX", default)
    if device.type == "cpu" and shutil.which(name) is None:
        looked = "CXX" if "CXX" in os.environ else "PATH"
        raise CompileError(
            f"compile=True needs a C++ compiler, and there is no {name} ({looked}): install {default}, set CXX to a "
            f"compiler, or leave compile=True out"
        )


def with_regions(
    graph: fx.Graph, origins: dict[str, fx.Node], program: Program, fresh: frozenset[str], regions: Regions
) -> fx.Graph:
    """Return the graph of a function with a call in the place of each region. Linear in the graph.

    Args:
        origins: name of a value → the node of the program that it computes; the calls are added.
        fresh: the values that have their own memory, which a later line may write.
    """
    block = block_of(program)
    written = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    number = 0
    for run in _runs(graph, origins, block):
        if sum(_computes(node) for node in run) < FEWEST:
            for node in run:
                values[node] = written.node_copy(node, values.__getitem__)
            continue
        first = origins[run[0].name]
        where = f"the {record_of(first).phase} of {block(first) or 'the model'}"
        region = _Region(run, regions, where, fresh, f"region_{number}")
        taken = tuple(values[node] for node in region.takes)
        call = written.create_node("call_function", region.function, taken, name=f"region_{number}")
        origins[call.name] = first
        for k, node in enumerate(region.gives):
            values[node] = written.create_node("call_function", operator.getitem, (call, k), name=node.name)
        number += 1
    written.set_codegen(BoxedCodeGen())
    regions.count += number
    return written


class _Region:
    """A run of nodes as a function, which is compiled when it is called first.

    Attributes:
        takes: the values that it reads.
        gives: the values that others read.
    """

    def __init__(self, run: Sequence[fx.Node], regions: Regions, where: str, fresh: frozenset[str], name: str) -> None:
        inside = set(run)
        self.takes = list(dict.fromkeys(v for node in run for v in node.all_input_nodes if v not in inside))
        self.gives = [node for node in run if any(user not in inside for user in node.users)]
        self._own = [node.name in fresh for node in self.gives]
        self._regions, self._where = regions, where
        self._graph, self._text = _canonical(run, self.takes, self.gives)
        self._compiled: Compiled | None = None
        self._copied: list[int] = []  # results that share memory, and must not
        region = self

        def function(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
            return region(*tensors)

        function.__name__ = name
        self.function = function

    def __call__(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        if self._compiled is None:
            made = self._regions.of(self._graph, self._text, tensors, self._where)
            self._copied = self._sharing(tensors, made(*tensors))
            self._compiled = made
        results = self._compiled(*tensors)
        if self._copied:
            results = [value.clone() if k in self._copied else value for k, value in enumerate(results)]
        return results

    def _sharing(self, tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> list[int]:
        """Return the results with memory of their own that Inductor has put into that of other values.

        It computes equal results once.
        """
        taken = {_memory(tensor) for tensor in tensors}
        found = []
        for k, value in enumerate(results):
            if self._own[k] and value.numel() and _memory(value) in taken:
                found.append(k)
            taken.add(_memory(value))
        return found


def _runs(graph: fx.Graph, origins: Mapping[str, fx.Node], block: Callable[[fx.Node], str]) -> Iterator[list[fx.Node]]:
    """Yield the nodes in their order: those of a region together, each other one alone.

    The elements of a tuple follow it at once, and a constant stands before the region that it would divide: it is
    cheap, and Inductor would make equal ones once.
    """
    run: list[fx.Node] = []
    at: tuple[str, str] | None = None
    moved: set[fx.Node] = set()
    for node in graph.nodes:
        if node in moved:
            continue
        pure = _is_pure(node, origins)
        if pure and not node.all_input_nodes:
            yield [node]
            continue
        if not pure:
            if run:
                yield run
            run, at = [], None
            yield [node]
            continue
        origin = origins[node.name]
        place = record_of(origin).phase, block(origin)
        if run and place != at:
            yield run
            run = []
        at = place
        elements = [user for user in node.users if user.target is operator.getitem]
        moved.update(elements)
        run += [node, *elements]
    if run:
        yield run


def _is_pure(node: fx.Node, origins: Mapping[str, fx.Node]) -> bool:
    """Return whether a line only computes, the same each time, in dtypes that Inductor has."""
    if node.op != "call_function" or node.name not in origins:
        return False
    if node.target is not torch.reshape:
        op = node.target
        if not isinstance(op, OpOverload) or op.namespace not in PURE:
            return False
        if _draws(node, op) or changes_operands(op):
            return False
    types = [record_of(origins[node.name]).type]
    types += [record_of(origins[value.name]).type for value in node.all_input_nodes if value.name in origins]
    return not any(_is_complex(type) for type in types)


def _draws(node: fx.Node, op: OpOverload) -> bool:
    """Return whether an op draws random numbers. Attention without dropout draws none."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    normalized = node.normalized_arguments(torch.nn.Module(), normalize_to_only_use_kwargs=True)
    return normalized is None or normalized.kwargs.get("dropout_p") != 0.0


def _is_complex(type: Any) -> bool:
    parts = type if isinstance(type, tuple) else (type,)
    return any(isinstance(part, TensorType) and part.dtype.is_complex for part in parts)


def _computes(node: fx.Node) -> bool:
    """Return whether a node of a region is more than a view or an element."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload):
        return False
    return not returns_alias(target) and not rule_of(target).view


def _canonical(run: Sequence[fx.Node], takes: Sequence[fx.Node], gives: Sequence[fx.Node]) -> tuple[fx.Graph, str]:
    """Return a run as a graph of its own, and a text that equal graphs share: without the names of the program."""
    graph = fx.Graph()
    values = {node: graph.placeholder(f"x{k}") for k, node in enumerate(takes)}
    lines = []
    for k, node in enumerate(run):
        args, kwargs = map_operands((node.args, dict(node.kwargs)), values.__getitem__)
        values[node] = graph.create_node("call_function", node.target, args, kwargs, name=f"v{k}")
        lines.append(f"{node.target} {args} {kwargs}")
    graph.output(tuple(values[node] for node in gives))
    return graph, "\n".join((*lines, str([values[node].name for node in gives])))


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
