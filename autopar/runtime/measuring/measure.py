"""Measure a profile: the time of each distinct call of some explicit programs.

    mm : f32[32/dp 256/tp] = mm(x, t)            ×14     →   mm(f32[16 64], f32[64 128] by t of …)      412 µs
    mm_tp : f32[32/dp 64] = all_reduce(mm, tp)   ×7      →   all_reduce(f32[16 64], tp)                 180 µs

A process that is alone times the ops and the local transfers of the first rank, whose pieces are the largest, and takes
prices for the exchanges. The processes of a job time all of them, with all ranks at work; an exchange of one stage of a
pipeline by the ranks of this stage, while the others wait. A call takes turns over several sets of operands, so that
caches hold no more of them than in a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import distributed, fx

from autopar.costs.calls import EXCHANGE, calls_of, first_ranks, group_of, kind_of
from autopar.costs.durations import free_additions, startup_of
from autopar.costs.machine import Machine
from autopar.costs.profile import Profile
from autopar.costs.profile_row import ProfileRow
from autopar.costs.program_price import node_prices
from autopar.ir import transfers
from autopar.ir.nodes import record_of
from autopar.ir.program import Program, program_digest
from autopar.ir.value_names import sums_in
from autopar.report.progress import doing
from autopar.runtime.measuring.between_stages import BetweenStages
from autopar.runtime.measuring.clock import Call, Clock, Effort
from autopar.runtime.measuring.interference import measure_interference
from autopar.runtime.measuring.operands import Operands
from autopar.runtime.measuring.ready import ready_compute, ready_exchange, ready_small_exchange
from autopar.runtime.modes import as_captured
from autopar.runtime.processes.job import Job
from autopar.runtime.wire.wire_groups import backend_of
from autopar.torch_private import aten

ALONE = "one process is alone; under torchrun, all processes time them together"
COLD_BYTES, MOST_SETS = 64 << 20, 16  # of the sets of operands over which a call takes turns
BETWEEN_STAGES = "messages between stages are not timed"


@dataclass(frozen=True)
class Placed:
    """An explicit program with its local programs.

    Attributes:
        program: the explicit program.
        local: rank → its program.
        times: how often a step runs it; 0 for a program that stands for others, which are counted.
    """

    program: Program
    local: Mapping[int, Program]
    times: int


@dataclass
class DistinctCall:
    """A call that several nodes make alike.

    Attributes:
        node: the first of these nodes, of the explicit program.
        placed: its program.
        price: its seconds by the machine's figures.
        times: phase → how often a step runs it.
    """

    node: fx.Node
    placed: Placed
    price: float
    times: dict[str, int] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return kind_of(self.node)

    @property
    def group(self) -> str:
        """The transfer of an exchange and its axes; else ""."""
        return group_of(self.node) if self.kind == EXCHANGE else ""


def measure(
    programs: Mapping[str, Placed],
    machine: Machine,
    device: torch.device,
    job: Job | None = None,
    *,
    effort: Effort | None = None,
    interference: bool = False,
    between: Sequence[BetweenStages] = (),
) -> Profile:
    """Time each distinct call of some explicit programs once. All ranks of a job call it, and get equal profiles.

    Nothing of the model changes, and torch's random numbers go on as before.

    Args:
        programs: by name; those of the stages of a pipeline are on meshes of their own, of equal axes.
        machine: whose prices stand beside the times, and in the place of what is not timed.
        device: the device of the pieces.
        job: this process's job; ``None`` if it is alone.
        effort: how long each call is timed.
        interference: whether to time a product of matrices beside an all-reduce too.
        between: the messages between stages.

    Raises:
        ValueError: a program is not explicit, or the interference is asked for in a process that is alone.
    """
    together = job is not None and distributed.get_world_size() > 1
    if interference and not together:
        raise ValueError(
            "interference is how much slower ops compute beside a collective, and one process has none; start several "
            "with torchrun, or leave interference out"
        )
    clock = Clock(device, effort, job.control if job is not None and together else None)
    distinct = distinct_calls(programs.values(), machine)
    with as_captured(), torch.random.fork_rng([device] if device.type != "cpu" else []):
        measuring = _Measuring(clock, machine, job if together else None)
        with doing(measuring.text):
            rows = [*measuring.rows(distinct), *map(measuring.message_row, between)]
            launch = clock.median(measuring.smallest())
            slower = measure_interference(clock) if interference else 0.0
    name = "cpu" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)
    meshes = {str(placed.program.mesh) for placed in programs.values()}
    assert len(meshes) == 1, "the programs of a step are on one mesh, or on meshes of stages, which are alike"
    return Profile(
        machine=machine, device=name, backend=backend_of(None, device.type) if together else "",
        ranks=distributed.get_world_size() if together else 1, threads=torch.get_num_threads(), torch=torch.__version__,
        mesh=meshes.pop(), programs={name: program_digest(placed.program) for name, placed in programs.items()},
        launch=launch, interference=slower, rows={row.call: row for row in rows},
    )  # fmt: skip


def distinct_calls(programs: Iterable[Placed], machine: Machine) -> dict[str, DistinctCall]:
    """Return the distinct calls of programs, by their texts, in the order of the programs. Linear in the graphs."""
    found: dict[str, DistinctCall] = {}
    for placed in programs:
        prices = dict(node_prices(placed.program, machine))
        first_sums = frozenset(free_additions(placed.program, sums_in(placed.program)))
        for node, text in calls_of(placed.program):
            call = found.setdefault(text, DistinctCall(node, placed, prices[node] / 1e9))
            times = placed.times - (node.name in first_sums)  # the first gradient takes the place of its sum
            if times > 0:
                phase = record_of(node).phase
                call.times[phase] = call.times.get(phase, 0) + times
    return found


def nothing() -> None:
    """Do nothing: the part of a rank in a collective of others."""


def in_turn(calls: Sequence[Call]) -> Call:
    """Return a call that is each of several calls in turn."""
    turn = itertools.cycle(calls)
    return lambda: next(turn)()


class _Measuring:
    """Times the calls, one after the other.

    Args:
        clock: how they are timed.
        machine: whose prices are taken for what is not timed.
        job: the job of several processes; ``None`` if this one is alone.
    """

    def __init__(self, clock: Clock, machine: Machine, job: Job | None) -> None:
        self.clock, self.machine, self.job = clock, machine, job
        self.operands = Operands(clock.device)
        self.startups: dict[str, float] = {}  # group → the seconds of its collective on one number a rank
        self.nodes: dict[int, dict[str, fx.Node]] = {}  # the nodes of local programs by name, by graph
        self.now = ""

    def text(self) -> str:
        """Return what is timed now, for the bar."""
        return self.now

    def rows(self, distinct: Mapping[str, DistinctCall]) -> list[ProfileRow]:
        """Return the row of each call."""
        rows = []
        for k, (text, call) in enumerate(distinct.items(), 1):
            self.now = f"time {k} of {len(distinct)} calls: {text}"
            rows.append(self.exchange_row(text, call) if call.kind == EXCHANGE else self.compute_row(text, call))
        return rows

    def compute_row(self, text: str, call: DistinctCall) -> ProfileRow:
        """Time an op or a local transfer of the first rank on which the value is."""
        programs = [call.placed.local[rank] for rank in first_ranks(call.placed.program)]
        program = next(program for program in programs if call.node.name in self.named(program))
        ready, why = self._tried(program, self.named(program)[call.node.name])
        seconds = call.price if ready is None else self.clock.median(ready)
        return ProfileRow(text, call.kind, seconds, call.price, call.times, why=why)

    def exchange_row(self, text: str, call: DistinctCall) -> ProfileRow:
        """Time a collective, with this rank's part of it."""
        price, why = call.price, ""
        if self.job is None:
            why = ALONE
        elif call.node.target in (transfers.send, transfers.recv) or call.placed.program.stages:
            why = BETWEEN_STAGES
        if why or self.job is None:
            startup = min(startup_of(call.node, self.machine), price)
            return ProfileRow(text, call.kind, price, price, call.times, call.group, startup, why)
        if call.group not in self.startups:
            self.startups[call.group] = self.clock.median(self._exchange(call, ready_small_exchange))
        seconds = self.clock.median(self._exchange(call, ready_exchange))
        return ProfileRow(
            text, call.kind, seconds, price, call.times, call.group, min(self.startups[call.group], seconds)
        )

    def _exchange(self, call: DistinctCall, ready: Callable[..., Call]) -> Call:
        """Return this rank's part of a collective; nothing on the ranks of other stages."""
        assert self.job is not None and call.placed.program.mesh is not None
        if self.job.rank not in call.placed.program.mesh:
            return nothing
        program = call.placed.local[self.job.rank]
        return ready(program, self.named(program)[call.node.name], self.job.groups, self.clock.device)

    def message_row(self, messages: BetweenStages) -> ProfileRow:
        """Time messages between stages, there and back."""
        if self.job is None:
            return ProfileRow(messages.call, EXCHANGE, messages.price, messages.price, messages.times, why=ALONE)
        self.now = f"time {messages.call}"
        seconds = self.clock.median(messages.ready(self.job.rank, self.clock.device)) / 2
        return ProfileRow(messages.call, EXCHANGE, seconds, messages.price, messages.times)

    def _tried(self, program: Program, node: fx.Node) -> tuple[Call | None, str]:
        """Return a call that works on all ranks; else ``None``, and why there is none."""
        ready, why = None, ""
        try:
            before = self.operands.bytes
            calls = [ready_compute(program, node, self.operands)]
            calls[0]()
            sets = min(MOST_SETS, COLD_BYTES // max(self.operands.bytes - before, 1))
            calls += [ready_compute(program, node, self.operands) for _ in range(sets - 1)]
            ready = in_turn(calls)
        except Exception as error:  # an op may raise anything on random operands
            why = f"on random operands it raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if not self.clock.agreed([float(bool(why))])[0]:
            return ready, ""
        return None, why or "on random operands it raises an error on another rank"

    def named(self, program: Program) -> dict[str, fx.Node]:
        """Return the nodes of a local program by name."""
        if id(program.graph) not in self.nodes:
            self.nodes[id(program.graph)] = {node.name: node for node in program.nodes}
        return self.nodes[id(program.graph)]

    def smallest(self) -> Call:
        """Return the call of an op on one number."""
        one = torch.ones((), device=self.clock.device)
        return partial(aten.add.Tensor, one, one)
