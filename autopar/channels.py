"""Deadlock freedom, checked: whether the communication of all ranks fits together and comes to an end.

Each rank has a sequence of tasks. ``check`` looks at all of them together:

* the members of a group run the same collectives in the same order;
* between two ranks the i-th message sent is the i-th received: messages have no tags, and none overtakes another;
* all ranks finish, on channels that buffer all, some or no messages. An error names the cycle of ranks that wait.

What finishes without any buffer is what the MPI standard calls *safe* (MPI 4.0, section 3.5).
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from autopar import transfers
from autopar.errors import ChannelError
from autopar.program import Program, record_of
from autopar.record import PHASES
from autopar.text.printer import print_node

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Collective:
    """An op that all ``ranks``, in the order of their group, run together."""

    value: str
    op: str
    ranks: Ranks

    def __str__(self) -> str:
        return f"{self.value} = {self.op} of {_ranks(self.ranks)}"


@dataclass(frozen=True, slots=True)
class Send:
    """A message; ``bytes`` are compared where both ends give them."""

    value: str
    to: int
    bytes: int | None = None

    def __str__(self) -> str:
        return f"send {self.value} to {self.to}"


@dataclass(frozen=True, slots=True)
class Receive:
    """The other end of a ``Send``."""

    value: str
    source: int
    bytes: int | None = None

    def __str__(self) -> str:
        return f"receive {self.value} from {self.source}"


@dataclass(frozen=True, slots=True)
class Group:
    """Messages that are posted together and have finished when all have: ``batch_isend_irecv``."""

    tasks: tuple[Send | Receive, ...]


Task = Collective | Send | Receive | Group
Step = tuple[Collective | Send | Receive, ...]  # what a rank posts at once


@dataclass(frozen=True)
class Channels:
    """When a message is done.

    Attributes:
        capacity: a send to a rank waits while so many are unreceived there; 0: until it is received, ``None``: never.
        together: the messages of a group are posted together, and not one after the other.
        about: what a send waits for, in words.
        remedy: what to do where ranks wait for ever.
    """

    name: str
    capacity: int | None
    together: bool
    about: str
    remedy: str

    @property
    def strictness(self) -> tuple[float, bool]:
        return -math.inf if self.capacity is None else -self.capacity, not self.together

    def looser(self, other: Channels) -> bool:
        """Whether all that finishes on ``other`` finishes here: more room and earlier posts hold nobody up."""
        return all(a <= b for a, b in zip(self.strictness, other.strictness, strict=True))


def buffered(k: int) -> Channels:
    """Channels that hold ``k`` messages of each ordered pair of ranks."""
    if k < 1:
        raise ValueError(f"buffered({k}) holds no message; without buffers channels are GROUPED or BLOCKING")
    return Channels(f"{k}-buffered", k, True, f"a send waits while {k} before it are unreceived",
                    f"receive earlier, or make room for more than {k}")  # fmt: skip


ASYNCHRONOUS = Channels("asynchronous", None, True, "only receives wait", "send earlier what another rank waits for")
GROUPED = Channels("grouped", 0, True, "both ends of a message wait for each other, and all of a group are posted together",
                   "put messages that cross into one group, on each rank")  # fmt: skip
BLOCKING = Channels("blocking", 0, False, "both ends of a message wait for each other, and a rank does one after the other",
                    "put the messages of all ranks into one order, or group those that cross and post groups together")  # fmt: skip
ALL = (ASYNCHRONOUS, buffered(1), GROUPED, BLOCKING)
ONE_ORDER = "put the collectives of all groups into one order"


def check(tasks: Mapping[int, Sequence[Task]], channels: Iterable[Channels] = ALL) -> None:
    """Check the tasks of all ranks, given by rank; linear.

    Args:
        channels: on which the ranks must finish; without any, only the order of collectives and messages is checked.

    Raises:
        ChannelError: collectives or messages do not fit together, or ranks wait for each other for ever.
    """
    _check(tasks, channels, lambda rank, value: "")


Lines = Callable[[int, str], str]  # the line of a value in a rank's program, to be quoted
Own = tuple[int, Sequence[Collective | Send | Receive]]  # a rank and what it does


def _check(tasks: Mapping[int, Sequence[Task]], channels: Iterable[Channels], lines: Lines) -> None:
    collectives: dict[Ranks, dict[int, list[Collective]]] = defaultdict(lambda: defaultdict(list))
    sends: dict[tuple[int, int], list[Send]] = defaultdict(list)
    receives: dict[tuple[int, int], list[Receive]] = defaultdict(list)
    steps = functools.cache(lambda together: {rank: _steps(own, together) for rank, own in tasks.items()})
    for rank, own in steps(False).items():
        for (task,) in own:
            if isinstance(task, Collective):
                collectives[task.ranks][rank].append(task)
            elif isinstance(task, Send):
                sends[rank, task.to].append(task)
            else:
                receives[task.source, rank].append(task)
    _check_collectives(collectives, lines)
    _check_messages(sends, receives, lines)
    finished: list[Channels] = []
    dead: _Run | None = None
    for model in sorted(channels, key=lambda model: model.strictness, reverse=True):
        if not any(model.looser(other) for other in finished):
            run = _Run(steps(model.together), model)
            if run.blocked:
                dead = run
                continue
        finished.append(model)
    if dead is not None:
        raise _deadlock(dead, finished, lines)


def _steps(tasks: Sequence[Task], together: bool) -> list[Step]:
    steps: list[Step] = []
    for task in tasks:
        if not isinstance(task, Group):
            steps.append((task,))
        elif not together:
            steps += ((one,) for one in task.tasks)
        elif task.tasks:
            steps.append(task.tasks)
    return steps


# -- order -----------------------------------------------------------------------------------------------------------


def _check_collectives(collectives: Mapping[Ranks, Mapping[int, list[Collective]]], lines: Lines) -> None:
    for ranks, runs in collectives.items():
        if len(set(ranks)) < len(ranks):
            raise ChannelError(f"{_ranks(ranks)} are no group: a rank is given twice")
        for rank, own in runs.items():
            if rank not in ranks:
                raise ChannelError(f"rank {rank} runs a collective of a group it is not in:\n{_line(rank, own[0], lines)}leave it out there")
        first, *others = ranks
        expected = runs.get(first, [])
        for other in others:
            if (found := runs.get(other, [])) != expected:
                raise _different(f"collective {{}} of {_ranks(ranks)}", (first, expected), (other, found), lines)


def _check_messages(sends: Mapping[tuple[int, int], list[Send]], receives: Mapping[tuple[int, int], list[Receive]],
                    lines: Lines) -> None:  # fmt: skip
    for pair in sorted(sends.keys() | receives.keys()):
        sender, receiver = pair
        sent, received = sends.get(pair, []), receives.get(pair, [])
        if sender == receiver:
            raise ChannelError(f"a rank exchanges a message with itself:\n{_line(sender, (sent or received)[0], lines)}use the value without one")
        if [s.value for s in sent] != [r.value for r in received]:
            raise _different(f"message {{}} from rank {sender} to rank {receiver}", (sender, sent), (receiver, received), lines)
        for s, r in zip(sent, received, strict=True):
            if s.bytes != r.bytes and s.bytes is not None and r.bytes is not None:
                raise ChannelError(
                    f"a message has {s.bytes} bytes where it is sent and {r.bytes} where it is received:\n"
                    f"{_line(sender, s, lines)}{_line(receiver, r, lines)}give both ends the same shape and dtype"
                )


def _different(where: str, one: Own, other: Own, lines: Lines) -> ChannelError:
    """The first place in which two sequences that must be equal are not, and whether a task is missing there."""
    keys = [[_key(task) for task in tasks] for _, tasks in (one, other)]
    place = next((i for i, (a, b) in enumerate(zip(*keys, strict=False)) if a != b), min(map(len, keys)))
    quoted, uneven = "", {}
    for rank, tasks in (one, other):
        quoted += _line(rank, tasks[place], lines) if place < len(tasks) else f"  rank {rank}: {'no more' if tasks else 'none at all'}\n"
        for key in map(_key, tasks[place : place + 1]):
            here, there = (own.count(key) for own in keys)
            if here != there:
                uneven[key] = f"rank {one[0]} does {key} {_times(here)}, rank {other[0]} {_times(there)}; "
    remedy = f"{''.join(uneven.values())}let both do it as often" if uneven else "give both ranks the same order"
    return ChannelError(f"{where.format(place + 1)} is not the same on both:\n{quoted}{remedy}")


def _key(task: Collective | Send | Receive) -> str:
    """What must be equal at the same place of both sequences."""
    return f"{task.value} = {task.op}" if isinstance(task, Collective) else task.value


# -- progress --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Pair:
    """How many messages of an ordered pair of ranks have been posted, and how many are done."""

    sends: int = 0
    receives: int = 0
    sent: int = 0
    received: int = 0


class _Run:
    """All ranks, run until each has finished or waits for ever; ``blocked`` lists those that wait.

    No rank chooses between tasks, so what can happen stays possible until it does, and one run decides for all orders
    of events (the ranks are a marked graph: Commoner, Holt, Even, Pnueli, "Marked directed graphs", 1971).
    """

    def __init__(self, steps: Mapping[int, Sequence[Step]], channels: Channels) -> None:
        self.steps, self.channels = steps, channels
        self.at = dict.fromkeys(steps, -1)
        self.pairs: dict[tuple[int, int], _Pair] = {}
        arrived: dict[Ranks, int] = {}
        left = dict.fromkeys(steps, 0)  # messages of the rank's step that are not done
        ready = list(steps)
        while ready:
            rank = ready.pop()
            self.at[rank] += 1
            if self.at[rank] == len(steps[rank]):
                continue
            step = steps[rank][self.at[rank]]
            left[rank] = len(step)
            for task in step:
                if isinstance(task, Collective):
                    here = arrived[task.ranks] = arrived.get(task.ranks, 0) + 1
                    if here == len(task.ranks):
                        arrived[task.ranks] = 0
                        ready += task.ranks
                    continue
                for one, done in self._post(rank, task):
                    left[one] -= done
                    if done and not left[one]:
                        ready.append(one)
        self.blocked = [rank for rank in steps if self.at[rank] < len(steps[rank])]

    def _post(self, rank: int, task: Send | Receive) -> tuple[tuple[int, int], tuple[int, int]]:
        """How many messages of the sender and of the receiver are done by that."""
        sender, receiver = ends = _ends(rank, task)
        pair = self.pairs.setdefault(ends, _Pair())
        if isinstance(task, Send):
            pair.sends += 1
        else:
            pair.receives += 1
        sent, received = pair.sent, pair.received
        pair.received = min(pair.sends, pair.receives)
        room = self.channels.capacity
        pair.sent = pair.sends if room is None else min(pair.sends, pair.received + room)
        return (sender, pair.sent - sent), (receiver, pair.received - received)

    def cycle(self) -> list[tuple[int, Collective | Send | Receive]]:
        """Ranks that wait for one another, each for the next and the last for the first, and the tasks they wait in."""
        waits: dict[int, Collective | Send | Receive] = {}
        rank = self.blocked[0]
        while rank not in waits:
            waits[rank], rank = self._wait(rank)
        ring = list(waits)[list(waits).index(rank) :]
        start = ring.index(min(ring))
        return [(rank, waits[rank]) for rank in ring[start:] + ring[:start]]

    def _wait(self, rank: int) -> tuple[Collective | Send | Receive, int]:
        """The first task that holds a blocked rank up, and the rank that has yet to do its part; that one is blocked too."""
        step = self.steps[rank][self.at[rank]]
        (task, *_) = step
        if isinstance(task, Collective):
            return task, next(m for m in task.ranks if self.steps[m][self.at[m]] != (task,))
        posted: Counter[tuple[int, int]] = Counter()
        for one in reversed(step):  # what is not done are the last of each pair
            pair = self.pairs[_ends(rank, one)]
            posted[_ends(rank, one)] += 1
            if posted[_ends(rank, one)] <= (pair.sends - pair.sent if isinstance(one, Send) else pair.receives - pair.received):
                task = one
        return task, task.to if isinstance(task, Send) else task.source


def _ends(rank: int, task: Send | Receive) -> tuple[int, int]:
    return (rank, task.to) if isinstance(task, Send) else (task.source, rank)


# -- errors ----------------------------------------------------------------------------------------------------------


def _deadlock(run: _Run, finished: Sequence[Channels], lines: Lines) -> ChannelError:
    cycle = run.cycle()
    waits = "".join(
        f"  rank {rank} waits for rank {other} in {_line(rank, task, lines).partition(': ')[2]}"
        for (rank, task), (other, _) in zip(cycle, cycle[1:] + cycle[:1], strict=True)
    )
    others = f"on {', '.join(model.name for model in finished)} channels they finish; " if finished else ""
    remedy = ONE_ORDER if all(isinstance(task, Collective) for _, task in cycle) else run.channels.remedy
    return ChannelError(
        f"ranks wait for each other for ever on {run.channels.name} channels ({run.channels.about}):\n{waits}{others}{remedy}"
    )


def _line(rank: int, task: Collective | Send | Receive, lines: Lines) -> str:
    """``rank 0: send x_s1 to 2``, and the line of the program that asks for it."""
    quoted = lines(rank, task.value)
    return f"  rank {rank}: {task}\n" + (f"      {quoted}\n" if quoted else "")


def _ranks(ranks: Ranks) -> str:
    shown = " ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]} {ranks[1]} … {ranks[-1]} ({len(ranks)} in all)"
    return f"ranks {shown}"


def _times(n: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(n, f"{n} times")


# -- programs --------------------------------------------------------------------------------------------------------

Axis = str | tuple[str, ...]
Place = tuple[str | None, Axis]  # a stage, and one or more of its axes


@dataclass(frozen=True, slots=True)
class _Communication:
    """A communicating node; equal ones are the same collective. ``node`` is there where it is messages instead."""

    value: str
    op: str
    place: Place
    node: fx.Node | None = None


def check_programs(programs: Mapping[int, Program], channels: Iterable[Channels] = ALL) -> None:
    """Check the local programs of all ranks, given by rank; linear, and one walk where ranks share a graph.

    Raises:
        ChannelError: as ``check``, with the lines of the programs; or a program is not that of its rank.
    """
    given = dict(programs)
    for rank, program in given.items():
        if (found := _rank_of(program)) != rank:
            raise ChannelError(f"the program given as that of rank {rank} is at {program.coordinates}, which is rank {found}")
    walks = {id(program.graph): walk for program, walk in _by_graph(given.values())}
    if given and not _alike(given, list(walks.values())):
        made: dict[Any, Collective] = {}
        tasks = {rank: _tasks(program, walks[id(program.graph)], made) for rank, program in given.items()}
        _check(tasks, channels, lambda rank, value: _quoted(given[rank], value))


def tasks_of(program: Program) -> list[Task]:
    """What the rank of a local program communicates, phase by phase, in the order of the graph."""
    return _tasks(program, _walk(program), {})


def creation_order(programs: Iterable[Program]) -> list[Ranks]:
    """The groups that the local programs need, in the one order in which all ranks must create them.

    It depends on the graphs alone and not on whose programs these are: a rank may ask with its own where all share a
    graph. Groups of one rank are left out.
    """
    groups: set[Ranks] = set()
    for program, walk in _by_graph(programs):
        for stage, axis in {one.place for one in walk if one.node is None}:
            mesh = program.meshes[stage]
            groups.update(mesh.group(rank, axis) for rank in mesh.ranks)
    return sorted(group for group in groups if len(group) > 1)


def _messages(program: Program, node: fx.Node) -> Group:
    """The messages of a ``send`` or ``recv`` on the program's rank."""
    raise ChannelError(f"the messages of this transfer are not known, so it cannot be checked:\n{print_node(program, node)}")


def _by_graph(programs: Iterable[Program]) -> list[tuple[Program, list[_Communication]]]:
    """One program of each graph, and its communicating nodes."""
    one_each = {id(program.graph): program for program in programs}
    return [(program, _walk(program)) for program in one_each.values()]


def _walk(program: Program) -> list[_Communication]:
    phases: dict[str, list[_Communication]] = {phase: [] for phase in PHASES}
    for node in program.nodes:
        row = transfers.BY_FUNCTION.get(node.target)  # type: ignore[arg-type]
        if row is not None and row.collective:
            given = transfers.arguments(row.function, node.args, node.kwargs)
            axis = given.get("axis", ())
            place = given.get("stage"), axis if isinstance(axis, str) else tuple(axis)
            found = _Communication(node.name, row.name, place, None if "axis" in given else node)
            phases[record_of(node).phase].append(found)
    return [one for phase in phases.values() for one in phase]


def _alike(programs: Mapping[int, Program], walks: Sequence[Sequence[_Communication]]) -> bool:
    """Whether all ranks run the same collectives and nothing else, each on a mesh of all ranks: then they finish."""
    first, *others = walks
    meshes, *more = [program.meshes for program in programs.values()]
    return (
        all(one == first for one in others)
        and all(one == meshes for one in more)
        and not any(one.node for one in first)
        and all(stage in meshes and programs.keys() == set(meshes[stage].ranks) for stage in {one.place[0] for one in first})
    )


def _tasks(program: Program, walk: Sequence[_Communication], made: dict[Any, Collective]) -> list[Task]:
    """``made`` shares equal collectives between ranks, so that they compare fast."""
    rank, groups, tasks = _rank_of(program), {}, []
    for one in walk:
        if one.node is not None:
            tasks.append(_messages(program, one.node))
            continue
        if (ranks := groups.get(one.place)) is None:
            ranks = groups[one.place] = _group(program, rank, one)
        key = one.value, one.op, ranks
        if key not in made:
            made[key] = Collective(*key)
        tasks.append(made[key])
    return tasks


def _group(program: Program, rank: int, one: _Communication) -> Ranks:
    stage, axis = one.place
    try:
        return program.meshes[stage].group(rank, axis)
    except (KeyError, ValueError) as error:
        why = f"there is no stage {stage!r}" if isinstance(error, KeyError) else str(error)
        raise ChannelError(f"rank {rank} cannot take part in a collective:\n  {_quoted(program, one.value)}\n{why}") from None


def _rank_of(program: Program) -> int:
    if program.coordinates is None or program.mesh is None:
        raise ChannelError(f"channels are checked in the local programs of all ranks; this one is {program.level}")
    return program.mesh.rank(program.coordinates)


def _quoted(program: Program, value: str) -> str:
    try:
        return print_node(program, program.node(value)).strip()
    except KeyError:
        return ""
