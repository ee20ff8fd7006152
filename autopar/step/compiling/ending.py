"""Describe the end of a step to the search of its micro-batch: which ops update each parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from autopar.ir.layout import DistAttr
from autopar.ir.nodes import is_getitem, operands, record_of, tensor_type
from autopar.ir.record import TensorType
from autopar.optimizers import Update
from autopar.plan.plan import SEARCH
from autopar.rules.binding import bind_node
from autopar.search.problem.ending import Ending, UpdateOp
from autopar.step.compiling.update import Norm, Trained, Untrained, update_of
from autopar.step.options import StepOptions

Updating = tuple[Update, Mapping[str, TensorType]]  # how a parameter is updated, and the types of its states


def ending_of(
    updates: Mapping[str, Updating],
    parameters: Mapping[str, TensorType],
    sums: Mapping[str, TensorType],
    kept: Mapping[str, torch.dtype],
    options: StepOptions,
    state_of: Callable[[DistAttr, Sequence[int]], DistAttr],
) -> Ending:
    """Return the end of a step.

    Only updates that are one op are priced, and the norm of each gradient; reductions of the norm are not.

    Args:
        updates: trained parameter → its update.
        parameters: parameter → its type.
        sums: parameter → the type of the sum of its gradients; others than the trained are only measured.
        kept: the dtype of a parameter between steps, if the micro-batch takes a low-precision copy of it.
        options: of the step.
        state_of: the layout of the optimizer's state, from the home and the shape of a parameter.
    """
    known: dict[object, tuple[UpdateOp, ...]] = {}
    ops = {}
    for name, gradient in sums.items():
        type, (update, states) = parameters[name], updates.get(name, (None, {}))
        type = replace(type, dtype=kept.get(name, type.dtype))
        key = type, gradient, update and (update.function, update.states, tuple(states.items()))
        if key not in known:
            known[key] = _update_ops(type, gradient, update, states, options)
        ops[name] = known[key]
    held: dict[str, tuple[TensorType, ...]] = {}
    for name, (_, types) in updates.items() if not options.offload else ():
        type = parameters[name]
        averages = [TensorType(type.shape, kept.get(name, type.dtype))] if options.ema is not None else []
        held[name] = (*types.values(), *averages)
    return Ending(
        options.count, state_of, ops, kept, options.zero in (0, 1, 2), held, options.measured,
        _remedies(options), frozenset(updates), options.zero == SEARCH,
    )  # fmt: skip


def _remedies(options: StepOptions) -> tuple[str, ...]:
    """Return the options that take less memory, and are neither used yet nor compared."""
    used = {
        "zero=3": options.zero in (3, SEARCH),
        'recompute="blocks"': options.recompute is not None,
        f"microbatches={2 * options.count}": False,
        "offload=True": options.offload,
    }
    left = [option for option, is_used in used.items() if not is_used]
    return tuple(option for option in left if option.partition("=")[0] not in options.compared)


def _update_ops(
    type: TensorType, gradient: TensorType, update: Update | None, states: Mapping[str, TensorType],
    options: StepOptions,
) -> tuple[UpdateOp, ...]:  # fmt: skip
    """Return the ops of an update that read or make a value of the parameter's shape."""
    whole, device = DistAttr.replicated(len(type.shape)), torch.device("meta")
    trained = [] if update is None or update.op is None else [Trained("w", type, gradient, whole, update, states, 0)]
    untrained = [Untrained("w", gradient, whole)] if update is None else []
    if not trained and not untrained:
        return ()
    norm = Norm(options.clip_norm, untrained) if options.measured else None
    scaling = options.loss_scale if options.scaled else None
    ending = update_of(
        trained, TensorType((), torch.float32), device, norm=norm, scaling=scaling,
        ema=options.ema if trained else None,
    )  # fmt: skip
    found = []
    for node in ending.program.nodes:
        if node.op != "call_function" or is_getitem(node):
            continue
        record, read = record_of(node), [tensor_type(value) for value in operands(node)]
        results = record.type if isinstance(record.type, tuple) else (record.type,)
        if any(value is not None and value.shape == type.shape for value in (*read, *results)):
            writes = tuple(None if value is None else value.dtype for value in results)
            found.append(UpdateOp(bind_node(node), tuple(value.dtype for value in read), writes))
    return tuple(found)
