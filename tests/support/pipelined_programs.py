"""Traced programs of micro-batches, written by hand, and cut into stages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from autopar.ir.nodes import called_op, map_operands, name_of, operands, record_of, set_record, tensor_type
from autopar.ir.program import Program
from autopar.ir.record import Call
from autopar.step.pipelined.cutting.assignment import Assignment, computed_anywhere
from autopar.step.pipelined.cutting.stage_programs import StageProgram, cut_program
from autopar.verify.levels import verify

CPU = torch.device("cpu")
COMMENT = re.compile(r"^  (\w+) : [^#\n]*  # (?:call (\d+))? ?(\S*)$", re.MULTILINE)


def read(text: str) -> Program:
    """The program of a text. The comment behind a value, ``# call 3 layers.0``, is its call and its module."""
    program = Program.parse(text)
    comments = {name: (call, module) for name, call, module in COMMENT.findall(text)}
    for node in program.nodes:
        if node.name in comments:
            call, module = comments[node.name]
            set_record(node, record_of(node)._replace(
                module=module, source=f"model.py:{call}" if call else "", call=Call(int(call), "op") if call else None
            ))  # fmt: skip
    verify(program)
    return program


def node_of(program: Program, name: str) -> fx.Node:
    return next(node for node in program.nodes if node.name == name)


def named(program: Program, stages: Mapping[fx.Node, int]) -> dict[str, int]:
    return {node.name: stages[node] for node in program.nodes if node in stages}


def assigned(program: Program, stages: Mapping[str, int]) -> Assignment:
    """Ops by name, and those that run anywhere."""
    anywhere = computed_anywhere(program)
    ops = [node for node in program.nodes if node.op == "call_function" and node not in anywhere]
    assert {node.name for node in ops} == stages.keys()
    return Assignment(max(stages.values()) + 1, {node: stages[node.name] for node in ops}, anywhere)


def stages_of(text: str, stages: Mapping[str, int]) -> list[StageProgram]:
    """The programs of the stages, verified."""
    program = read(text)
    parts = cut_program(program, assigned(program, stages), CPU)
    for part in parts:
        verify(part.program)
    return parts


Values = dict[str, torch.Tensor]


def random_values(program: Program) -> Values:
    """Values of the placeholders, by the user's names."""
    types = {name_of(node): tensor_type(node) for node in program.placeholders}
    return {
        name: torch.randn(type.shape, dtype=type.dtype)
        if type.dtype.is_floating_point
        else torch.randint(0, 4, type.shape).to(type.dtype)
        for name, type in types.items()
    }


def run_phase(program: Program, phase: str, values: Values) -> None:
    """Run the ops of a phase on one device; ``values`` has what they read, by name, and receives their results."""
    for node in program.nodes:
        if node.op == "call_function" and record_of(node).phase == phase:
            args, kwargs = map_operands((node.args, dict(node.kwargs)), lambda read: values[read.name])
            values[node.name] = called_op(node)(*args, **kwargs)


def next_values(program: Program, values: Values) -> Values:
    """The next values of states, by the names of their placeholders."""
    rows = zip(operands(program.output), record_of(program.output).results, strict=True)
    return {result.of: values[node.name] for node, result in rows if result.kind == "state"}


def run_whole(program: Program, given: Values) -> Values:
    """The next values of the states of a micro-batch's program, by the names of their placeholders."""
    values = {node.name: given[name_of(node)] for node in program.placeholders}
    for phase in ("forward", "backward"):
        run_phase(program, phase, values)
    return next_values(program, values)


def run_stages(parts: Sequence[StageProgram], given: Values) -> tuple[list[Values], list[list[str]]]:
    """For each stage the next values of its states; and what went over each boundary, forward and back.

    A stage has nothing but what it receives, and its own placeholders.
    """
    held: list[Values] = []
    crossed: list[list[str]] = []
    sent: Values = {}
    for part in parts:
        own = {n.name: given[name_of(n)] for n in part.program.placeholders if name_of(n) in given}
        assert part.from_before.keys() == sent.keys()
        own |= {part.from_before[value]: tensor for value, tensor in sent.items()}
        run_phase(part.program, "forward", own)
        returned = operands(part.program.output)
        sent = {value: own[returned[at].name] for value, at in part.up.items()}
        crossed.append(list(sent))
        held.append(own)
    sent = {}
    for part, own in reversed(list(zip(parts, held, strict=True))):
        assert part.from_behind.keys() == sent.keys()
        own |= {part.from_behind[value]: tensor for value, tensor in sent.items()}
        run_phase(part.program, "backward", own)
        rows = list(zip(operands(part.program.output), record_of(part.program.output).results, strict=True))
        gradients = {result.of: node.name for node, result in rows if result.kind == "grad"}
        names = {v: gradients.get(at, at) if isinstance(at, str) else rows[at][0].name for v, at in part.down.items()}
        sent = {value: own[name] for value, name in names.items()}
        crossed.append(list(sent))
    return [next_values(part.program, own) for part, own in zip(parts, held, strict=True)], crossed
