"""Decide the order in which a program runs, on the explicit program, for the ranks of all classes alike.

The order depends on the program, its durations and the policy alone. Orders are cached by the digest of these three: a
program that is captured again is not scheduled again.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from autopar.capture.blocks import is_parameter
from autopar.costs.durations import Durations
from autopar.errors import ScheduleError
from autopar.ir import transfers
from autopar.ir.nodes import is_getitem, name_of, operands, record_of, tensor_type
from autopar.ir.program import Program, text_digest
from autopar.ir.value_names import sums_in
from autopar.optimizers import IN_PLACE
from autopar.scheduling.decide import PLAIN, judge, on_late_streams, schedule
from autopar.scheduling.lines import Line, Part
from autopar.scheduling.op import Op
from autopar.scheduling.policies import ByteScheduler
from autopar.scheduling.programs.across import memory_of_run, rotated_ops, unrotated
from autopar.scheduling.programs.donated import Donated, numbers_of
from autopar.scheduling.programs.function_lines import FunctionLines
from autopar.scheduling.programs.functions import Function, functions_of, is_collective, program_ops, stages_in
from autopar.scheduling.programs.overlap import TODAY, Overlap
from autopar.scheduling.programs.today import today
from autopar.scheduling.programs.updates import side_by_side, updates_last
from autopar.scheduling.simulation import Schedule

# -- just in time ------------------------------------------------------------------------------------------------------
#
# Hold back the ops of the backward that need no gradient, so that their results do not fill the memory early.
#
#     forward                              backward
#     pow_1 : … = pow(x, 2)                pow_2 : … = pow(x, 1)           needs no gradient, and could run at once
#                                          mul : … = mul(g_tp, pow_2)      so pow_2 runs after g, while g is reduced
#
# Such an op is ready from the forward on: a factor of a derivative, or a recomputed value. Its first reader also reads
# a gradient. The op runs after that gradient; if the gradient is the result of a collective, after the operand of the
# collective, so that it overlaps with it. Gathers of parameters, and ops that compute only their operands, are not held
# back: several gathers share a message, and the schedule starts it by its deadline.


def just_in_time(program: Program, ops: Sequence[Op]) -> list[Op]:
    """Return the ops of a function of an explicit program, with those of the backward held back until near their
    readers. Linear in the graph."""
    inside, anchors = {op.name for op in ops}, _anchors(program)
    return [
        replace(op, behind=(*op.behind, anchors[op.name])) if anchors.get(op.name) in inside else op for op in ops
    ]  # fmt: skip


def _anchors(program: Program) -> Mapping[str, str]:
    """Map each op that is held back to the op that it runs after, which stands before it in the program."""
    gradients = _gradients(program)
    place = {node: k for k, node in enumerate(program.nodes)}
    behind: dict[fx.Node, fx.Node] = {}
    free: set[fx.Node] = set()
    for node in reversed(list(program.nodes)):
        if node in gradients or node.op != "call_function" or record_of(node).phase != "backward":
            continue
        gathers = is_collective(node) and is_parameter(operands(node)[0])
        if gathers or (node.users and all(user in free for user in node.users)):
            free.add(node)
        reader = min(node.users, key=place.__getitem__, default=program.output)
        anchor = behind.get(reader)
        if reader in gradients:
            read = [value for value in operands(reader) if value in gradients]
            anchor = max(read, key=place.__getitem__, default=None)
        if anchor is not None and place[anchor] < place[node]:  # so that no op waits for itself
            behind[node] = anchor
    return {node.name: _sent(anchor).name for node, anchor in behind.items() if node not in free}


def _gradients(program: Program) -> set[fx.Node]:
    """Return the values that depend on a first gradient: a tangent, or that of the loss, which the backward makes."""
    found: set[fx.Node] = set()
    for node in program.nodes:
        makes = node.op == "call_function" and record_of(node).phase == "backward" and not operands(node)
        if makes or record_of(node).role == "tangent" or any(value in found for value in operands(node)):
            found.add(node)
    return found


def _sent(value: fx.Node) -> fx.Node:
    """Return the op that computes a value; of the result of a collective, the op that computes its operand."""
    while is_getitem(value) or (value.op == "call_function" and is_collective(value)):
        value = operands(value)[0]
    return value


# -- order -------------------------------------------------------------------------------------------------------------


LITTLE = 0.01  # of the makespan: a smaller gain is not worth an op for each update
MORE_MEMORY = 1.05  # the most memory that the default policy may need, relative to ``today``


@dataclass(frozen=True)
class Execution:
    """How a program runs.

    Attributes:
        whole: whether it is one function, as each program of a step is; else each phase is one.
        written: the states that it may overwrite besides the sums of gradients, by the user's names.
        from_zero: whether the sums of gradients begin as zeros.
        across: the collectives that are started in the run before.
        sums: whether it may overwrite the sums of gradients; by default if it is one function.
        stages: whether each stage has functions of its own, between which slots send the messages.
    """

    whole: bool = False
    written: frozenset[str] = frozenset()
    from_zero: bool = False
    across: tuple[str, ...] = ()
    sums: bool | None = None
    stages: bool = False

    def functions(self, program: Program) -> list[Function]:
        """Return the functions of an explicit program."""
        return functions_of(program, self.whole, stages_in(program) if self.stages else None)

    def donated(self, program: Program) -> list[str]:
        """Return the placeholders that a program may overwrite: sums, and the states in ``written``."""
        overwrites = self.whole if self.sums is None else self.sums
        return donated_names(program, self.written) if overwrites else []


OF_CALLS = Execution()
OF_STEPS = Execution(whole=True)
OF_STAGES = Execution(sums=True, stages=True)  # the passes of a pipeline: each phase of a stage is a function


def donated_names(program: Program, written: Collection[str]) -> list[str]:
    """Return the placeholders of sums, and of the states in ``written``, which has the user's names."""
    names = sums_in(program) | frozenset(written)
    return [node.name for node in program.placeholders if name_of(node) in names]


@dataclass(frozen=True)
class Order:
    """The order in which a program runs, with its times.

    Attributes:
        functions: the lines of each function.
        schedules: the schedule of each function, with its bound.
        source: where the durations are from, in words.
        across: the collectives that are started in the run before.
    """

    functions: tuple[FunctionLines, ...]
    schedules: tuple[Schedule, ...]
    source: str = ""
    across: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """All lines, as text that ranks compare."""
        lines = (f"{line.kind} {line.parts}" for function in self.functions for line in function.lines)
        late = (f"late {name}" for function in self.functions for name in sorted(function.late))
        return "\n".join((*lines, *late))


def lines_of(program: Program, execution: Execution) -> tuple[FunctionLines, ...]:
    """Return the lines of the policy ``today``, which needs no durations."""
    donated = Donated.of(program, execution.donated(program))
    return today(program, execution.functions(program), donated)


@dataclass
class Orders:
    """A cache of the latest orders, by digest.

    Attributes:
        decided: how many orders were not in the cache.
    """

    decided: int = 0
    _kept: OrderedDict[str, Order] = field(default_factory=OrderedDict)

    MOST = 64

    def of(self, program: Program, execution: Execution, durations: Durations, overlap: Overlap) -> Order:
        """Return the order of an explicit program; its arguments are those of ``decide``."""
        facts = (str(program), durations.digest, repr(overlap), repr(execution))
        key = text_digest("\n".join(facts))
        if key not in self._kept:
            self._kept[key] = decide(program, execution, durations, overlap)
            self.decided += 1
        self._kept.move_to_end(key)
        if len(self._kept) > self.MOST:
            self._kept.popitem(last=False)
        return self._kept[key]


ORDERS = Orders()


def decide(program: Program, execution: Execution, durations: Durations, overlap: Overlap) -> Order:
    """Return the order of each function of an explicit program.

    Args:
        execution: how the program runs.
        durations: the seconds of its ops and transfers.
        overlap: the policy.

    Raises:
        ScheduleError: a priority contradicts another one, or the order in which values depend on each other.
    """
    functions = execution.functions(program)
    if execution.across:
        lines, made_across = _across(program, execution, functions[0], durations, overlap)
        return Order((lines,), (made_across,), durations.source, execution.across)
    donated = Donated.of(program, execution.donated(program))
    made = []
    for function, lines in zip(functions, today(program, functions, donated), strict=True):
        ops = program_ops(program, function, durations.seconds, {*donated.updates, *donated.sums})
        in_time = just_in_time(program, ops) if overlap.is_searched else ops
        decided, times = _Deciding(function, ops, in_time, lines, durations, overlap).run()
        received = _received(program, function)
        made.append((replace(decided, lines=(*received, *decided.lines), stage=function.stage), times))
    return Order(tuple(lines for lines, _ in made), tuple(schedule for _, schedule in made), durations.source)


def _received(program: Program, function: Function) -> list[Line]:
    """Return a line for each message that the stage of a function receives in its phase; slots say when it comes."""
    return [
        Line("compute", (Part(node.name, 0, 0),))
        for node in program.nodes
        if node.target is transfers.recv and function.stage
        and (tensor_type(node).mesh.name, record_of(node).phase) == (function.stage, *function.phases)
    ]  # fmt: skip


def _across(
    program: Program, execution: Execution, function: Function, durations: Durations, overlap: Overlap
) -> tuple[FunctionLines, Schedule]:
    """Return the order of a program in which collectives cross the end of a run."""
    across, donated = execution.across, Donated.of(program, execution.donated(program))
    ops = program_ops(program, function, durations.seconds, {*donated.updates, *donated.sums})
    rotated, crossing = rotated_ops(program, ops, across), frozenset(across)

    def made_by(policy: str | ByteScheduler, **options: Any) -> tuple[Schedule, list[Line], int]:
        made = schedule(rotated, policy, overlap.issue, **times_of(durations), **options)
        lines = unrotated(program, made.lines, across)
        return made, lines, memory_of_run(program, ops, lines, crossing)

    if overlap.is_searched:
        made, lines, memory = made_by(TODAY)
        memory += sum(op.memory for op in ops if op.name in crossing)  # a collective that crosses is alive for longer
        for limit in (None, made.memory):
            with contextlib.suppress(ScheduleError):  # no other order was found that needs as little
                other, others, needs = made_by(overlap.policy, memory=limit)
                if other.makespan < made.makespan and needs <= memory * MORE_MEMORY:
                    made, lines = other, others
                    break
    else:
        made, lines, _ = made_by(overlap.policy, priorities=overlap.priorities_of(op.name for op in rotated))
    return FunctionLines(function.phases, completed(function, lines), made.late), made


@dataclass(frozen=True)
class _Deciding:
    """Decides the order of one function.

    Attributes:
        in_time: the ops, with those of the backward held back (``just_in_time``). The default policy tries these first,
            because their order needs less memory.
        lines: the lines of the policy ``today``.
    """

    function: Function
    ops: Sequence[Op]
    in_time: Sequence[Op]
    lines: FunctionLines
    durations: Durations
    overlap: Overlap

    def run(self) -> tuple[FunctionLines, Schedule]:
        before = self.judged(TODAY, self.lines_of_today())
        if self.overlap.policy == TODAY:
            return self.lines, before
        if self.overlap.is_searched:
            made = self.searched(round(before.memory * MORE_MEMORY))
            if made is None or before.makespan <= made.makespan * (1 + PLAIN):
                return self.lines, before
            made = self.with_streams(made).with_updates_together(made, before.makespan)
        else:
            priorities = self.overlap.priorities_of(op.name for op in self.ops)
            made = self.scheduled(self.ops, priorities=priorities)
        lines = side_by_side(self.ops, made.lines, self.updates)
        made = self.with_streams(made).judged(made.policy, lines)
        return FunctionLines(self.function.phases, completed(self.function, made.lines), made.late), made

    def with_streams(self, made: Schedule) -> _Deciding:
        """Return the same ops with the late streams of a schedule."""
        return replace(self, ops=on_late_streams(self.ops, made.late)) if made.late else self

    def searched(self, memory: int) -> Schedule | None:
        """Return the shortest schedule within the bytes, of ``in_time`` and of ``ops``; ``None`` if no order was found
        that fits."""
        best = None
        for ops in (self.in_time, self.ops):
            with contextlib.suppress(ScheduleError):
                made = self.scheduled(ops, memory=memory)
                made = self.with_streams(made).judged(made.policy, made.lines)
                if best is None or made.makespan < best.makespan * (1 - PLAIN):
                    best = made
            if best is not None and best.makespan <= best.bound * (1 + PLAIN):
                break
        return best

    def scheduled(self, ops: Sequence[Op], **options: Any) -> Schedule:
        """Return the schedule of ops by the policy, with further options of ``schedule``."""
        return schedule(ops, self.overlap.policy, self.overlap.issue, **times_of(self.durations), **options)

    @property
    def updates(self) -> dict[str, object]:
        """Update that can run in place → what updates that run as one op have in common."""
        return {node.name: numbers_of(node) for node in self.function.nodes if node.target in IN_PLACE}

    def judged(self, policy: str, lines: Sequence[Line]) -> Schedule:
        """Return the schedule with these lines."""
        return judge(self.ops, lines, policy, self.overlap.issue, **times_of(self.durations))

    def with_updates_together(self, made: Schedule, most: float) -> Schedule:
        """Return the schedule with all updates that no op reads at the end, where they run as one op.

        Return it unchanged if that takes longer by more than the launches that it saves, or longer than ``most``.
        """
        updates = set(self.updates)
        updates -= {name for op in self.ops if op.name not in updates for name in op.before}  # they are read
        if len(updates) < 2:
            return made
        together = self.judged(made.policy, updates_last(self.ops, made.lines, updates))
        saved = (len(updates) - 1) * self.durations.launch
        return together if together.makespan <= min(most, made.makespan * (1 + LITTLE) + saved) else made

    def lines_of_today(self) -> list[Line]:
        """Return the lines of ``today`` as lines of ``ops``: with their bytes, and without elements of results."""
        whole = {op.name: Part(op.name, 0, 0 if op.computes else op.bytes) for op in self.ops}
        return [
            Line(line.kind, tuple(whole[part.op] for part in line.parts))
            for line in self.lines.lines
            if line.parts[0].op in whole
        ]


def order_of_part(order: Order, part: Program, execution: Execution, durations: Durations, overlap: Overlap) -> Order:
    """Return the order in which a part of a program runs, such as that of a stage, with its times.

    Args:
        order: that of the whole program.
        part: the part, whose values have their names in it.
        execution, durations, overlap: as of ``decide``, of the part.
    """
    donated = Donated.of(part, execution.donated(part))
    functions, schedules, across = [], [], [node.name for node in part.nodes if node.name in order.across]
    for function, lines, made in zip(execution.functions(part), order.functions, order.schedules, strict=True):
        ops = program_ops(part, function, durations.seconds, {*donated.updates, *donated.sums})
        own, judged = _lines_of(lines.lines, ops), ops
        rotated = own
        if order.across:  # a schedule begins with the backward
            judged = rotated_ops(part, ops, across)
            rotated = _lines_of(made.lines, judged)
        functions.append(FunctionLines(function.phases, tuple(own)))
        schedules.append(judge(judged, rotated, made.policy, overlap.issue, **times_of(durations)))
    return Order(tuple(functions), tuple(schedules), durations.source, tuple(across))


def _lines_of(lines: Sequence[Line], ops: Sequence[Op]) -> list[Line]:
    """Return the lines of some ops."""
    names = {op.name for op in ops}
    here = [Line(line.kind, tuple(part for part in line.parts if part.op in names)) for line in lines]
    return [line for line in here if line.parts]


def times_of(durations: Durations) -> dict[str, Any]:
    """Return the options of ``schedule`` and ``judge`` that durations decide."""
    return {"startup": durations.startup, "interference": durations.interference, "start_seconds": durations.start}


def completed(function: Function, lines: Sequence[Line]) -> tuple[Line, ...]:
    """Add the lines of the elements of results with several values, each after its op."""
    nodes: dict[str, fx.Node] = {node.name: node for node in function.nodes}
    complete: list[Line] = []
    for line in lines:
        complete.append(line)
        if line.kind == "compute":
            for element in nodes[line.parts[0].op].users:
                if is_getitem(element) and element.name in nodes:
                    complete.append(Line("compute", (Part(element.name, 0, 0),)))
    return tuple(complete)
