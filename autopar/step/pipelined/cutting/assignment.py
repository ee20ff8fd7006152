"""Assign each op of a micro-batch's program to a stage, or to all stages that read it.

=====================  ===============================================================================================
on each stage          what inputs, buffers and constants alone determine (masks, rotary tables, labels), and views and
                       casts of parameters
forward                where the cut of the forward puts it
backward               with its forward, by the model's call that both are part of
anything else          where its last operand is made: sums of gradients, losses, the gradient of a value with several
                       readers
=====================  ===============================================================================================

In the backward the last operand is that of the first stage, because gradients come from the last stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import fx

from autopar.errors import PlanError, at_line
from autopar.ir.nodes import called_op, is_getitem, name_of, operands, record_of
from autopar.ir.program import Program
from autopar.ir.value_names import sums_in
from autopar.rules.registry import rule_of
from autopar.torch_private import aten

DETERMINED = ("input", "buffer", "seed")  # the roles of placeholders that all stages have
CASTS = {aten._to_copy.default}


@dataclass(frozen=True)
class Assignment:
    """The stages of the ops of a program.

    Attributes:
        stages: how many there are.
        stage: op → its stage.
        anywhere: the ops that run on each stage that reads them.
    """

    stages: int
    stage: Mapping[fx.Node, int]
    anywhere: frozenset[fx.Node]


def computed_anywhere(program: Program) -> frozenset[fx.Node]:
    """Return the ops that run on each stage that reads them. Linear in the graph."""
    determined: set[fx.Node] = set()
    of_parameters: set[fx.Node] = set()
    for node in program.nodes:
        record = record_of(node)
        if node.op == "get_attr" or (node.op == "placeholder" and record.role in DETERMINED):
            determined.add(node)
        elif node.op == "placeholder" and record.role == "param":
            of_parameters.add(node)
        elif node.op == "call_function":
            read = operands(node)
            if all(value in determined for value in read):
                determined.add(node)
            elif record.phase == "forward" and len(read) == 1 and read[0] in of_parameters and _is_view_or_cast(node):
                of_parameters.add(node)
    return frozenset(node for node in (*determined, *of_parameters) if node.op == "call_function")


def _is_view_or_cast(node: fx.Node) -> bool:
    return not is_getitem(node) and (called_op(node) in CASTS or rule_of(node.target).view)


def ops_of_forward(program: Program, anywhere: frozenset[fx.Node]) -> list[fx.Node]:
    """Return the ops of the forward that the cut assigns to one stage each, in order.

    They are part of a call of the model; the others follow their operands.
    """
    return [
        node
        for node in program.nodes
        if node.op == "call_function"
        and node not in anywhere
        and record_of(node).phase == "forward"
        and record_of(node).call is not None
    ]


def assign(
    program: Program, anywhere: frozenset[fx.Node], cut: Callable[[fx.Node], int | None], stages: int
) -> Assignment:
    """Assign all ops, given the cut of the forward. Linear in the graph.

    Args:
        cut: op of ``ops_of_forward`` → its stage; ``None``: where its last operand is made.

    Raises:
        PlanError: an op reads a value of a later stage in the forward, or of an earlier one in the backward.
    """
    stage: dict[fx.Node, int] = {}
    calls: dict[object, int] = {}
    for node in program.nodes:
        if node.op != "call_function" or node in anywhere:
            continue
        record = record_of(node)
        forward, call = record.phase == "forward", record.call
        chosen = None
        if forward and call is not None:
            chosen = cut(node)
        elif not forward and call is not None:
            chosen = calls.get(call)
        if chosen is None or is_getitem(node):
            chosen = of_last_operand(node, stage, forward)
        stage[node] = chosen
        if forward and call is not None:
            calls[call] = max(chosen, calls.get(call, 0))
        _check(program, node, stage, forward)
    return Assignment(stages, stage, anywhere)


def of_last_operand(node: fx.Node, stage: Mapping[fx.Node, int], forward: bool) -> int:
    """Return the stage on which the last operand of an op is made."""
    read = [value for value in operands(node) if value in stage]
    of_backward = [stage[value] for value in read if record_of(value).phase != "forward"]
    if not forward and of_backward:
        return min(of_backward)
    return max((stage[value] for value in read), default=0)


def _check(program: Program, node: fx.Node, stage: Mapping[fx.Node, int], forward: bool) -> None:
    """Check that values of the forward go to later stages, and those of the backward to earlier ones."""
    for value in operands(node):
        if value not in stage or (record_of(value).phase == "forward") != forward:
            continue
        against = stage[value] > stage[node] if forward else stage[value] < stage[node]
        if against:
            reader, maker = record_of(node), record_of(value)
            raise PlanError(
                f"the cut runs backwards: {node.name} of stage {stage[node]} reads {value.name} of stage "
                f"{stage[value]}, in the {reader.phase}\n{at_line(maker.source, maker.module)}\n"
                f"{at_line(reader.source, reader.module)}\n  put the module of {node.name} on stage "
                f"{stage[value]} or {'behind' if forward else 'before'} it: change stages=, or leave it out"
            )


def stages_of_written_buffers(program: Program, assignment: Assignment) -> dict[fx.Node, int]:
    """Return the stage of each buffer that the forward writes, and that a stage reads.

    Raises:
        PlanError: several stages read or write a buffer.
    """
    sums, found = sums_in(program), dict[fx.Node, int]()
    rows = zip(operands(program.output), record_of(program.output).results, strict=True)
    written = {result.of: value for value, result in rows if result.kind == "state"}
    for node in program.placeholders:
        if record_of(node).role != "state" or name_of(node) in sums:
            continue
        users = (*node.users, written[node.name])
        readers = {assignment.stage[user]: user for user in users if user in assignment.stage}
        if len(readers) > 1:
            record = record_of(readers[max(readers)])
            raise PlanError(
                f"the buffer {name_of(node)} is written in the forward, and the stages "
                f"{', '.join(map(str, sorted(readers)))} read it\n{at_line(record.source, record.module)}\n"
                f"  keep its readers on one stage, with stages="
            )
        if readers:
            (found[node],) = readers
    return found
