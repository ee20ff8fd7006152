"""Order a program in which collectives cross the end of a run: one run starts them, and the next one waits for them.

    run        finish: waits, updates | forward | backward | starts of the reductions
    scheduled  backward | reductions | end of the run | updates, each before its first reader, in the next forward

The schedule begins with the backward, because its gradients are reduced while the next forward computes. A parameter is
updated before its first reader in that forward. All ops but the crossing collectives are over at the end of the run.
Then the lines behind the end of the run are moved to the front (``unrotated``). So a run takes as long as the schedule,
and the reductions of the parameters that the next forward reads first go first.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from autopar.ir.nodes import operands, record_of
from autopar.ir.program import Program
from autopar.ir.value_names import next_values
from autopar.optimizers import IN_PLACE
from autopar.scheduling.lines import Line
from autopar.scheduling.op import COMPUTE, Op
from autopar.scheduling.programs.functions import Reads

END = "the end of a run"
BEFORE_THE_BACKWARD = ("finish", "forward")


def rotated_ops(program: Program, ops: Sequence[Op], across: Collection[str]) -> list[Op]:
    """Return the ops of a rotated program: backward, reductions, end of the run, and the forward with each update
    before its first reader. Linear in the ops.

    Args:
        ops: the ops of the program.
        across: the collectives that are started in the run before.
    """
    phases = {node.name: record_of(node).phase for node in program.nodes}
    crossing = {op.name for op in ops if op.name in across}
    early = {op.name for op in ops if phases[op.name] in BEFORE_THE_BACKWARD} - crossing
    operand_of = _next_operands(program, crossing)
    others = early | crossing
    late = [
        replace(op, after=_among(op.after, others), behind=_among(op.behind, others))
        for op in ops
        if op.name not in others
    ]
    sent = [
        replace(op, after=_among(operand_of[op.name], others), kind=("across", op.kind))
        for op in ops
        if op.name in crossing
    ]
    end = Op(END, COMPUTE, 0.0, tuple(op.name for op in late))
    finish = [op for op in ops if op.name in early and phases[op.name] == "finish"]
    forward = [op for op in ops if op.name in early and phases[op.name] != "finish"]
    after = [replace(op, after=(END, *op.after)) for op in _just_in_time(finish, forward)]
    return [*late, *sent, end, *after]


def unrotated(program: Program, lines: Sequence[Line], across: Collection[str]) -> list[Line]:
    """Return the lines of one run: those behind its end come first, and all crossing collectives are started before
    the waits at its end, but for what waits for their operands."""
    place = next(k for k, line in enumerate(lines) if line.parts[0].op == END)
    begin, end = list(lines[place + 1 :]), list(lines[:place])
    crossing = frozenset(across)
    stay = [line.kind != "start" or line.parts[0].op not in crossing for line in begin]
    started = [line for line, stays in zip(begin, stay, strict=True) if not stays]
    waits = len(end)
    while waits and end[waits - 1].kind == "wait":
        waits -= 1
    sent = {name for names in _next_operands(program, crossing).values() for name in names}
    first = [line for line in end[waits:] if any(part.op in sent for part in line.parts)]
    last = [line for line in end[waits:] if line not in first]
    stays_first = [line for line, stays in zip(begin, stay, strict=True) if stays]
    return [*stays_first, *end[:waits], *first, *started, *last]


def memory_of_run(program: Program, ops: Sequence[Op], lines: Sequence[Line], across: Collection[str]) -> int:
    """Return the most bytes of results that are alive in a line of one run. Linear.

    A collective that the run before has started is alive until its last reader; one that the run starts for the next
    run stays alive. Updates are in place.

    Args:
        ops: the ops of the program.
        lines: the lines of one run.
        across: the collectives that are started in the run before.
    """
    begin: dict[str, int] = {}
    end: dict[str, int] = {}
    for place, line in enumerate(lines):
        for part in line.parts:
            end[part.op] = place
            if line.kind != "wait":
                begin.setdefault(part.op, place)
    last: dict[str, int] = {}
    for op in ops:
        for name in op.after:
            last[name] = max(last.get(name, 0), end[op.name] if op.name not in across else begin[op.name])
    updates = {node.name for node in program.nodes if node.target in IN_PLACE}
    change = [0] * (len(lines) + 1)
    for op in ops:
        bytes = 0 if op.name in updates else op.memory
        change[begin[op.name]] += bytes
        if op.name in across:
            change[0] += bytes
        if op.name in last:
            change[last[op.name] + 1] -= bytes
    return max(itertools.accumulate(change))


def _just_in_time(finish: Sequence[Op], forward: Sequence[Op]) -> list[Op]:
    """Return the forward in its order, with each op of ``finish`` in front of its first reader."""
    left = {op.name: op for op in finish}
    ordered: list[Op] = []
    placed: set[str] = set()
    for op in (*forward, *finish):
        pending = [op]
        while pending:
            at = pending[-1]
            unplaced = [left[name] for name in at.before if name in left and name != at.name]
            if unplaced:
                pending += unplaced
            else:
                pending.pop()
                if at.name not in placed:
                    placed.add(at.name)
                    left.pop(at.name, None)
                    ordered.append(at)
    return ordered


def _next_operands(program: Program, crossing: Collection[str]) -> Mapping[str, Sequence[str]]:
    """Map each crossing collective to the ops that compute its operand for the next run."""
    reads, nexts = Reads(program, ()), next_values(program)
    nodes = {node.name: node for node in program.nodes}
    return {name: reads.bases(nexts[operands(nodes[name])[0].name]) for name in crossing}


def _among(names: Sequence[str], others: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in others)
