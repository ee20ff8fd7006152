"""Check the order of tasks, then that all ranks finish, and explain what is wrong."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from autopar.errors import ChannelError
from autopar.ir.streams import Stream
from autopar.verify.channels.progress import Pair, Run, pair_of
from autopar.verify.channels.tasks import ALL, Channels, Collective, Group, Receive, Send, Step, Task, on, some_ranks

ONE_ORDER = "put the collectives of all groups into one order"


def check(tasks: Mapping[int, Sequence[Task]], channels: Iterable[Channels] = ALL) -> None:
    """Check the tasks of all ranks, given by rank. Linear in their number.

    Args:
        channels: the channels on which the ranks must finish; without any, only the order of collectives and messages
            is checked.

    Raises:
        ChannelError: collectives or messages do not fit together, or ranks wait for each other forever.
    """
    check_tasks(tasks, channels, lambda rank, value: "")


Lines = Callable[[int, str], str]  # (rank, value) → the value's line in the rank's program, to be quoted
RankTasks = tuple[int, Sequence[Collective | Send | Receive]]  # a rank and its tasks


def check_tasks(tasks: Mapping[int, Sequence[Task]], channels: Iterable[Channels], lines: Lines) -> None:
    collectives: dict[Stream, dict[int, list[Collective]]] = defaultdict(lambda: defaultdict(list))
    sends: dict[Pair, list[Send]] = defaultdict(list)
    receives: dict[Pair, list[Receive]] = defaultdict(list)
    steps = functools.cache(
        lambda together: {rank: _steps(tasks_of_rank, together) for rank, tasks_of_rank in tasks.items()}
    )
    for rank, tasks_of_rank in steps(False).items():
        for (task,) in tasks_of_rank:
            if isinstance(task, Collective):
                collectives[task.group][rank].append(task)
            elif isinstance(task, Send):
                sends[pair_of(rank, task)].append(task)
            else:
                receives[pair_of(rank, task)].append(task)
    _check_collectives(collectives, lines)
    _check_messages(sends, receives, lines)
    finished: list[Channels] = []
    dead: Run | None = None
    for model in sorted(channels, key=lambda model: model.strictness, reverse=True):
        if not any(model.looser(other) for other in finished):
            run = Run(steps(model.together), model)
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
            steps += ((message,) for message in task.tasks)
        elif task.tasks:
            steps.append(task.tasks)
    return steps


# -- order -----------------------------------------------------------------------------------------------------------


def _check_collectives(collectives: Mapping[Stream, Mapping[int, list[Collective]]], lines: Lines) -> None:
    for (ranks, stream), runs in collectives.items():
        members = some_ranks(ranks) + on(stream)
        if len(set(ranks)) < len(ranks):
            raise ChannelError(f"{members} are no group: a rank is given twice")
        for rank, tasks in runs.items():
            if rank not in ranks:
                raise ChannelError(
                    f"rank {rank} runs a collective of a group it is not in:\n{_line(rank, tasks[0], lines)}remove it "
                    f"from this rank"
                )
        first, *others = ranks
        expected = runs.get(first, [])
        for other in others:
            if (actual := runs.get(other, [])) != expected:
                raise _different(f"collective {{}} of {members}", (first, expected), (other, actual), lines)
            for number, (left, right) in enumerate(zip(expected, actual, strict=True), 1):
                if left is not right:
                    _check_payloads(f"collective {number} of {members}", (first, left), (other, right), lines)


def _check_messages(sends: Mapping[Pair, list[Send]], receives: Mapping[Pair, list[Receive]], lines: Lines) -> None:
    for pair in sorted(sends.keys() | receives.keys()):
        sender, receiver, stream = pair
        where = f"message {{}} from rank {sender} to rank {receiver}{on(stream)}"
        sent, received = sends.get(pair, []), receives.get(pair, [])
        if sender == receiver:
            raise ChannelError(
                f"a rank exchanges a message with itself:\n{_line(sender, (sent or received)[0], lines)}use the value "
                f"without one"
            )
        if [s.value for s in sent] != [r.value for r in received]:
            raise _different(
                f"message {{}} from rank {sender} to rank {receiver}{on(stream)}",
                (sender, sent),
                (receiver, received),
                lines,
            )
        for number, (s, r) in enumerate(zip(sent, received, strict=True), 1):
            if s.bytes != r.bytes and s.bytes is not None and r.bytes is not None:
                raise ChannelError(
                    f"a message has {s.bytes} bytes where it is sent and {r.bytes} where it is received:\n"
                    f"{_line(sender, s, lines)}{_line(receiver, r, lines)}give both ends the same shape and dtype"
                )
            _check_payloads(where.format(number), (sender, s), (receiver, r), lines)


def _check_payloads(
    where: str,
    first_task: tuple[int, Collective | Send | Receive],
    second_task: tuple[int, Collective | Send | Receive],
    lines: Lines,
) -> None:
    """Check that both tasks have the same payload, if both have one."""
    (first, left_task), (second, right_task) = first_task, second_task
    if not left_task.payload or not right_task.payload or left_task.payload == right_task.payload:
        return
    left, right = dict(left_task.payload), dict(right_task.payload)
    key = next(key for key in {**left, **right} if left.get(key) != right.get(key))
    raise ChannelError(
        f"{where} has another {key} on rank {second} than on rank "
        f"{first}:\n{_line(first, left_task, lines)}{_line(second, right_task, lines)}the {key} is "
        f"{left.get(key, 'absent')} on rank {first} and {right.get(key, 'absent')} on rank {second}; give both "
        f"ranks the same {key}"
    )


def _different(where: str, left: RankTasks, right: RankTasks, lines: Lines) -> ChannelError:
    """Return an error about the first difference of two sequences, and whether a task is missing there."""
    keys = [[_key(task) for task in tasks] for _, tasks in (left, right)]
    place = next((i for i, (a, b) in enumerate(zip(*keys, strict=False)) if a != b), min(map(len, keys)))
    quoted, uneven = "", {}
    for rank, tasks in (left, right):
        quoted += (
            _line(rank, tasks[place], lines)
            if place < len(tasks)
            else f"  rank {rank}: {'no more' if tasks else 'none at all'}\n"
        )
        for key in map(_key, tasks[place : place + 1]):
            left_count, right_count = (rank_keys.count(key) for rank_keys in keys)
            if left_count != right_count:
                uneven[key] = f"rank {left[0]} does {key} {_times(left_count)}, rank {right[0]} {_times(right_count)}; "
    remedy = f"{''.join(uneven.values())}let both do it as often" if uneven else "give both ranks the same order"
    return ChannelError(f"{where.format(place + 1)} is not the same on both:\n{quoted}{remedy}")


def _key(task: Collective | Send | Receive) -> str:
    """Return what must be equal at the same position of both sequences."""
    return f"{task.value} = {task.op}" if isinstance(task, Collective) else task.value


# -- errors ----------------------------------------------------------------------------------------------------------


def _deadlock(run: Run, finished: Sequence[Channels], lines: Lines) -> ChannelError:
    cycle = run.cycle()
    waits = "".join(
        f"  rank {rank} waits for rank {other} in {_line(rank, task, lines).partition(': ')[2]}"
        for (rank, task), (other, _) in zip(cycle, cycle[1:] + cycle[:1], strict=True)
    )
    others = f"on {', '.join(model.name for model in finished)} channels they finish; " if finished else ""
    remedy = ONE_ORDER if all(isinstance(task, Collective) for _, task in cycle) else run.channels.remedy
    return ChannelError(
        f"ranks wait for each other forever on {run.channels.name} channels "
        f"({run.channels.about}):\n{waits}{others}{remedy}"
    )


def _line(rank: int, task: Collective | Send | Receive, lines: Lines) -> str:
    """Return a task for an error, ``rank 0: send x_s1 to 2``, with the line of the program that contains it."""
    quoted = lines(rank, task.value)
    return f"  rank {rank}: {task}\n" + (f"      {quoted}\n" if quoted else "")


def _times(n: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(n, f"{n} times")
