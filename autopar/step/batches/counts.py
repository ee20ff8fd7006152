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

from collections.abc import Collection, Mapping

import torch
from torch import fx

from autopar.ir.nodes import behind, name_of, record_of
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
    builder, sums, needed = GraphBuilder(device), _sums(terms), behind(terms.counts)
    given = [node for node in program.nodes if node in needed and node.op == "placeholder"]
    same = {node: builder.placeholder(node.name, record_of(node)) for node in given if record_of(node).role != "input"}
    inputs = [{node: _numbered(builder, node, k) for node in given if node not in same} for k in range(microbatches)]
    values: dict[fx.Node, fx.Node] = {}
    totals: dict[fx.Node, fx.Node] = {}
    for own in inputs:
        copied = _copied(builder, program, behind(sums), {**same, **own})
        for node in sums:
            builder.about = record_of(node)
            totals[node] = builder.inline(aten.add.Tensor, totals[node], copied[node]) if values else copied[node]
        values = values or copied  # what does not depend on the batch is that of the first micro-batch
    values = _copied(builder, program, needed, {**values, **totals})
    return builder.program(_means(builder, terms, values, microbatches))


def count_parts(program: Program, terms: Terms, microbatches: int, device: torch.device) -> tuple[Program, Program]:
    """Make two traced programs that compute the mean counts together, of a size that does not depend on micro-batches.

    The first runs for each micro-batch and returns its sums; the second takes the totals of these, and returns one
    count for each divisor, in order.

    labels : i64[6] = input                     total_0 : i64[] = input('.total.0')
    ne : bool[6] = ne(labels, -100)             count : f32[] = div.Scalar(total_0, 2)
    sum_1 : i64[] = sum(ne)                     return (count,)
    return (sum_1,)
    """
    sums = _sums(terms)
    first = GraphBuilder(device)
    copied = _copied(first, program, behind(sums), {})
    of_one = first.program([copied[node] for node in sums])
    second = GraphBuilder(device)
    totals = {
        node: second.placeholder(
            f"total_{k}", Record(TensorType((), type_of(node).dtype), role="input", name=total_name(k))
        )
        for k, node in enumerate(sums)
    }
    values = _copied(second, program, behind(terms.counts, totals), totals)
    return of_one, second.program(_means(second, terms, values, microbatches))


def _sums(terms: Terms) -> list[fx.Node]:
    """Return the sums over the batch that divisors are computed from."""
    return list(dict.fromkeys(node for nodes in terms.counts.values() for node in nodes))


def _means(builder: GraphBuilder, terms: Terms, values: Mapping[fx.Node, fx.Node], microbatches: int) -> list[fx.Node]:
    """Add the mean count of a micro-batch for each divisor. ``values``: the divisors over all micro-batches."""
    return [
        builder.inline(mean, values[divisor], microbatches, counted_as(terms, divisor), name="count")
        for divisor in terms.counts
    ]


def _copied(
    builder: GraphBuilder, program: Program, needed: Collection[fx.Node], known: Mapping[fx.Node, fx.Node]
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
