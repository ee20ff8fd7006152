"""Traced programs of micro-batches, written by hand, and cut into stages."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import fx

from autopar.ir.nodes import record_of, set_record
from autopar.ir.program import Program
from autopar.ir.record import Call
from autopar.step.pipelined.assignment import Assignment, computed_anywhere
from autopar.step.pipelined.stage_programs import StageProgram, cut_program
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
