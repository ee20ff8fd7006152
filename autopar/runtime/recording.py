"""Record when each line that a process runs begins and ends.

    y_start : f32[16 256] = start all_gather(h, tp) on tp        start   y_start   tp   0.8 ms – 0.9 ms
    u : f32[16 64] = mm(x, w)                                →   compute u              0.9 ms – 2.1 ms
    y : f32[16 256] = wait(y_start)                              wait    y_start   tp   2.1 ms – 2.6 ms

In the ``with`` block of ``recording()``, functions are interpreted line by line instead of called. The results are the
same, bit for bit; Python takes some microseconds more for each line. A step on the stages of a pipeline records its
slots instead, and calls its functions. On an accelerator the times are those of its events (``marks``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import fx

from autopar.ir import transfers
from autopar.ir.nodes import node_at, record_of
from autopar.ir.program import Program
from autopar.pipeline import Task
from autopar.runtime.lowering.lower import Lowered
from autopar.runtime.lowering.waits import wait_of
from autopar.runtime.marks import HostMarks
from autopar.runtime.simulation.simulate import line_of
from autopar.runtime.spans import Path, Paths

LineKind = Literal["compute", "start", "wait"]


class RecordedLine(NamedTuple):
    """One line that ran.

    Attributes:
        name: the value of the line; for a start and its waits, the message, or the started value.
        kind: whether it computes, starts or waits.
        stream: the stream of the message; empty for a line that computes.
        begin, end: seconds since the recorder was made.
        text: the line of the program, with the user's line.
        path: its phase and its modules, the outermost first.
        ranks: for a start and its waits, the ranks of the collective.
    """

    name: str
    kind: LineKind
    stream: str
    begin: float
    end: float
    text: str
    path: Path = ()
    ranks: tuple[int, ...] = ()


class RecordedRun(NamedTuple):
    """One run of a function. ``name``: its phases."""

    name: str
    lines: list[RecordedLine]

    @property
    def messages(self) -> set[tuple[str, str]]:
        """The names and streams of the messages that were started; the start of one may be several lines."""
        return {(line.name, line.stream) for line in self.lines if line.kind == "start"}


class RecordedSlot(NamedTuple):
    """What a rank has done in a slot of a pipeline's schedule, or outside of the slots.

    Attributes:
        words: what errors call it.
        kind: whether it computes, starts messages or waits.
        begin, end: seconds, as of ``RecordedLine``.
        tasks: the pass that it computes, or the messages that it starts or waits for; empty outside of slots.
        peers: for each task, the ranks at the other ends of its messages.
    """

    words: str
    kind: LineKind
    begin: float
    end: float
    tasks: tuple[Task, ...]
    peers: tuple[tuple[int, ...], ...] = ()


@dataclass
class Recorder:
    """Keeps what it has recorded, with seconds since it was made. Runs functions line by line.

    While it records, its lines and slots have marks in the place of seconds.

    Attributes:
        marks: those of the device that computes.
        runs: what was run line by line.
        slots: rank → its slots, where the step has stages.
        in_slots: whether the functions of slots are run line by line, too.
        begun: when it was made, by the clock of this machine.
    """

    runs: list[RecordedRun] = field(default_factory=list)
    slots: dict[int, list[RecordedSlot]] = field(default_factory=dict)
    in_slots: bool = False
    marks: HostMarks = field(default_factory=HostMarks)

    def __post_init__(self) -> None:
        self.marks.settle()  # so that the device and the host begin together
        self.begun, self._origin = time.perf_counter(), self.marks.mark()

    def run(self, program: Program, lowered: Lowered, boxed: list[Any]) -> Any:
        """Run a function on its arguments, and empty their list as the function itself does."""
        phases = dict.fromkeys(record_of(node).phase for node in lowered.origins.values())
        self.runs.append(RecordedRun(" ".join(filter(None, phases)), []))
        return _Lines(program, lowered, self.marks.mark, self.runs[-1].lines).boxed_run(boxed)

    def settle(self) -> None:
        """Put seconds in the place of marks, when all of them have passed."""
        self.marks.settle()
        for kept in (*(run.lines for run in self.runs), *self.slots.values()):
            kept[:] = [self._in_seconds(record) for record in kept]  # type: ignore[index, attr-defined]

    def _in_seconds(self, record: Any) -> Any:
        begin, end = (self.marks.seconds(self._origin, mark) for mark in (record.begin, record.end))
        return record._replace(begin=begin, end=end)


class _Lines(fx.Interpreter):
    """Runs the nodes of a function one by one; values are freed after their last reader."""

    def __init__(self, program: Program, lowered: Lowered, clock: Callable[[], Any], lines: list[RecordedLine]) -> None:
        super().__init__(fx.GraphModule(torch.nn.Module(), lowered.graph))
        self._program, self._origins, self._clock, self._lines = program, lowered.origins, clock, lines
        origins = [origin for n in lowered.graph.nodes if (origin := lowered.origins.get(n.name)) is not None]
        self._paths = dict(zip(origins, Paths(program).of(origins), strict=True))

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        begin = self._clock()
        value = super().run_node(n)
        end = self._clock()
        self._add(n, begin, end)
        return value

    def _add(self, node: fx.Node, begin: Any, end: Any) -> None:
        """Record a line. Consecutive nodes of one line of the program are recorded as one.

        A call that belongs to no line of the program, such as the agreement of the ranks, has the name of its function.
        """
        origin = self._origins.get(node.name)
        if origin is None:
            name = getattr(node.target, "__name__", node.name)
            self._lines.append(RecordedLine(name, "compute", "", begin, end, ""))
            return
        kind, started = _kind_of(origin)
        name = origin.name if started is None else record_of(started).message or started.name
        last = self._lines[-1] if self._lines else None
        if last is not None and (last.name, last.kind) == (name, kind):
            self._lines[-1] = last._replace(end=end)
            return
        stream = "" if started is None else str(record_of(started).stream)
        found = None if started is None else wait_of(self._program, origin)
        ranks = () if found is None else tuple(sorted((self._program.rank, *found.peers)))
        text = line_of(self._program, origin)
        path = self._paths[origin][: None if started is None else -1]
        self._lines.append(RecordedLine(name, kind, stream, begin, end, text, path, ranks))


def _kind_of(node: fx.Node) -> tuple[LineKind, fx.Node | None]:
    """Return the kind of a line of a program, and the start of its message, if it has one."""
    if node.target is transfers.wait:
        return "wait", node_at(node)
    if record_of(node).started:
        return "start", node
    return "compute", None


_RECORDER: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


def recorder() -> Recorder | None:
    """Return the recorder of the present ``with`` block; ``None`` outside."""
    return _RECORDER.get()


@contextmanager
def recording(in_slots: bool = False, marks: HostMarks | None = None) -> Iterator[Recorder]:
    """Record what this process runs in the ``with`` block. ``in_slots`` and ``marks``: as of ``Recorder``."""
    token = _RECORDER.set(made := Recorder(in_slots=in_slots, marks=marks or HostMarks()))
    try:
        yield made
    finally:
        _RECORDER.reset(token)
    made.settle()


def clock_offsets(begun: Sequence[tuple[str, float]]) -> list[float]:
    """Return what each rank adds to its seconds, so that those of a machine are on one clock.

    The last rank of each machine is taken to be ready at one moment. The clock begins with the first rank of all.

    Args:
        begun: for each rank its machine, and when it was ready by the clock of that machine.
    """
    ready: dict[str, float] = {}
    for machine, at in begun:
        ready[machine] = max(at, ready.get(machine, at))
    offsets = [at - ready[machine] for machine, at in begun]
    first = min(offsets)
    return [offset - first for offset in offsets]
