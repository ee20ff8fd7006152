"""Check the pieces of one rank: what local and scheduled programs promise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import fx

from autopar.ir import transfers
from autopar.ir.nodes import node_at, operands, record_of, tensor_type
from autopar.ir.record import DTYPE_NAMES, Record, TensorType
from autopar.ir.subaxes import index_along
from autopar.ir.text.printer import print_type
from autopar.verify.subject import Subject

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
