"""Lower a local program to one Python function per phase, of ATen ops and functional collectives.

    local                                                  lowered, forward
    h : f32[16 128] = relu(mm)                      →      relu = torch.ops.aten.relu.default(mm);  mm = None
    y : f32[16 256] = all_gather(h, 1, tp, sizes=…)        y_start = start_all_gather(relu, (16, 128), 1, (128, 128), '3')
    z : f32[64 256] = t(w)                                 z = torch.ops.aten.t.default(w)
    u : f32[16 64] = mm(y, z)                              y = finish_all_gather(y_start, …);  y_start = None
                                                           u = torch.ops.aten.mm.default(y, z);  y = z = None

The joint graph is split by phase: the forward also returns the values that the backward reads. A collective starts at
the line of its transfer, and its first reader waits for it. Arguments come in a list that the function empties, so that
a tensor is freed after its last reader, as in eager. Gradients that are reduced over one axis share collectives
(``buckets``).
"""  # noqa: E501

from __future__ import annotations

import itertools
import linecache
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.errors import SimulationError
from autopar.ir import transfers
from autopar.ir.nodes import called_op, element_of, is_getitem, map_operands, node_at, operands, record_of, tensor_type
from autopar.ir.ops.seeded_random import folded
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.optimizers import IN_PLACE, OFFLOADED, SHARED
from autopar.report.progress import doing
from autopar.rules.registry import rule_of
from autopar.runtime import current_op
from autopar.runtime.anomaly import Hunt, is_looked_at, op_of
from autopar.runtime.lowering.buckets import (
    Buckets,
    Place,
    finish_bucket,
    finish_gather_bucket,
    finish_scatter_bucket,
    start_bucket,
    start_gather_bucket,
    start_scatter_bucket,
)
from autopar.runtime.lowering.collectives import (
    Exchange,
    exchange,
    exchange_between_stages,
    redistribute_locally,
    redistribution,
    start_all_reduce,
    start_all_reduce_in_place,
)
from autopar.runtime.lowering.donated import Donated
from autopar.runtime.lowering.packing import packing
from autopar.runtime.lowering.reduction import Calls, Reduction
from autopar.runtime.simulation.effects import pending_piece, place_along
from autopar.runtime.simulation.simulate import ANY_STRIDES, line_of
from autopar.torch_private import BoxedCodeGen, OpOverload, returns_alias

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Lowered:
    """The function of one phase on one rank.

    Attributes:
        run: takes a list of tensors, which it empties, and returns a list.
        takes: the names of the values that it takes.
        gives: the names of the values that it returns.
        graph: the FX graph of the function, which other compilers accept too.
        origins: name of a value of the function → the node of the program that it is, or is a part of.
    """

    run: Callable[[list[torch.Tensor]], list[torch.Tensor]]
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    graph: fx.Graph
    origins: Mapping[str, fx.Node]


@doing("lower")
def lower(program: Program, groups: Mapping[Ranks, str], gate: Callable[[], None] | None = None,
          bytes: Mapping[str, int] | None = None, device: torch.device | None = None,
          hunt: Hunt | None = None) -> dict[str, Lowered]:  # fmt: skip
    """Lower the phases of a rank's local program; linear in the graph.

    Args:
        groups: ranks, in ascending order → the name of their process group.
        gate: called before the first collective of each phase.
        bytes: name of a reduction or gather → the bytes that it adds to a bucket; others have no bucket.
        device: the device for values from another stage; the default is the CPU.
        hunt: checks each value for NaN after the op that computes it.
    """
    values: dict[str, list[fx.Node]] = {"forward": []}
    for node in program.nodes:
        if node.op in ("call_function", "get_attr"):
            values.setdefault(record_of(node).phase, []).append(node)
    rows = list(zip(operands(program.output), record_of(program.output).results, strict=True))
    results = {
        "forward": [node for node, result in rows if result.kind != "grad"],
        "backward": [node for node, result in rows if result.kind == "grad"],
    }
    saved = _read_from_outside(values.get("backward", []), results["backward"])
    results["forward"] += [node for node in saved if record_of(node).phase == "forward" and node.op == "call_function"]
    lowered = {}
    for phase, nodes in values.items():
        buckets = Buckets.of(program, nodes, bytes or {})
        builder = _Phase(
            program, groups, f"{phase} of rank {program.rank}", buckets, gate, device or torch.device("cpu"), hunt=hunt
        )
        lowered[phase] = builder.run(nodes, list(dict.fromkeys(results[phase])))
    return lowered


def lower_whole(program: Program, groups: Mapping[Ranks, str], gate: Callable[[], None] | None = None,
                bytes: Mapping[str, int] | None = None, device: torch.device | None = None,
                donated: Donated | None = None, hunt: Hunt | None = None) -> Lowered:  # fmt: skip
    """Lower all phases of a rank's local program to one function, which returns the program's results.

    Args:
        donated: the memory that the function may write to; it puts the next values of these placeholders there.

    The other arguments are those of ``lower``.
    """
    nodes = [node for node in program.nodes if node.op in ("call_function", "get_attr")]
    title = f"{' and '.join(dict.fromkeys(record_of(node).phase for node in nodes))} of rank {program.rank}"
    donated = donated or Donated()
    phase = _Phase(
        program,
        groups,
        title,
        Buckets.of(program, nodes, bytes or {}, donated.sums),
        gate,
        device or torch.device("cpu"),
        donated,
        hunt,
    )
    return phase.run(nodes, list(dict.fromkeys(operands(program.output))))


def _read_from_outside(nodes: list[fx.Node], results: list[fx.Node]) -> list[fx.Node]:
    """Return the values that a phase reads and does not compute."""
    computed = set(nodes)
    read = dict.fromkeys(value for node in nodes for value in operands(node))
    return [value for value in {**read, **dict.fromkeys(results)} if value not in computed]


class _Phase:
    """Builds the function of one phase, or of several."""

    def __init__(self, program: Program, groups: Mapping[Ranks, str], title: str, buckets: Buckets,
                 gate: Callable[[], None] | None, device: torch.device, donated: Donated | None = None,
                 hunt: Hunt | None = None) -> None:  # fmt: skip
        self.program, self.groups, self.title, self.buckets, self.gate, self.device = (
            program,
            groups,
            title,
            buckets,
            gate,
            device,
        )
        self.graph = fx.Graph()
        self.values: dict[fx.Node, fx.Node] = {}
        self.started: dict[fx.Node, tuple[fx.Node, Exchange]] = {}  # collectives that nothing has waited for yet
        self.shared: dict[fx.Node, list[fx.Node]] = {}  # a member of a bucket → all of them
        self.unfinished_sums: list[fx.Node] = []  # sums whose addends are still being reduced
        self.fresh: set[fx.Node] = set()  # values that have their own memory
        self.donated = donated or Donated()
        self.updates = self.donated.updates
        self.fresh |= self.donated.placeholders
        self.lines: dict[str, fx.Node] = {}  # name in the generated code → node of the program
        self.hunt = hunt
        if hunt is not None:
            self.look, self.look_at_updates = (
                hunt.look,
                hunt.look_at_updates,
            )  # bound once, because generated code refers to an object by its identity

    def run(self, nodes: list[fx.Node], results: list[fx.Node]) -> Lowered:
        constants = [node for node in nodes if node.op == "get_attr"]
        takes = [*constants, *(node for node in _read_from_outside(nodes, results) if node not in self.donated.zeros)]
        for node in takes:
            self.values[node] = self.graph.placeholder(node.name)
        for node in constants:
            self.check_for_nan(node, self.values[node])
        members, sums = self.buckets.members, set(self.buckets.late.values())
        for bucket in self.buckets.begin(0):
            self.bucket(bucket)
        end = next((node for node in nodes if record_of(node).phase == "update"), None)
        for node in nodes:
            if node is end:
                self.settle()
            if node in self.buckets.runs:
                self.bucket(self.buckets.runs[node])
            elif node.op == "call_function" and node not in members and node not in sums and node not in self.values:
                self.node(node)
                self.start_due(node)
        self.settle()
        self.graph.output([self.read(node) for node in results])
        self.graph.set_codegen(BoxedCodeGen())
        return Lowered(
            self.compile(), tuple(n.name for n in takes), tuple(n.name for n in results), self.graph, self.lines
        )

    def start_due(self, node: fx.Node) -> None:
        """Start the buckets that this value fills."""
        for reduced in self.buckets.due.get(node, ()):
            self.bucket(self.buckets.add(reduced))

    def settle(self) -> None:
        """Start the buckets that are not full, and finish the sums."""
        while (left := self.buckets.rest()) or self.unfinished_sums:
            for bucket in left:
                self.bucket(bucket)
            self.add_up()

    def add_up(self) -> None:
        """Add the latest bucket of gradients to their sums."""
        sums, self.unfinished_sums = self.unfinished_sums, []
        for sum in sums:
            self.values[sum] = self.sum(sum)
            self.start_due(sum)

    def read(self, node: fx.Node) -> fx.Node:
        """Return a value; wait for its collective first."""
        if node in self.buckets.stage:
            for bucket in self.buckets.begin(self.buckets.stage[node] + 1):
                self.bucket(bucket)
        if node in self.shared:
            self.open(self.shared[node])
        elif node in self.started:
            started, collective = self.started.pop(node)
            received = self.call(
                node,
                node.name + "_came" * bool(collective.after),
                collective.finish,
                (started, *collective.finish_args),
            )
            self.values[node] = self.calls(node, node.name, received, collective.after)
        return self.values[node]

    def calls(self, node: fx.Node, name: str, value: fx.Node, calls: Calls) -> fx.Node:
        """Apply functions one after the other; the last result gets the name."""
        for left, (function, args) in zip(range(len(calls))[::-1], calls, strict=True):
            value = self.call(node, f"{name}_{left}" if left else name, function, (value, *args))
        return value

    def call(
        self,
        node: fx.Node,
        name: str,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
    ) -> fx.Node:
        new = self.graph.create_node("call_function", target, args, dict(kwargs or {}), name=name)
        self.lines[new.name] = node
        if name == node.name:
            self.check_for_nan(node, new)
        return new

    def check_for_nan(self, node: fx.Node, value: fx.Node) -> None:
        """Insert a line after a value that looks for NaN."""
        if self.hunt is not None and is_looked_at(node):
            read = tuple(self.values.get(operand) for operand in operands(op_of(node)))
            self.graph.call_function(self.look, (node.name, value, read))

    def node(self, node: fx.Node) -> None:
        if node in self.donated.sums:
            self.values[node] = self.sum(node)
            return
        if node in self.updates:
            self.values[node] = self.result_of_update(node, 0)
            if node in self.donated.buckets:
                self.update(self.donated.buckets[node])
            return
        if is_getitem(node) and node.args[0] in self.updates:
            self.values[node] = self.result_of_update(*element_of(node))
            return
        row = transfers.BY_FUNCTION.get(node.target)
        if row is not None:
            self.transfer(node, row)
            return
        target = ANY_STRIDES.get(called_op(node), called_op(node))
        args, kwargs = map_operands(node.args, self.read), map_operands(dict(node.kwargs), self.read)
        self.values[node] = self.call(node, node.name, target, args, kwargs)
        if self.is_fresh(node):
            self.fresh.add(node)

    def sum(self, node: fx.Node) -> fx.Node:
        """Add a gradient to its sum in place. The first gradient becomes the sum itself, if no other value shares its
        memory."""
        sum, addend = self.donated.sums[node], operands(node)[1]
        value = self.read(addend)
        if sum not in self.donated.zeros:
            return self.call(node, node.name, torch.ops.aten.add_.Tensor, (self.values[sum], value))
        dtype = tensor_type(node).dtype
        if addend in self.fresh and len(addend.users) == 1 and tensor_type(addend).dtype == dtype:
            return value
        return self.call(node, node.name, own_copy, (value, dtype))

    def update(self, nodes: Sequence[fx.Node]) -> None:
        """Update several parameters with one op; the new values are in the memory of the old ones."""
        rows: list[tuple[Any, ...]] = [node.args for node in nodes]
        op = called_op(nodes[0])
        count = len(rows[0]) - SHARED[op]
        parameters, gradients, *states = [[self.read(row[k]) for row in rows] for k in range(count)]
        shared, numbers = map_operands((rows[0][count:], dict(nodes[0].kwargs)), self.read)
        update = (OFFLOADED if self.donated.offloaded else IN_PLACE)[op]
        self.call(nodes[0], f"{nodes[0].name}_in_place", update, (parameters, gradients, states, *shared), numbers)
        if self.hunt is not None:
            self.graph.call_function(
                self.look_at_updates, ([node.name for node in nodes], gradients, [parameters, *states])
            )

    def result_of_update(self, node: fx.Node, element: int) -> fx.Node:
        """Return a result of an update: the old value, which the update overwrites."""
        return self.read(node_at(node, element and element + 1))

    def is_fresh(self, node: fx.Node) -> bool:
        """Whether no other value shares the memory of a value: it is new, or it is a view of a value that nothing else
        reads."""
        if not isinstance(node.target, OpOverload):
            return False
        if not returns_alias(node.target) and not rule_of(node.target).view:
            return True
        values = operands(node)
        return len(values) == 1 and values[0] in self.fresh and len(values[0].users) == 1

    def transfer(self, node: fx.Node, row: transfers.Transfer) -> None:
        arguments = transfers.arguments(node.target, node.args, node.kwargs)
        if row.function in (transfers.send, transfers.recv):
            self.values[node] = self.between_stages(node, arguments)
            return
        at = self.program.coordinates_on(arguments.get("stage"))
        if not row.collective or not arguments["axis"]:
            self.values[node] = self.local(node, arguments, at)
            return
        (operand,) = operands(node)
        ranks, group = self.group(arguments)
        x = self.read(operand)
        collective = self.exchange(node, arguments, ranks, group)
        x = self.calls(node, f"{node.name}_operand", x, collective.before)
        start = collective.start
        if start is start_all_reduce and (
            collective.before or (operand in self.fresh and len(operand.users) == 1 and self.hunt is None)
        ):
            start = start_all_reduce_in_place
        if node.target is transfers.redistribute:
            collective = replace(collective, finish_args=(x, *collective.finish_args))
        self.open_gate()
        self.started[node] = (self.call(node, f"{node.name}_start", start, (x, *collective.start_args)), collective)
        self.fresh.add(node)

    def group(self, arguments: Mapping[str, Any]) -> tuple[Ranks, str]:
        """Return the ranks of a collective, in the order of its axes, and the name of their process group, whose order
        is ascending."""
        ranks = self.program.meshes[arguments.get("stage")].group(self.program.rank, arguments["axis"])
        return ranks, self.groups[tuple(sorted(ranks))]

    def exchange(self, node: fx.Node, arguments: Mapping[str, Any], ranks: Ranks, group: str) -> Exchange:
        source, result = record_of(operands(node)[0]).type, record_of(node).type
        assert isinstance(source, TensorType) and isinstance(result, TensorType)
        if node.target is transfers.redistribute:
            plan = packing(
                transfers.Ends.of(arguments, self.program.meshes), self.program.rank, arguments.get("kept", ())
            )
            return redistribution(plan, sorted(ranks), source.dtype, group)
        if node.target is not transfers.all_reduce and list(ranks) != sorted(ranks):
            raise SimulationError(
                f"the ranks {ranks} of a group are not in ascending order along {arguments['axis']}; number the mesh so"
            )
        index = ranks.index(self.program.rank)
        return exchange(node.target, arguments, source.shape, result.shape, source.dtype, index, len(ranks), group)

    def between_stages(self, node: fx.Node, arguments: Mapping[str, Any]) -> fx.Node:
        """Lower a send or a recv: one call that also waits."""
        type = record_of(node).type
        assert isinstance(type, TensorType)
        plan = packing(transfers.Ends.of(arguments, self.program.meshes), self.program.rank)
        values = [self.read(value) for value in operands(node)]
        self.open_gate()
        return self.call(
            node, node.name, exchange_between_stages, (values[0] if values else None, plan, type.dtype, self.device)
        )

    def open_gate(self) -> None:
        """Insert the call of the gate before the first collective."""
        if self.gate is not None:
            self.graph.call_function(self.gate)
            self.gate = None

    def bucket(self, members: list[fx.Node]) -> None:
        """Start a bucket, and add the one before it to the sums."""
        for operand in (operands(node)[0] for node in members if node in self.buckets.stage):
            if operand not in self.values:  # the cast of a parameter, earlier than in the program
                self.node(operand)
        if len(members) == 1:
            self.node(members[0])
        elif members:
            self.start(members)
        if sums := [self.buckets.late[node] for node in members if node in self.buckets.late]:
            self.add_up()
            self.unfinished_sums = sums

    def start(self, members: list[fx.Node]) -> None:
        """Start several collectives as one collective."""
        reduction = self.reduction(members[0])
        pieces = [
            self.calls(node, f"{node.name}_operand", self.read(operands(node)[0]), reduction.before) for node in members
        ]
        self.open_gate()
        first = members[0]
        arguments = transfers.arguments(first.target, first.args, first.kwargs)
        ranks, group = self.group(arguments)
        start: Callable[..., torch.Tensor]
        args: tuple[Any, ...]
        if first.target is transfers.all_reduce:
            start, args = start_bucket, (reduction.op, group)
        elif first.target is transfers.reduce_scatter:
            start, args = start_scatter_bucket, (self.places(members), len(ranks), reduction.op, group)
        else:
            start, args = start_gather_bucket, (len(ranks), group)
        self.values[first] = self.call(first, f"{first.name}_bucket", start, (pieces, *args))
        self.shared |= dict.fromkeys(members, members)

    def places(self, members: Sequence[fx.Node]) -> tuple[Place, ...]:
        rows = []
        for node in members:
            arguments = transfers.arguments(node.target, node.args, node.kwargs)
            source = tensor_type(operands(node)[0])
            view = (
                tuple(n for dim in arguments["parts"] for n in dim) if arguments.get("parts") else tuple(source.shape)
            )
            rows.append((view, arguments["dim"], tuple(tensor_type(node).shape)))
        return tuple(rows)

    def open(self, members: list[fx.Node]) -> None:
        """Wait for a bucket, and split it into its members."""
        first = members[0]
        finish: Callable[..., Any]
        args: tuple[Any, ...]
        if first.target is transfers.all_reduce:
            finish, args = finish_bucket, ([tuple(tensor_type(node).shape) for node in members],)
        elif first.target is transfers.reduce_scatter:
            ranks, _ = self.group(transfers.arguments(first.target, first.args, first.kwargs))
            finish, args = finish_scatter_bucket, (self.places(members), ranks.index(self.program.rank))
        else:
            finish, args = finish_gather_bucket, (self.places(members),)
        pieces = self.call(first, f"{first.name}_pieces", finish, (self.values[first], *args))
        for k, node in enumerate(members):
            del self.shared[node]
            after = self.reduction(node).after
            received = self.call(node, node.name + "_came" * bool(after), operator.getitem, (pieces, k))
            self.values[node] = self.calls(node, node.name, received, after)
            self.fresh.add(node)

    def reduction(self, node: fx.Node) -> Reduction:
        """Return how the bucket of a transfer is reduced; a gather reduces nothing."""
        arguments = transfers.arguments(node.target, node.args, node.kwargs)
        if node.target is transfers.all_gather:
            return Reduction("")
        return Reduction.of(arguments.get("op", "sum"), tensor_type(node).dtype, len(self.group(arguments)[0]))

    def local(self, node: fx.Node, arguments: Mapping[str, Any], at: Mapping[str, int]) -> fx.Node:
        """Lower a transfer that sends nothing."""
        x = self.read(operands(node)[0])
        shape = tensor_type(node).shape
        if node.target is transfers.cast:
            return self.call(node, node.name, torch.Tensor.to, (x, arguments["dtype"]))
        if node.target is transfers.wait:
            return x
        if node.target is transfers.fold_in:
            return self.call(
                node, node.name, folded, (x, place_along(arguments, at, self.program.meshes[arguments.get("stage")]))
            )
        if node.target is transfers.pend:
            return self.call(node, node.name, pending_piece, (x, arguments, at))
        if node.target is transfers.redistribute:
            plan = packing(
                transfers.Ends.of(arguments, self.program.meshes), self.program.rank, arguments.get("kept", ())
            )
            return self.call(node, node.name, redistribute_locally, (x, plan))
        source = tensor_type(operands(node)[0])
        view = tuple(n for dim in arguments["parts"] for n in dim) if arguments.get("parts") else source.shape
        sizes, index = arguments["sizes"], at[arguments["axis"]]
        return self.call(
            node, node.name, own_piece, (x, view, arguments["dim"], sum(sizes[:index]), sizes[index], shape)
        )

    def compile(self) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
        """Compile the function; register its source for tracebacks, and the op of each line."""
        code = self.graph.python_code("self")
        file = f"<autopar {self.title} {next(_NUMBERS)}>"
        scope = dict(code.globals)
        exec(compile(code.src, file, "exec"), scope)
        function = scope["forward"]
        lines = code.src.splitlines(keepends=True)
        linecache.cache[file] = (len(code.src), None, lines, file)
        current_op.register(function.__code__, _Lines(self.program, self.lines, lines))

        def run(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            try:
                return function(None, tensors)
            except Exception as error:
                current_op.add_op(error)
                raise

        return run


_NUMBERS = itertools.count()


def own_copy(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Copy a tensor to memory of its own."""
    return x.to(dtype, copy=True, memory_format=torch.contiguous_format)


def own_piece(
    x: torch.Tensor, view: tuple[int, ...], dim: int, start: int, size: int, shape: tuple[int, ...]
) -> torch.Tensor:
    return x.reshape(view).narrow(dim, start, size).reshape(shape).contiguous()


class _Lines(Mapping[int, str]):
    """Line of generated code → the line of the program, the user's line and module; texts are made on demand."""

    def __init__(self, program: Program, names: Mapping[str, fx.Node], lines: list[str]) -> None:
        self.program = program
        self.nodes = {
            number: names[name]
            for number, line in enumerate(lines, 1)
            if (name := line.strip().partition(" ")[0].partition(":")[0]) in names
        }

    def __getitem__(self, number: int) -> str:
        return line_of(self.program, self.nodes[number])

    def __iter__(self) -> Iterator[int]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)
