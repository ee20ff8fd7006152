"""Check Layouts, requirements and sharding rules, and the pieces of one rank: what each level promises.

``Subject`` holds the program that is verified, and makes the errors about it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import fx

from autopar.errors import RuleError, VerifyError
from autopar.ir import transfers
from autopar.ir.layout import UNDECIDED, Layout
from autopar.ir.mesh import PIPELINE
from autopar.ir.nodes import has_record, is_getitem, node_at, operands, record_of, tensor_type
from autopar.ir.ops.over_stages import OVER_STAGES
from autopar.ir.program import Program
from autopar.ir.record import DTYPE_NAMES, Record, TensorType
from autopar.ir.subaxes import index_along, overlap
from autopar.ir.text.printer import print_node, print_requirement, print_type
from autopar.ir.value_names import started_states
from autopar.rules.binding import bind_node, drawn_alike

# -- layouts -----------------------------------------------------------------------------------------------------------
#
# Check Layouts, requirements and sharding rules: what traced, placed and explicit programs promise.


def check_dtypes(of: Subject, node: fx.Node, record: Record) -> None:
    """Check that a traced program requires dtypes only."""
    if record.uses and len(record.uses) != len(operands(node)):
        raise of.error(
            node, f"{len(operands(node))} operands, but {len(record.uses)} requirements: every use has one, or none has"
        )
    if any(need is not None and need.layout is not None for need in record.uses):
        raise of.error(node, "a use in a traced program requires a dtype alone; place decides its Layout")


def check_untransferred(of: Subject, node: fx.Node, record: Record) -> None:
    if node.target in transfers.BY_FUNCTION:
        raise of.error(node, f"a {of.program.level} program has no transfers; reshard inserts them")


def check_placed(of: Subject, node: fx.Node, record: Record) -> None:
    for type in record.type if isinstance(record.type, tuple) else (record.type,):
        if type is not None:
            if type.layout is None:
                raise of.error(node, f"at the level {of.program.level} every value has a Layout")
            check_layout(of, node, type, type.layout)
            if node.op == "get_attr" and not type.layout.attr.is_replicated:
                raise of.error(node, "a constant is whole on every rank, and its uses may need pieces of it")
    if node.op not in ("call_function", "output") or node.target in transfers.BY_FUNCTION:
        return
    values = operands(node)
    if len(record.uses) != len(values):
        raise of.error(node, f"{len(values)} operands, but {len(record.uses)} requirements: every use has one")
    for value, need in zip(values, record.uses, strict=True):
        operand_type = record_of(value).type
        if not isinstance(operand_type, TensorType):
            continue
        if need is None:
            raise of.error(node, f"the use of {value.name} has no requirement", value)
        if need.layout is None:
            raise of.error(node, f"the use of {value.name} requires a dtype alone; place gives it a Layout", value)
        if (need.layout, operand_type.shape) not in of.right:
            check_layout(of, node, operand_type, need.layout)
        if of.program.level == "explicit" and (need.layout, need.dtype) != (operand_type.layout, operand_type.dtype):
            user = "the output" if node.op == "output" else node.name
            wanted = f"{user} needs {value.name} as {print_requirement(need, operand_type)}"
            reason = f"{wanted}, but it is {print_type(operand_type)}: insert the transfers between them"
            raise of.error(node, reason, value)


def check_layout(of: Subject, node: fx.Node, type: TensorType, layout: Layout) -> None:
    if (layout, type.shape) in of.right:
        return
    attr, mesh = layout.attr, layout.mesh
    if len(attr.dims) != len(type.shape):
        raise of.error(node, f"the Layout has {len(attr.dims)} dims, the value {len(type.shape)}")
    axes = attr.axes
    if UNDECIDED in axes:
        raise of.error(node, "a dim is left undecided ('?'): place decides it")
    if mesh != of.program.mesh and of.program.stages.get(mesh.name or "") != mesh:
        raise of.error(node, f"the mesh ({mesh!r}) is neither the program's nor one of its stages")
    for axis in axes:
        try:
            mesh.check_axis(axis)
        except ValueError as error:
            raise of.error(node, str(error)) from None
    if twice := next((axis for k, axis in enumerate(axes) if any(overlap(axis, other) for other in axes[:k])), None):
        raise of.error(node, f"the axis {twice} is used twice on one value; each axis splits it, or is pending, once")
    if len({kind for _, kind in attr.pending}) > 1:
        kinds = " and ".join(f"{kind} over {axis}" for axis, kind in attr.pending)
        raise of.error(node, f"pending {kinds} at once: the order of the reductions would matter; reduce one first")
    if attr.normalize(type.shape, mesh) != attr:
        raise of.error(node, "the Layout is not in its normal form; make it with DistAttr.normalize")
    of.right.add((layout, type.shape))


def check_rule(of: Subject, node: fx.Node, record: Record) -> None:
    if node.op != "call_function" or is_getitem(node):
        return
    values = operands(node)
    if node.target in transfers.BY_FUNCTION:
        check_transfer(of, node, values[0], record)
        return
    try:
        bound = bind_node(node)
    except RuleError as error:
        raise of.error(node, str(error), *values) from None
    results = record.type if isinstance(record.type, tuple) else (record.type,)
    needs = [need.placed.attr for need in record.uses if need is not None]
    gives = [None if r is None else r.attr for r in results]
    meshes = {need.placed.mesh for need in record.uses if need} | {r.layout.mesh for r in results if r and r.layout}
    if node.target is OVER_STAGES:  # it reads each number on its stage, and the sum is pending over the stages
        attr = tensor_type(node).attr
        gives = [replace(attr, pending=tuple(row for row in attr.pending if row[0] != PIPELINE))]
        meshes = {tensor_type(node).mesh}
    elif len(meshes) > 1:  # a value of the whole mesh is on each stage, too, where it uses only the stage's axes
        on_all = [need.placed.attr for need in record.uses if need and need.placed.mesh is of.program.mesh]
        of_stages = meshes - {of.program.mesh}
        if all({*attr.axes} <= {*stage.axes} for attr in on_all for stage in of_stages):
            meshes = of_stages
    if len(meshes) > 1:
        raise of.error(
            node, "operands and results are on different meshes; an op runs on one: insert a send and a recv", *values
        )
    if meshes and (why := bound.check(meshes.pop(), needs, gives, [v.name for v in values])):
        raise of.error(node, why, *values)


def check_transfer(of: Subject, node: fx.Node, value: fx.Node, record: Record) -> None:
    row = transfers.BY_FUNCTION[node.target]
    arguments = transfers.arguments(node.target, node.args, node.kwargs)
    source = record_of(value).type
    if not isinstance(source, TensorType):
        raise of.error(node, f"{row.name} takes one tensor and makes one", value)
    try:
        want = row.infer(source, arguments, of.program.meshes)
    except ValueError as error:
        raise of.error(node, str(error), value) from None
    if want != record.type:
        raise of.error(node, f"{row.name} makes it {print_type(want)}", value)
    check_channel(of, node, value, arguments)


def check_channel(of: Subject, node: fx.Node, value: fx.Node, arguments: Mapping[str, Any]) -> None:
    """Check that a sent value is only received, and by the stage it was sent to."""
    if node.target is transfers.send:
        for user in node.users:
            if user.target is not transfers.recv:
                raise of.error(
                    user,
                    f"{node} is on its way to {arguments['stage']}: read a recv({node}, {arguments['stage']})",
                    node,
                )
    elif node.target is transfers.recv:
        sent = value.target is transfers.send
        stage = transfers.arguments(transfers.send, value.args, value.kwargs)["stage"] if sent else None
        if stage != arguments["stage"]:
            raise of.error(
                node,
                f"{value} was not sent to {arguments['stage']}: receive a send({value}, {arguments['stage']})",
                value,
            )


# -- pieces ------------------------------------------------------------------------------------------------------------


PIECES: dict[Any, tuple[str, ...]] = {  # transfer → its arguments with piece sizes, at the level local
    transfers.all_gather: ("sizes",),
    transfers.slice: ("sizes",),
    transfers.reduce_scatter: ("sizes",),
    transfers.all_to_all: ("sizes", "new_sizes"),
    transfers.pend: ("sizes",),
}
CHUNKED = (transfers.all_reduce, transfers.reduce_scatter, transfers.all_gather)  # sent in chunks and in messages
EXCHANGES = (transfers.redistribute, transfers.send, transfers.recv)


def check_local(of: Subject, node: fx.Node, record: Record) -> None:
    types = record.type if isinstance(record.type, tuple) else (record.type,)
    if any(type is not None and type.layout is not None for type in types) or record.uses:
        raise of.error(node, f"a {of.program.level} program has the sizes of one rank and no Layouts")
    if node.target not in transfers.BY_FUNCTION:
        return
    arguments = transfers.arguments(node.target, node.args, node.kwargs)
    if node.target is transfers.join_chunks:
        check_join(of, node, record, arguments)
        return
    if not operands(node) and not (node.target is transfers.recv and node.args[0] is None):
        raise of.error(node, f"{transfers.BY_FUNCTION[node.target].name} takes one tensor")
    if record.span is not None or record.message:
        check_packed(of, node, arguments)
    if node.target in EXCHANGES:
        check_exchange(of, node, record, arguments)
        return
    at: Mapping[str, int] = {}
    if "axis" in arguments:
        try:
            mesh = of.program.meshes[arguments.get("stage")]
            count = mesh.count(mesh.check_axis(axis) for axis in transfers.axes_of(arguments["axis"]))
            at = of.program.coordinates_on(arguments.get("stage"))
        except KeyError:
            raise of.error(node, f"there is no stage {arguments['stage']}") from None
        except ValueError as error:
            raise of.error(node, str(error)) from None
        for key in ("sizes", "new_sizes"):
            if key in arguments and len(arguments[key]) != count:
                raise of.error(
                    node, f"{key} lists {len(arguments[key])} pieces, the axis {arguments['axis']} has {count}"
                )
    check_pieces(of, node, operands(node)[0], record, arguments, at)


def check_packed(of: Subject, node: fx.Node, arguments: Mapping[str, Any]) -> None:
    """Check that a transfer can be sent in chunks, or in a message with others: as elements in a row, of which each
    rank sends equally many."""
    values, remedy = operands(node), "start it whole, in a message of its own"
    if node.target not in CHUNKED or not isinstance(source := record_of(values[0]).type, TensorType):
        raise of.error(node, f"only an all-reduce, a reduce-scatter and a gather share a message or are cut: {remedy}",
                       *values)  # fmt: skip
    if len(set(arguments.get("sizes") or ())) > 1:
        raise of.error(node, f"its pieces have unequal sizes, {list(arguments['sizes'])}: {remedy}", *values)
    kind = arguments.get("op", "sum")
    if node.target is not transfers.all_gather and transfers.is_gathered(kind, source.dtype):
        raise of.error(node, f"no backend reduces {kind} of {print_type(source)}, which each rank gathers: {remedy}",
                       *values)  # fmt: skip


def check_span(of: Subject, node: fx.Node, value: fx.Node, record: Record, arguments: Mapping[str, Any]) -> None:
    """Check the elements that a chunk sends."""
    source, span = tensor_type(value), record.span
    assert span is not None
    elements = _elements(node, arguments)
    if not 0 <= span[0] < span[1] <= elements:
        raise of.error(node, f"a chunk is a range of the elements from 0 to {elements}, which {value} sends", value)
    rows = (len(arguments["sizes"]),) if node.target is transfers.all_gather else ()
    if record.type != TensorType((*rows, span[1] - span[0]), source.dtype):
        rows_of = " of each rank" * bool(rows)
        raise of.error(node, f"its result is the {span[1] - span[0]} elements{rows_of} that it sends", value)


def _elements(node: fx.Node, arguments: Mapping[str, Any]) -> int:
    """Return how many elements the chunks of a transfer are cut from: its operand, or a row of a reduce-scatter."""
    elements = math.prod(tensor_type(operands(node)[0]).shape)
    return elements // len(arguments["sizes"]) if node.target is transfers.reduce_scatter else elements


def check_join(of: Subject, node: fx.Node, record: Record, arguments: Mapping[str, Any]) -> None:
    """Check that the chunks that are joined are all of one transfer, in the order of their elements, and that they are
    joined to its result."""
    chunks = operands(node)
    starts = [node_at(chunk) for chunk in chunks if chunk.target is transfers.wait]
    starts = [of.started_before.get(start, start) for start in starts]
    spans = [record_of(start).span for start in starts]
    calls = {(start.target, start.args, str(start.kwargs)) for start in starts}
    if not chunks or len(starts) < len(chunks) or None in spans or len(calls) > 1:
        raise of.error(node, "only chunks of one transfer, which were waited for, are joined", *chunks)
    ends = [span[1] for span in spans if span]
    first, whole = starts[0], _whole_result(of, starts[0])
    transfer = transfers.arguments(first.target, first.args, first.kwargs)
    elements = _elements(first, transfer)
    if [span[0] for span in spans if span] != [0, *ends[:-1]] or ends[-1] != elements:
        raise of.error(
            node,
            f"the chunks that are joined do not follow each other from element 0 to {elements}: list each chunk of "
            f"the transfer once, in the order of its elements",
            *chunks,
        )
    if record.type != whole or tuple(arguments["shape"]) != whole.shape:
        raise of.error(node, f"its result is that of the whole transfer, {print_type(whole)}", *chunks)
    for key in ("dim", "parts"):
        want = transfer.get(key) if first.target is transfers.all_gather else None
        if arguments.get(key) != want:
            raise of.error(node, f"the chunks of this transfer are joined with {key}={want}", *chunks)


def _whole_result(of: Subject, started: fx.Node) -> TensorType:
    """Return the type of the result of a transfer that is sent in chunks."""
    source = tensor_type(operands(started)[0])
    if started.target is transfers.all_reduce:
        return source
    arguments = transfers.arguments(started.target, started.args, started.kwargs)
    at = of.program.coordinates_on(arguments.get("stage"))
    return TensorType(transfers.local_shape(started.target, source.shape, arguments, at), source.dtype)


def check_pieces(
    of: Subject, node: fx.Node, value: fx.Node, record: Record, arguments: Mapping[str, Any], at: Mapping[str, int]
) -> None:
    """Check that the explicit piece sizes agree with the local shapes of operand and result."""
    source = record_of(value).type
    if not isinstance(source, TensorType) or not isinstance(record.type, TensorType):
        raise of.error(node, f"{transfers.BY_FUNCTION[node.target].name} takes one tensor and makes one", value)
    if source.dtype != record.type.dtype and node.target is not transfers.cast:
        raise of.error(node, f"only cast converts: its result is of the dtype {DTYPE_NAMES[source.dtype]}", value)
    want = source.shape
    if node.target is not transfers.pend or arguments.get("dim") is not None:
        for key in PIECES.get(node.target, ()):
            if key not in arguments:
                raise of.error(
                    node,
                    f"at the level {of.program.level} it needs an argument {key} with the sizes of the pieces",
                    value,
                )
        if node.target in PIECES:
            parts = [n for dim in arguments.get("parts") or ((n,) for n in source.shape) for n in dim]
            for place, size in _implied_sizes(node.target, arguments, at):
                if not 0 <= place < len(parts):
                    raise of.error(node, f"there is no dim {place} in a value of {len(parts)}", value)
                if parts[place] != size:
                    raise of.error(
                        node,
                        f"its piece sizes need an operand with {size} in dim {place}, but {value} has {parts[place]}",
                        value,
                    )
            want = transfers.local_shape(node.target, source.shape, arguments, at)
    if record.span is not None:
        check_span(of, node, value, record, arguments)
    elif want != record.type.shape:
        raise of.error(node, f"its result is {list(want)}", value)


def check_exchange(of: Subject, node: fx.Node, record: Record, arguments: Mapping[str, Any]) -> None:
    """Check that the Layouts at both ends agree with this rank's operand and result."""
    name, values, rank = transfers.BY_FUNCTION[node.target].name, operands(node), of.program.rank
    for key in ("splits", "source", "shape", *(("axis",) if node.target is transfers.redistribute else ("home",))):
        if key not in arguments:
            raise of.error(
                node,
                f"at the level {of.program.level} it needs an argument {key}, which describes the ends of the exchange",
                *values,
            )
    try:
        ends = transfers.Ends.of(arguments, of.program.meshes)
    except (KeyError, ValueError) as error:
        raise of.error(node, f"the ends of the exchange are wrong: {error}", *values) from None
    operand_type = None if not values else record_of(values[0]).type
    on_source, on_target = rank in ends.source.mesh, rank in ends.target.mesh
    if on_source != bool(values) or (
        not on_target if node.target is not transfers.send else on_target or not on_source
    ):
        raise of.error(node, f"rank {rank} is not on the mesh that {name} names", *values)
    for type, layout, verb in (
        (operand_type, ends.source, "takes"),
        (record.type, ends.source if node.target is transfers.send else ends.target, "makes"),
    ):
        if type is None:
            continue
        want = layout.attr.local_shape(ends.shape, layout.mesh, layout.mesh.coordinates(rank))
        if not isinstance(type, TensorType) or type.shape != want:
            raise of.error(node, f"rank {rank} {verb} a piece of {list(want)} there, not {print_type(type)}", *values)
    dtypes = {type.dtype for type in (operand_type, record.type) if isinstance(type, TensorType)}
    if len(dtypes) > 1:  # a message has the bytes of the operand; another rank waits for those of the result
        raise of.error(node, f"{name} does not convert: its operand and its result have one dtype", *values)


def _implied_sizes(function: Any, arguments: Mapping[str, Any], at: Mapping[str, int]) -> list[tuple[int, int]]:
    """Return the (dim, size) of the operand that the piece sizes imply."""
    index = index_along(arguments["axis"], at)
    if function in (transfers.all_gather, transfers.pend):
        return [(arguments["dim"], arguments["sizes"][index])]
    if function is transfers.all_to_all:
        return [(arguments["source"], arguments["sizes"][index]), (arguments["target"], sum(arguments["new_sizes"]))]
    return [(arguments["dim"], sum(arguments["sizes"]))]


@dataclass
class Subject:
    """A program that is verified.

    Attributes:
        made_by: the pass that made it, which errors name.
        unwaited: the collectives that are started and not waited for yet.
        messages: message → the lines that start its members, so far; ``waited``: those of them that are waited for.
        last_message: the message of the last line, and whether it waits for it.
        right: Layouts that are right for values of a shape. A program has few.
    """

    program: Program
    made_by: str
    unwaited: dict[fx.Node, None] = field(default_factory=dict)
    messages: dict[str, list[fx.Node]] = field(default_factory=dict)
    waited: dict[str, list[fx.Node]] = field(default_factory=dict)
    last_message: tuple[str, bool] = ("", False)
    right: set[tuple[Layout, tuple[int, ...]]] = field(default_factory=set)

    @cached_property
    def drawn_alike(self) -> dict[fx.Node, fx.Node]:
        """Op → an earlier op whose random numbers it draws again."""
        return drawn_alike(self.program.nodes)

    @cached_property
    def started_before(self) -> dict[fx.Node, fx.Node]:
        """State that the run before has started → the start of the same collective, which replaces it."""
        return started_states(self.program)

    def head(self, name: str = "") -> str:
        """Return the first line of an error: ``reshard left relu inconsistent``, or without the pass if it is not
        known."""
        if self.made_by:
            return f"{self.made_by} left {name or 'the program'} inconsistent\n"
        return f"this {self.program.level} program is inconsistent{name and f' at {name}'}\n"

    def error(self, node: fx.Node, why: str, *operands: object) -> VerifyError:
        """Return an error with the offending lines, the user's source line, the rule and the remedy."""
        lines = []
        for value in dict.fromkeys((*operands, node)):
            if isinstance(value, fx.Node) and value.op != "output" and has_record(value):
                source = record_of(value).source if value is node else ""
                lines.append(f"  {self.line(value)}{source and f'          {source}'}\n")
        return VerifyError(f"{self.head(node.name)}{''.join(lines)}  {why}")

    def line(self, node: fx.Node) -> str:
        try:
            return print_node(self.program, node)
        except (KeyError, TypeError, ValueError):  # a record that is broken
            return f"  {node.name} does not print"
