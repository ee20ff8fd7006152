"""Check the pieces of one rank: what local and scheduled programs promise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import fx

from autopar.ir import transfers
from autopar.ir.nodes import node_at, operands, record_of, tensor_type
from autopar.ir.record import Record, TensorType
from autopar.ir.text.printer import print_type
from autopar.verify.subject import Subject

PIECES: dict[Any, tuple[str, ...]] = {  # transfer → its arguments with piece sizes, at the level local
    transfers.all_gather: ("sizes",),
    transfers.slice: ("sizes",),
    transfers.reduce_scatter: ("sizes",),
    transfers.all_to_all: ("sizes", "new_sizes"),
    transfers.pend: ("sizes",),
}
CHUNKED = (transfers.all_reduce, transfers.reduce_scatter, transfers.all_gather)  # what can be sent in chunks
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
    if record.span is not None:
        record = check_span(of, node, record, arguments, at)
    check_pieces(of, node, operands(node)[0], record, arguments, at)


def check_span(
    of: Subject, node: fx.Node, record: Record, arguments: Mapping[str, Any], at: Mapping[str, int]
) -> Record:
    """Check the elements that a chunk sends; return the record that the whole transfer would have."""
    (value,) = operands(node)
    source, span = record_of(value).type, record.span
    assert span is not None
    if node.target not in CHUNKED or not isinstance(source, TensorType):
        raise of.error(node, "only an all-reduce, a reduce-scatter and a gather can be sent in chunks", value)
    sizes = tuple(arguments.get("sizes") or (1,))
    if len(set(sizes)) > 1:
        raise of.error(node, f"pieces of unequal sizes {list(sizes)} cannot be sent in chunks", value)
    elements = math.prod(source.shape)
    elements = elements // len(sizes) if node.target is transfers.reduce_scatter else elements
    if not 0 <= span[0] < span[1] <= elements:
        raise of.error(node, f"the chunk is not within the {elements} elements of {value}", value)
    rows = (len(sizes),) if node.target is transfers.all_gather else ()
    if record.type != TensorType((*rows, span[1] - span[0]), source.dtype):
        raise of.error(node, f"the chunk has {span[1] - span[0]} elements{' of each rank' * bool(rows)}", value)
    whole = source.shape if node.target is transfers.all_reduce else transfers.local_shape(
        node.target, source.shape, arguments, at
    )  # fmt: skip
    return record._replace(type=TensorType(whole, source.dtype))


def check_join(of: Subject, node: fx.Node, record: Record, arguments: Mapping[str, Any]) -> None:
    """Check that the chunks that are joined are all of one transfer, in the order of their elements."""
    chunks = operands(node)
    starts = [node_at(chunk) for chunk in chunks if chunk.target is transfers.wait]
    starts = [of.started_before.get(start, start) for start in starts]
    spans = [record_of(start).span for start in starts]
    if len(starts) < len(chunks) or None in spans or len({(start.target, start.args) for start in starts}) > 1:
        raise of.error(node, "only chunks of one transfer, which were waited for, are joined", *chunks)
    ends = [span[1] for span in spans if span]
    if [span[0] for span in spans if span] != [0, *ends[:-1]]:
        raise of.error(node, "the chunks that are joined lack elements, or are not in the order of these", *chunks)
    first = starts[0]
    elements = math.prod(tensor_type(operands(first)[0]).shape)
    sizes = transfers.arguments(first.target, first.args, first.kwargs).get("sizes") or (1,)
    if ends[-1] != (elements // len(sizes) if first.target is transfers.reduce_scatter else elements):
        raise of.error(node, "the last elements of the transfer are not joined", *chunks)
    if not isinstance(record.type, TensorType) or tuple(arguments["shape"]) != record.type.shape:
        raise of.error(node, f"its result is {list(arguments['shape'])}", *chunks)


def check_pieces(
    of: Subject, node: fx.Node, value: fx.Node, record: Record, arguments: Mapping[str, Any], at: Mapping[str, int]
) -> None:
    """Check that the explicit piece sizes agree with the local shapes of operand and result."""
    source = record_of(value).type
    if not isinstance(source, TensorType) or not isinstance(record.type, TensorType):
        raise of.error(node, f"{transfers.BY_FUNCTION[node.target].name} takes one tensor and makes one", value)
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
    if want != record.type.shape:
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
    index = at[arguments["axis"]]
    if function in (transfers.all_gather, transfers.pend):
        return [(arguments["dim"], arguments["sizes"][index])]
    if function is transfers.all_to_all:
        return [(arguments["source"], arguments["sizes"][index]), (arguments["target"], sum(arguments["new_sizes"]))]
    return [(arguments["dim"], sum(arguments["sizes"]))]
