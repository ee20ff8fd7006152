"""Counts: what a mean loss divides by, over all micro-batches of a step.

Where micro-batches have unequal numbers of tokens, the mean of their means is not the mean over all tokens. A count is a sum
over the batch that is made of inputs alone and divides a term of the loss. It is known before the forward runs, so that
each micro-batch can divide by the mean count instead of by its own:

    getitem_1 : f32[] = nll_loss_forward[1]                count : f32[] = input('count.0')
    loss : f32[] = div.Tensor(getitem, getitem_1)    →     loss : f32[] = div.Tensor(getitem, count)

The mean of these losses is Σ sums / Σ counts, that of the whole batch, and so are their gradients. A micro-batch without any
token divides by no zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from autopar.program import Program, behind, is_getitem, operands, record_of
from autopar.record import TensorType
from autopar.step.assembly import Assembly, type_of

aten = torch.ops.aten

DIVISIONS = {aten.div.Tensor}
SUMS = {aten.sum.default, aten.count_nonzero.default}
WEIGHTED = {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}  # sums; their second result is the total weight
TERMS = {  # ops through which the terms of a loss reach it
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.mul.Scalar, aten.div.Scalar, aten.neg.default, aten._to_copy.default, aten.view.default,
}  # fmt: skip
MEASURES = {  # ops between sums and what divides
    aten._to_copy.default, aten.clamp.default, aten.clamp_min.default, aten.view.default, aten.maximum.default, aten.mul.Scalar, aten.add.Tensor,
    aten.add.Scalar,
}  # fmt: skip


@dataclass(frozen=True)
class Counts:
    """The counts of a traced program.

    Attributes:
        sums: divisor → the sums over the batch that it is made of.
        divisions: those by a count, of the forward and of the backward → the divisor.
        others: terms of the loss that are no means over the batch, in which each micro-batch has the same say.
    """

    sums: Mapping[fx.Node, tuple[fx.Node, ...]]
    divisions: Mapping[fx.Node, fx.Node]
    others: tuple[fx.Node, ...] = ()


def counts_of(program: Program, loss: fx.Node) -> Counts:
    """The counts by which terms of ``loss`` are divided; linear in the graph."""
    fixed, varying = _of_inputs_alone(program), _varying(program)
    sums: dict[fx.Node, tuple[fx.Node, ...]] = {}
    terms: set[fx.Node] = set()
    others: dict[fx.Node, None] = {}
    open_ = [(loss, False)]  # and whether it has been divided
    while open_:
        node, divided = open_.pop()
        if (node in fixed and not divided) or node not in varying:
            continue  # a number that the loss is shifted by, and what all micro-batches have alike, as a penalty of weights
        terms.add(node)
        if node.target in DIVISIONS:
            if found := _sums_behind(node.args[1], fixed):  # type: ignore[arg-type]
                sums[node.args[1]] = found  # type: ignore[index]
            open_.append((node.args[0], bool(found) or node.args[1] in fixed))  # type: ignore[arg-type]
        elif node.target in TERMS and _is_scalar(node) and (moving := [value for value in operands(node) if value not in fixed]) and (
            len(moving) == 1 or node.target is not aten.mul.Tensor
        ):
            open_ += [(value, divided or node.target is aten.div.Scalar) for value in moving]
        elif not (divided and (node.target in SUMS or (is_getitem(node) and node.args[0].target in WEIGHTED))):  # type: ignore[union-attr]
            others[node] = None
    divisions = {user: count for count in sums for user in count.users if _divides(user, count, terms)}
    return Counts(sums, divisions, tuple(others))


def _divides(user: fx.Node, count: fx.Node, terms: set[fx.Node]) -> bool:
    """Whether a count divides here: a term of the loss, or its gradient."""
    return user.target in DIVISIONS and user.args[1] is count and (user in terms or record_of(user).phase == "backward")


def _is_scalar(node: fx.Node) -> bool:
    type = record_of(node).type
    return isinstance(type, TensorType) and not type.shape


def _varying(program: Program) -> set[fx.Node]:
    """The values that one micro-batch has otherwise than another."""
    found: set[fx.Node] = set()
    for node in program.nodes:
        alike = record_of(node).role in ("param", "buffer") if node.op == "placeholder" else found.isdisjoint(operands(node))
        if not alike:
            found.add(node)
    return found


def _of_inputs_alone(program: Program) -> set[fx.Node]:
    """The values that are computed from inputs and constants alone, without randomness."""
    found: set[fx.Node] = set()
    for node in program.nodes:
        if node.op == "placeholder":
            type = record_of(node).type
            if record_of(node).role in ("input", "buffer") and isinstance(type, TensorType):
                found.add(node)
        elif node.op == "get_attr" or (node.op == "call_function" and all(value in found for value in operands(node))):
            found.add(node)
    return found


def _sums_behind(count: fx.Node, fixed: set[fx.Node]) -> tuple[fx.Node, ...]:
    """The sums over the batch that a divisor is made of, by ops on single numbers; none where it is no count."""
    found: list[fx.Node] = []
    open_ = [count]
    while open_:
        node = open_.pop()
        if node not in fixed or not _is_scalar(node):
            return ()
        if node.target in SUMS:
            found.append(node)
        elif node.target in MEASURES:
            open_ += operands(node)
        elif node.op != "get_attr":
            return ()
    return tuple(dict.fromkeys(found))


def count_program(program: Program, counts: Counts, microbatches: int, device: torch.device) -> Program:
    """The traced program that makes the mean counts of all micro-batches: one result for each divisor, in order.

        labels_0 : i64[6] = input('labels.0')
        labels_1 : i64[6] = input('labels.1')
        …
        sum_1 : i64[] = sum(ne)
        sum_2 : i64[] = sum(ne_1)
        add : i64[] = add.Tensor(sum_1, sum_2)
        div : f32[] = div.Scalar(add, 2)
    """
    made = Assembly(device)
    sums = list(dict.fromkeys(one for some in counts.sums.values() for one in some))
    needed = behind(sums)
    own = [node for node in program.nodes if node in needed]
    same = {node: made.placeholder(node.name, record_of(node)) for node in own if node.op == "placeholder" and record_of(node).role != "input"}
    of_each = []
    for k in range(microbatches):
        inputs = {node: _numbered(made, node, k) for node in own if node.op == "placeholder" and node not in same}
        of_each.append({**same, **inputs})
    totals: dict[fx.Node, fx.Node] = {}
    for values in of_each:
        for node in own:
            if node.op != "placeholder":
                values[node] = made.copy(node, values, program.constants)
        for one in sums:
            made.about = record_of(one)
            totals[one] = made.inline(aten.add.Tensor, totals[one], values[one]) if one in totals else values[one]
    results = []
    for divisor, some in counts.sums.items():
        values = {one: totals[one] for one in some}
        between = behind([divisor]) - behind(some) | {divisor}
        for node in program.nodes:
            if node in between and node not in values:
                values[node] = made.copy(node, values, program.constants)
        results.append(made.inline(mean, values[divisor], microbatches, counted_as(counts, divisor), name="count"))
    return made.program(results)


def counted_as(counts: Counts, divisor: fx.Node) -> torch.dtype:
    """The dtype of a count: that of the sums it divides."""
    return next(type_of(division).dtype for division, by in counts.divisions.items() if by is divisor)


def mean(total: torch.Tensor, microbatches: int, dtype: torch.dtype) -> torch.Tensor:
    return total.to(dtype) / microbatches


def _numbered(made: Assembly, node: fx.Node, k: int) -> fx.Node:
    record = record_of(node)
    return made.placeholder(f"{node.name}_{k}", record._replace(name=f"{record.name or node.name}.{k}"))
