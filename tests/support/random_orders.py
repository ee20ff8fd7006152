"""Draw any order in which a program may run: late starts, late waits, odd chunks, messages of several members."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

from torch import fx

from autopar.ir.nodes import is_getitem
from autopar.ir.program import Program
from autopar.runtime.localize import LocalPrograms
from autopar.scheduling.decide import on_late_streams
from autopar.scheduling.lines import Line, Part
from autopar.scheduling.op import Op
from autopar.scheduling.programs.donated import Donated
from autopar.scheduling.programs.function_lines import FunctionLines
from autopar.scheduling.programs.functions import Function, functions_of, program_ops
from autopar.scheduling.programs.order import Execution, Order, Orders
from autopar.scheduling.programs.today import today
from autopar.verify.levels import verify

MOST = 5  # chunks of one collective


def random_order(program: Program, execution: Execution, r: random.Random, late: float = 0.0) -> Order:
    """A valid order of an explicit program; no policy would decide most of them.

    ``late``: the share of collectives that run on the stream ``late``.
    """
    lines = []
    for function in functions_of(program, execution.whole):
        ops = program_ops(program, function, {})
        names = frozenset(op.name for op in ops if late and not op.computes and r.random() < late)
        drawn = _with_elements(function, _Drawn(on_late_streams(ops, names), r).run())
        lines.append(FunctionLines(function.phases, tuple(drawn), names))
    return Order(tuple(lines), (), "")


def order_of_today(program: Program, execution: Execution) -> Order:
    donated = Donated.of(program, execution.donated(program))
    return Order(today(program, functions_of(program, execution.whole), donated), (), "")


def in_order(program: Program, order: Order) -> LocalPrograms:
    """The scheduled programs of all ranks, verified."""
    return LocalPrograms(program, lambda local: verify(local, "schedule"), order)


@dataclass
class _Drawn:
    """Issues what could be issued next, by chance, until nothing is left."""

    ops: Sequence[Op]
    r: random.Random
    lines: list[Line] = field(default_factory=list)
    done: set[str] = field(default_factory=set)
    under_way: list[tuple[Part, ...]] = field(default_factory=list)

    def run(self) -> list[Line]:
        chunks = {op.name: self.chunks(op) for op in self.ops if not op.computes}
        unwaited = {name: len(parts) for name, parts in chunks.items()}
        left = {op.name: op for op in self.ops}
        readers: dict[str, list[str]] = {}
        missing = {op.name: len({name for name in op.before if name in left}) for op in self.ops}
        for op in self.ops:
            for name in dict.fromkeys(op.before):
                readers.setdefault(name, []).append(op.name)
        ready = [op for op in self.ops if not missing[op.name]]

        def over(name: str) -> None:
            for reader in readers.get(name, ()):
                missing[reader] -= 1
                if not missing[reader]:
                    ready.append(left[reader])

        haste = self.r.choice([0.1, 0.5, 0.9])  # the share of waits among what is chosen
        while ready or self.under_way:
            if self.under_way and (not ready or self.r.random() < haste):
                message = self.under_way.pop(self.r.randrange(len(self.under_way)))
                self.lines.append(Line("wait", message))
                for part in message:
                    unwaited[part.op] -= 1
                    if not unwaited[part.op]:
                        over(part.op)
                continue
            op = self.r.choice(ready)
            if op.computes:
                ready.remove(op)
                self.lines.append(Line("compute", (Part(op.name, 0, 0),)))
                over(op.name)
                continue
            alike = [other for other in ready if (other.stream, other.kind) == (op.stream, op.kind) and other.bytes]
            members = self.r.sample(alike, self.r.randint(1, min(3, len(alike)))) if op.bytes else [op]
            message = tuple(part for other in members for part in self.some(chunks[other.name], alone=not op.bytes))
            for other in members:
                if not chunks[other.name]:
                    ready.remove(other)
            self.under_way.append(message)
            self.lines.append(Line("start", message))
        return self.lines

    def some(self, parts: list[Part], alone: bool) -> list[Part]:
        count = 1 if alone else self.r.randint(1, min(2, len(parts)))
        return [parts.pop(self.r.randrange(len(parts))) for _ in range(count)]

    def chunks(self, op: Op) -> list[Part]:
        """One to five parts; they begin and end in the middle of elements."""
        count = min(self.r.randint(1, MOST), op.bytes) if op.bytes and self.r.random() < 0.6 else 1
        cuts = [0, *sorted(self.r.sample(range(1, op.bytes), count - 1)), op.bytes] if count > 1 else [0, op.bytes]
        return [Part(op.name, begin, end) for begin, end in itertools.pairwise(cuts)]


def _with_elements(function: Function, lines: Sequence[Line]) -> list[Line]:
    """The elements of results with several values, each behind its op."""
    nodes: dict[str, fx.Node] = {node.name: node for node in function.nodes}
    complete: list[Line] = []
    for line in lines:
        complete.append(line)
        for element in nodes[line.parts[0].op].users if line.kind == "compute" else ():
            if is_getitem(element) and element.name in nodes:
                complete.append(Line("compute", (Part(element.name, 0, 0),)))
    return complete


@contextmanager
def decided(make: Callable[[Program, Execution], Order]) -> Iterator[None]:
    """Let this decide instead of a policy."""

    def of(orders: Orders, program: Program, execution: Execution, durations: object, overlap: object) -> Order:
        return make(program, execution)

    with mock.patch.object(Orders, "of", of):
        yield


def by_chance(seed: int, late: float = 0.0) -> Callable[[Program, Execution], Order]:
    """Orders that depend on the program and the seed alone, so that all ranks draw the same."""
    return lambda program, execution: random_order(program, execution, random.Random(f"{seed} {program}"), late)
