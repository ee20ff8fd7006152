"""Accept writes into arguments that change nothing, as ``labels.masked_fill_(labels == -100, 0)`` without such labels.

The written values are computed from the arguments of the call. Where they are the old values, the step is captured
without the write; it compares them in each call, and raises an error where the write would change the argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autopar.ir.ops import assumptions  # noqa: F401  # it registers the op
from autopar.torch_private import FakeTensor, aten, draws_random, mutates, without_function_modes, without_modes

ASSUMED = torch.ops.autopar.assumed.default
MOST = 1000  # ops that the written values may be computed with


class _Unknown(Exception):
    pass


def changes_nothing(value: fx.Node, target: fx.Node, real: Mapping[fx.Node, torch.Tensor]) -> bool:
    """Return whether a value is that of ``target`` in this call; ``False`` if it depends on parameters or on chance.

    Args:
        real: placeholder → the tensor of the call, for arguments and buffers.
    """
    try:
        with without_modes(), without_function_modes(), torch.no_grad():
            return torch.equal(_computed(value, real), real[target])
    except _Unknown:
        return False


def check(graph: fx.Graph, value: fx.Node, target: fx.Node, returned: list[fx.Node], message: str, mode: Any) -> None:
    """Let the returned values, in place, raise an error in a call where a value is not that of ``target``.

    Args:
        mode: of the fake tensors of the trace.
    """

    def add(op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = graph.call_function(op, args, kwargs)
        with mode:
            fakes, named = fx.map_arg((args, kwargs), lambda x: x.meta["val"])
            node.meta["val"] = op(*fakes, **named)
        return node

    with graph.inserting_before(next(iter(reversed(graph.nodes)))):
        differs = add(aten.any.default, add(aten.ne.Tensor, value, target))
        broken = add(aten._to_copy.default, differs, dtype=torch.int64)
        returned[:] = [add(ASSUMED, one, broken, message) for one in returned]


def _computed(value: fx.Node, real: Mapping[fx.Node, torch.Tensor]) -> Any:
    known: dict[fx.Node, Any] = {}
    for node in _needed(value, real):
        if node.op == "placeholder":
            known[node] = real[node]
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return known[value]


def _needed(value: fx.Node, real: Mapping[fx.Node, torch.Tensor]) -> list[fx.Node]:
    """Return what a value is computed from, in order."""
    found: dict[fx.Node, None] = {}
    open_ = [value]
    while open_:
        node = open_.pop()
        if node in found:
            continue
        if node.op == "placeholder":
            tensor = real.get(node)
            if tensor is None or tensor.is_meta or isinstance(tensor, FakeTensor):
                raise _Unknown
        elif node.op != "call_function" or mutates(node.target) or draws_random(node.target, node.args, node.kwargs):
            raise _Unknown
        found[node] = None
        open_ += node.all_input_nodes
        if len(found) > MOST:
            raise _Unknown
    return [node for node in value.graph.nodes if node in found]
