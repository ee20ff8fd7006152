"""Make the program of the counts that a mean loss divides by, over all micro-batches of a step.

Where micro-batches have unequal numbers of tokens, the mean of their means is not the mean over all tokens. A count is
a sum over the batch that is computed from inputs alone and divides a term of the loss (``terms``). It is known before
the forward runs, so that each micro-batch can divide by the mean count instead of by its own count:

    sum_1 : i64[] = sum(ne)                                count : f32[] = input('count.0')
    loss : f32[] = div.Tensor(sum_2, sum_1)          →     loss : f32[] = div.Tensor(sum_2, count)

The mean of these losses is Σ sums / Σ counts, which is the loss of the whole batch. The same holds for the gradients. A
micro-batch without any token does not divide by zero.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.ir.nodes import behind, name_of, operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import Record, TensorType
from autopar.ir.value_names import batch_input_name, total_name
from autopar.step.batches.terms import Terms
from autopar.step.compiling.graph_builder import GraphBuilder, type_of
from autopar.torch_private import aten


def count_program(program: Program, terms: Terms, microbatches: int, device: torch.device) -> Program:
    """Make the traced program of the mean counts of all micro-batches.

    It returns one count, without dims, for each divisor, in order.

    labels_0 : i64[6] = input('labels.0')
    labels_1 : i64[6] = input('labels.1')
    …
    sum_1 : i64[] = sum(ne)
    sum_2 : i64[] = sum(ne_1)
    add : i64[] = add.Tensor(sum_1, sum_2)
    div : f32[] = div.Scalar(add, 2)
    """
    builder = GraphBuilder(device)
    sums = list(dict.fromkeys(node for nodes in terms.counts.values() for node in nodes))
    needed = behind(terms.counts)
    between = needed - behind(sums)
    counted = [node for node in program.nodes if node in needed]
    same = {
        node: builder.placeholder(node.name, record_of(node))
        for node in counted
        if node.op == "placeholder" and record_of(node).role != "input"
    }
    of_each = []
    for k in range(microbatches):
        inputs = {
            node: _numbered(builder, node, k) for node in counted if node.op == "placeholder" and node not in same
        }
        of_each.append({**same, **inputs})
    totals: dict[fx.Node, fx.Node] = {}
    for values in of_each:
        for node in counted:
            if node.op != "placeholder" and node not in between:
                values[node] = builder.copy(node, values, program.constants)
        for node in sums:
            builder.about = record_of(node)
            totals[node] = (
                builder.inline(aten.add.Tensor, totals[node], values[node]) if node in totals else values[node]
            )
    whole = {**of_each[0], **totals}
    for node in counted:
        if node in between and node.op != "placeholder":
            whole[node] = builder.copy(node, whole, program.constants)
    return builder.program(
        [
            builder.inline(mean, whole[divisor], microbatches, counted_as(terms, divisor), name="count")
            for divisor in terms.counts
        ]
    )


def count_parts(program: Program, terms: Terms, microbatches: int, device: torch.device) -> tuple[Program, Program]:
    """Make two traced programs that compute the mean counts together, of a size that does not depend on micro-batches.

    The first runs for each micro-batch and returns its sums; the second takes the totals of these, and returns one
    count for each divisor, in order.

    labels : i64[6] = input                     total_0 : i64[] = input('.total.0')
    ne : bool[6] = ne(labels, -100)             count : f32[] = div.Scalar(total_0, 2)
    sum_1 : i64[] = sum(ne)                     return (count,)
    return (sum_1,)
    """
    sums = list(dict.fromkeys(node for nodes in terms.counts.values() for node in nodes))
    return _sums_of_one(program, sums, device), _counts_of_totals(program, terms, sums, microbatches, device)


def _sums_of_one(program: Program, sums: list[fx.Node], device: torch.device) -> Program:
    builder, needed = GraphBuilder(device), behind(sums)
    values = _copied(builder, program, needed, {})
    return builder.program([values[node] for node in sums])


def _counts_of_totals(
    program: Program, terms: Terms, sums: list[fx.Node], microbatches: int, device: torch.device
) -> Program:
    builder = GraphBuilder(device)
    totals = {
        node: builder.placeholder(
            f"total_{k}", Record(TensorType((), type_of(node).dtype), role="input", name=total_name(k))
        )
        for k, node in enumerate(sums)
    }
    needed: set[fx.Node] = set()
    open_ = list(terms.counts)
    while open_:
        node = open_.pop()
        if node not in totals and node not in needed:
            needed.add(node)
            open_ += operands(node)
    values = _copied(builder, program, needed, totals)
    return builder.program(
        [
            builder.inline(mean, values[divisor], microbatches, counted_as(terms, divisor), name="count")
            for divisor in terms.counts
        ]
    )


def _copied(
    builder: GraphBuilder, program: Program, needed: set[fx.Node], known: dict[fx.Node, fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Copy what is needed and not known yet; return all values."""
    values = dict(known)
    for node in program.nodes:
        if node in needed and node not in values:
            values[node] = (
                builder.placeholder(node.name, record_of(node)._replace(name=name_of(node)))
                if node.op == "placeholder"
                else builder.copy(node, values, program.constants)
            )
    return values


def counted_as(terms: Terms, divisor: fx.Node) -> torch.dtype:
    """Return the dtype of a count: the dtype of the sums that it divides."""
    return next(type_of(division).dtype for division, by in terms.divisions.items() if by is divisor)


def mean(total: torch.Tensor, microbatches: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the mean count of a micro-batch, without dims."""
    return total.to(dtype) / microbatches


def _numbered(builder: GraphBuilder, node: fx.Node, k: int) -> fx.Node:
    record = record_of(node)
    return builder.placeholder(f"{node.name}_{k}", record._replace(name=batch_input_name(record.name or node.name, k)))
