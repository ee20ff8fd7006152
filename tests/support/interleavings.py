"""Explore all interleavings of small schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.verify.channels import Channels, Collective, Group, Receive, Send, Task


def explored(tasks: Mapping[int, Sequence[Task]], model: Channels) -> set[bool]:
    """The ends of all interleavings: whether all ranks finished, each message received as what it was sent as.

    A state is, of each rank, its step and what of that is not done; and, of each pair, the messages on their way.
    """
    steps: dict[int, list[tuple]] = {rank: [] for rank in tasks}
    for rank, own in tasks.items():
        for task in own:
            inner = task.tasks if isinstance(task, Group) else (task,)
            steps[rank] += [inner] if model.together else [(one,) for one in inner]
        steps[rank] = [step for step in steps[rank] if step]
    room = 10**9 if model.capacity is None else model.capacity
    ranks = sorted(tasks)
    start = (tuple((0, tuple(steps[r][0]) if steps[r] else ()) for r in ranks), ())
    ends, seen, todo = set(), {start}, [start]

    def without(at: dict, rank: int, task: Task) -> None:
        step, left = at[rank]
        place = left.index(task)
        left = (*left[:place], *left[place + 1 :])
        if not left and (step := step + 1) < len(steps[rank]):
            left = steps[rank][step]
        at[rank] = step, left

    def heads(left: Sequence[Task]) -> list[Task]:
        """The first open send to each rank, the first open receive from each, and a collective."""
        keys = [(type(t), getattr(t, "to", None), getattr(t, "source", None)) for t in left]
        return [t for place, t in enumerate(left) if keys.index(keys[place]) == place]

    while todo:
        state = todo.pop()
        at, queues = dict(zip(ranks, state[0], strict=True)), dict(state[1])
        following = []
        for rank in ranks:
            for task in heads(at[rank][1]):
                new, on_way = dict(at), dict(queues)
                if isinstance(task, Collective):
                    if all(m in at and task in at[m][1] for m in task.ranks) and len(set(task.ranks)) == len(
                        task.ranks
                    ):
                        for member in task.ranks:
                            without(new, member, task)
                        following.append((new, on_way))
                elif isinstance(task, Send):
                    queue = queues.get((rank, task.to), ())
                    if len(queue) < room:
                        on_way[rank, task.to] = (*queue, (task.value, task.bytes))
                        without(new, rank, task)
                        following.append((new, on_way))
                    elif room == 0 and task.to in at and task.to != rank:
                        for other in heads(at[task.to][1]):
                            if isinstance(other, Receive) and other.source == rank:
                                if (other.value, other.bytes) != (task.value, task.bytes):
                                    return {False}
                                without(new, rank, task), without(new, task.to, other)
                                following.append((new, on_way))
                elif queue := queues.get((task.source, rank), ()):
                    if queue[0] != (task.value, task.bytes):
                        return {False}
                    on_way[task.source, rank] = queue[1:]
                    without(new, rank, task)
                    following.append((new, on_way))
        if not following:
            ends.add(not any(left for _, left in at.values()) and not any(queues.values()))
        for new, on_way in following:
            state = tuple(new[r] for r in ranks), tuple(sorted((pair, q) for pair, q in on_way.items() if q))
            if state not in seen:
                seen.add(state)
                todo.append(state)
    return ends
