"""Clean a traced graph: each function takes time linear in the size of the graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from autopar.capture.decompose.table import (
    ARANGE,
    ARANGE_FROM,
    COPY,
    FULL,
    IDENTITIES,
    INDEX,
    SQUEEZE,
    SYNONYMS,
    TRANSPOSE,
    UNREAD,
    VIEWS,
    ZEROS,
)
from autopar.capture.provenance import Origin
from autopar.ir.nodes import node_at, record_of, set_record
from autopar.ir.ops.seeded_random import SHAPED
from autopar.ir.record import Result
from autopar.torch_private import rename


def simplify(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Simplify a graph: drop identities and double transposes, and read each constant once.

    Synonyms of an op get one name. A random op that only needs a shape reads the original tensor and not a tensor of
    zeros that was made for its shape.

    Returns:
        removed node → the node that replaces it.
    """
    constants: dict[str, fx.Node] = {}
    replaced: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            replaced[node] = constants.setdefault(node.target, node)
        elif node.target in IDENTITIES and node.op == "call_function":
            replaced[node] = node.args[0]
        elif node.target in SYNONYMS:
            node.target = SYNONYMS[node.target]
            rename(node, node.target.__name__.partition(".")[0])
        elif node.target is COPY and _alike(node, node.args[1]):
            replaced[node] = node.args[1]
        elif node.target in SHAPED and node.args[0].target is ZEROS and _alike(node.args[0], node.args[0].args[0]):
            node.replace_input_with(node.args[0], node.args[0].args[0])
        elif node.target is TRANSPOSE and node.args[0].target is TRANSPOSE:
            replaced[node] = node.args[0].args[0]
        if node in replaced:
            node.replace_all_uses_with(replaced[node])
    return {old: new for old, new in replaced.items() if old is not new}


def drop_unread(graph: fx.Graph, origins: dict[fx.Node, Origin]) -> None:
    """Replace a number that an op takes but does not read by zero, so that the ops that compute it can go.

    nll_loss_forward[1] : f32[] +dp = …                      full : f32[] = full([], 0)
    a = nll_loss_backward(…, sum, -100, getitem_1)    →      a = nll_loss_backward(…, sum, -100, full)
    """
    for node in graph.nodes:
        if node.target in UNREAD and (value := node.args[UNREAD[node.target]]).op == "call_function":
            with graph.inserting_before(node):
                unread = value.meta["val"]
                zero = graph.call_function(FULL, ([], 0), {"dtype": unread.dtype, "device": unread.device})
            rename(zero, "full")
            zero.meta = dict(value.meta)
            origins[zero] = origins.get(node, Origin())
            node.update_arg(UNREAD[node.target], zero)


def index_own_rows(graph: fx.Graph, origins: dict[fx.Node, Origin]) -> None:
    """Drop an index by 0, 1, 2, … in a dim of its own: each row indexes only itself, so it need not be gathered.

        rows : i64[2 1 1 1] = unsqueeze(arange(2), …)                  k_1 : i64[1 1 6] = squeeze.dims(k, [0])
        y : bool[2 1 1 6] = index.Tensor(mask, [rows, k])       →      y : bool[2 1 1 6] = index.Tensor(mask, [None, k_1])

    The masks of Hugging Face's models index their padding in this way.
    """  # noqa: E501
    for node in graph.nodes:
        if node.target is not INDEX or len(node.args[1]) < 2 or None in node.args[1]:
            continue
        table, (rows, *others) = node.args[:2]
        shapes = [index.meta["val"].shape for index in (rows, *others)]
        length = max(map(len, shapes))
        apart = (
            len(shapes[0]) == length > 1
            and all(n == 1 for n in shapes[0][1:])
            and all(len(s) < length or s[0] == 1 for s in shapes[1:])
        )
        if not apart or not _counts_up(rows, table.meta["val"].shape[0]):
            continue
        kept_indices: list[fx.Node | None] = [None]
        for index, shape in zip(others, shapes[1:], strict=True):
            if len(shape) == length:
                with graph.inserting_before(node):
                    squeezed = graph.call_function(SQUEEZE, (index, [0]))
                rename(squeezed, "squeeze")
                squeezed.meta = {**index.meta, "val": index.meta["val"].squeeze(0)}
                origins[squeezed] = origins.get(node, Origin())
                index = squeezed
            kept_indices.append(index)
        node.args = (table, kept_indices)


def _counts_up(node: fx.Node, size: int) -> bool:
    """Return whether a value holds 0, 1, …, ``size`` - 1, in this order."""
    while node.target in VIEWS and (source := node_at(node)).meta["val"].numel() == size:
        node = source
    return (node.target is ARANGE and node.args == (size,)) or (node.target is ARANGE_FROM and node.args == (0, size))


def _alike(a: fx.Node, b: fx.Node) -> bool:
    """Return whether two values have one shape, dtype and device."""
    left, right = a.meta["val"], b.meta["val"]
    return (left.shape, left.dtype, left.device) == (right.shape, right.dtype, right.device)


def merge_views(graph: fx.Graph, origins: Mapping[fx.Node, Origin]) -> dict[fx.Node, fx.Node]:
    """Merge equal views of one phase into the first, so that a transfer that they need is inserted once.

    Returns:
        removed node → the node that replaces it.
    """
    first: dict[Any, fx.Node] = {}
    replaced: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target in VIEWS and not node.kwargs:
            twin = first.setdefault((node.target, repr(node.args), origins.get(node, Origin()).phase), node)
            if twin is not node:
                node.replace_all_uses_with(twin)
                replaced[node] = twin
    return replaced


def sweep(graph: fx.Graph) -> None:
    """Erase the nodes that nothing reads. This is safe because every op is functional."""
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)


def forward_first(graph: fx.Graph, results: Sequence[Result], values: Sequence[fx.Node]) -> None:
    """Move all values that returned values and states depend on before the backward.

    Functionalizing may put views of theirs later.
    """
    of_tangents: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and any(v in of_tangents or is_tangent(v) for v in node.all_input_nodes):
            of_tangents.add(node)
    needed: set[fx.Node] = set()
    open_ = [value for value, result in zip(values, results, strict=True) if result.kind != "grad"]
    open_ += [
        n for n in graph.nodes if n.op == "call_function" and n not in of_tangents and record_of(n).phase == "forward"
    ]
    while open_:
        node = open_.pop()
        if node.op in ("call_function", "get_attr") and node not in needed:
            needed.add(node)
            open_ += node.all_input_nodes
    first: fx.Node | None = None
    for node in list(graph.nodes):
        if node.op not in ("call_function", "get_attr"):
            continue
        record = record_of(node)
        if node in of_tangents:
            set_record(node, record._replace(phase="backward"))
            first = first or node
        elif node in needed or record.phase == "forward":
            set_record(node, record._replace(phase="forward"))
            if first is not None:
                first.prepend(node)
        else:
            first = first or node


def is_tangent(node: fx.Node) -> bool:
    return node.op == "placeholder" and record_of(node).role == "tangent"


def unfake(graph: fx.Graph) -> None:
    """Drop the fake tensors of the trace, which hold memory and modes; a consumer in torch makes them again."""
    for node in graph.nodes:
        for key in list(node.meta):
            if key != "autopar":
                del node.meta[key]
