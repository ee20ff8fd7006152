"""Make calls of a local program ready to be timed: functions without arguments that do what a step does.

An update of a parameter runs in place, as it does in a step. A collective starts and is waited for in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from autopar.costs.calls import EXCHANGE, LOCAL, kind_of
from autopar.ir import transfers
from autopar.ir.nodes import called_op, operands, tensor_type
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.ir.streams import Groups
from autopar.optimizers import IN_PLACE, SHARED
from autopar.runtime.lowering.collectives import Exchange, exchange, start_all_reduce, start_all_reduce_in_place
from autopar.runtime.lowering.communication import exchange_of, group_of
from autopar.runtime.lowering.local_transfers import call_of
from autopar.runtime.measuring.clock import Call
from autopar.runtime.measuring.operands import Operands
from autopar.runtime.simulation.simulate import ANY_STRIDES


def ready_compute(program: Program, node: fx.Node, operands_of: Operands) -> Call:
    """Return the call of an op or a local transfer of a local program."""
    if kind_of(node) == LOCAL:
        function, args = call_of(program, node)
        return partial(function, operands_of.of_value(operands(node)[0]), *args)
    op, (args, kwargs) = called_op(node), operands_of.of_call(node)
    if op in IN_PLACE:
        count = len(args) - SHARED[op]
        (parameter, gradient, *states), shared = args[:count], args[count:]
        return partial(IN_PLACE[op], [parameter], [gradient], [[state] for state in states], *shared, **kwargs)
    return partial(ANY_STRIDES.get(op, op), *args, **kwargs)


def ready_exchange(program: Program, node: fx.Node, groups: Groups, device: torch.device) -> Call:
    """Return the call of a collective of this rank's local program; all ranks of its group call it together."""
    assert kind_of(node) == EXCHANGE
    collective = exchange_of(program, node, groups)
    return _run(collective, tensor_type(operands(node)[0]), device, node.target is transfers.redistribute)


def ready_small_exchange(program: Program, node: fx.Node, groups: Groups, device: torch.device) -> Call:
    """Return the call of the same collective on one number for each rank: what it costs to start."""
    arguments, dtype = transfers.arguments(node.target, node.args, node.kwargs), tensor_type(operands(node)[0]).dtype
    ranks, group = group_of(program, node, groups)
    count = len(ranks)
    function, given, piece, result = SMALL[node.target](count)
    given = {**given, "op": arguments["op"]} if "op" in arguments else given
    collective = exchange(function, given, piece, result, dtype, ranks.index(program.rank), count, group)
    return _run(collective, TensorType(tuple(piece), dtype), device, False)


Small = tuple[Callable[..., Any], dict[str, Any], Sequence[int], Sequence[int]]


def _to_all(count: int) -> Small:
    ones = [1] * count
    return transfers.all_to_all, {"source": 0, "target": 1, "sizes": ones, "new_sizes": ones}, (1, count), (count, 1)


# transfer → for a number of ranks: the transfer that is run, its arguments, the shapes of its operand and result
SMALL: dict[Any, Callable[[int], Small]] = {
    transfers.all_reduce: lambda count: (transfers.all_reduce, {}, (1,), (1,)),
    transfers.all_gather: lambda count: (transfers.all_gather, {"dim": 0, "sizes": [1] * count}, (1,), (count,)),
    transfers.reduce_scatter: lambda count: (
        transfers.reduce_scatter, {"dim": 0, "sizes": [1] * count}, (count,), (1,),
    ),
    transfers.all_to_all: _to_all,
    transfers.redistribute: _to_all,
}  # fmt: skip


def _run(collective: Exchange, type: TensorType, device: torch.device, keeps: bool) -> Call:
    """Return a call that starts a collective on zeros, whose sums stay zeros, and waits for it.

    Args:
        keeps: whether its end also takes the operand.
    """
    x = torch.zeros(type.shape, dtype=type.dtype, device=device)
    start = start_all_reduce_in_place if collective.start is start_all_reduce else collective.start

    def call() -> torch.Tensor:
        value = x
        for function, args in collective.before:
            value = function(value, *args)
        started = start(value, *collective.start_args)
        kept = (value,) if keeps else ()
        value = collective.finish(started, *kept, *collective.finish_args)
        for function, args in collective.after:
            value = function(value, *args)
        return value

    return call
