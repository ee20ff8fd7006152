"""List the policies, one row each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from autopar.pipeline.policies.blocks import repeated
from autopar.pipeline.policies.phases import Phases
from autopar.pipeline.task import EMPTY, Slot, Table, Task

Rank = Callable[[int, int, int, int], Phases]  # ranks, rank, micro-batches, chunks


def loop(ranks: int, chunks: int) -> tuple[int, ...]:
    """Return stage → rank, round after round: ``0 1 2 0 1 2``."""
    return tuple(stage % ranks for stage in range(ranks * chunks))


def vee(ranks: int, chunks: int) -> tuple[int, ...]:
    """Return stage → rank, there and back: ``0 1 2 2 1 0``."""
    return tuple((stage % ranks, ranks - 1 - stage % ranks)[stage // ranks % 2] for stage in range(ranks * chunks))


@dataclass(frozen=True)
class Policy:
    """A rule that makes schedules.

    Attributes:
        about: a description in one sentence, with the source.
        phases: the phases of a rank; or ``table``, which makes the whole table of computations.
        chunks: how many stages a rank may have; ``None``: any number.
        default: the number of stages if it is not given.
        placement: stage → rank.
        made_for: the number of micro-batches for which the phases are made, from ranks and micro-batches; tasks of
            missing ones are dropped, which leaves every order valid.
        split: whether gradients of inputs and weights are computed separately, if only at times.
        latest: whether messages are just before their reader, instead of just after their computation.
        constant: whether memory does not grow with the number of micro-batches.
        aliases: other names.
    """

    about: str
    phases: Rank | None = None
    table: Callable[[int, int], Table] | None = None
    chunks: tuple[int, ...] | None = (1,)
    default: int = 1
    placement: Callable[[int, int], tuple[int, ...]] = loop
    made_for: Callable[[int, int], int] = lambda p, m: m
    split: bool = False
    latest: bool = False
    constant: bool = True
    aliases: tuple[str, ...] = ()


def _gpipe(p: int, r: int, m: int, v: int) -> Phases:
    return [(m, "F"), (m, "B")]


def _1f1b(p: int, r: int, m: int, v: int) -> Phases:
    return [(p - r - 1, "F"), (m, "F B"), (p, "B")]


def _eager_1f1b(p: int, r: int, m: int, v: int) -> Phases:
    return [(2 * (p - r - 1), "F"), (m, "F B"), (2 * p, "B")]


def _looped_bfs(p: int, r: int, m: int, v: int) -> Phases:
    return [*((m, f"F{c}") for c in range(v)), *((m, f"B{c}") for c in reversed(range(v)))]


def _zb_h1(p: int, r: int, m: int, v: int) -> Phases:
    return [(p - r - 1, "F"), (r, "F I"), (m - p + 1, "F I W"), (p - r - 1, "I W")]


def _zb_h2(p: int, r: int, m: int, v: int) -> Phases:
    return [(2 * (p - r - 1), "F"), (2 * r, "F I"), (m - 2 * p + 2, "F I W"), (2 * (p - r - 1), "I W")]


def _zb_v(p: int, r: int, m: int, v: int) -> Phases:
    return [
        (2 * (p - r) - 1, "F0"),
        (r, "F1 F0"),
        (p - r, "F1 I1 W1"),
        (m - 2 * p + r + 1, "F0 I0 W0 F1 I1 W1"),
        (p - r - 1, "I0 W0 F1 I1 W1"),
        (r, "I0 I1"),
        (p - r, "I0 W0"),
        (r, "W1"),
    ]


def _dualpipe_v(p: int, r: int, m: int, v: int) -> Phases:
    # of the last r + 1 pairs of backwards are whole; the others leave their weight gradients to the end
    half = (r + 1) // 2
    return [
        (2 * (p - r - 1), "F0"),
        (r + 1, "F0 F1"),
        (p - r - 1, "I1 W F1"),
        (1, "F0 B1 (F1 B0)" if r == p - 1 else "(F0 B1) (F1 B0)"),
        (m - 2 * p + r, "(F0 B1) (F1 B0)"),
        (p - r - 1, "B1 (F1 B0)"),
        (half, "B1 B0"),
        (1, "I1 I0" if r % 2 else "B1 I0"),
        (r - half, "I1 I0"),
        (p - r - 1, "W I0"),
    ]


def _interleaved(p: int, r: int, m: int, v: int) -> Phases:
    """Return the phases of interleaved 1F1B: micro-batches go through the chunks in groups of as many as ranks.

    A group's forwards go through chunk after chunk, its backwards through the chunks in reverse. All groups have this
    size: with a smaller last group, ranks would wait for each other forever. A rank is two passes ahead of the next,
    and the last rank has (v - 1) p passes before the first backward.
    """
    forwards = [f"F{chunk}" for chunk in _chunks(p, m, range(v))]
    backwards = [f"B{chunk}" for chunk in _chunks(p, m, range(v - 1, -1, -1))]
    ahead = min(2 * (p - 1 - r) + (v - 1) * p, len(forwards))
    yield from ((1, word) for word in forwards[:ahead])
    yield from ((1, f"{f} {b}") for f, b in zip(forwards[ahead:], backwards, strict=False))
    yield from ((1, word) for word in backwards[len(forwards) - ahead :])


def _chunks(p: int, m: int, chunks: range) -> Iterator[int]:
    for _ in range(m // p):
        for chunk in chunks:
            yield from [chunk] * p


def _onnxruntime(stages: int, batches: int) -> Table:
    """Return ONNX Runtime's 2S + 2(B - 1) rows: micro-batch after micro-batch, each pass in the first free slot.

    At no time are more than S micro-batches between their first forward and their last backward.
    """
    times = 2 * stages + 2 * (batches - 1)
    table = [[EMPTY] * stages for _ in range(times)]
    live = [0] * times
    previous = [-1] * stages

    def first(stage: int, after: int) -> int:
        return next(t for t in range(after + 1, times) if table[t][stage] is EMPTY and live[t] < stages)

    for batch in range(batches):
        forward: list[int] = []
        for stage in range(stages):
            forward.append(first(stage, max(previous[stage], forward[-1] if forward else -1)))
            table[forward[-1]][stage] = Slot((Task("FW", stage, batch),))
        time = -1
        for stage in reversed(range(stages)):
            time = first(stage, max(forward[stage], time))
            table[time][stage] = Slot((Task("BW", stage, batch),))
        for t in range(forward[0], time + 1):
            live[t] += 1
        previous = forward
    return tuple(map(tuple, table))


def _at_least_2p(p: int, m: int) -> int:
    return max(m, 2 * p)


POLICIES: Mapping[str, Policy] = {
    "gpipe": Policy("all forwards, then all backwards (GPipe, Huang et al. 2019)", _gpipe, constant=False,
                    aliases=("f-then-b", "fthenb")),
    "1f1b": Policy("one forward, one backward (PipeDream-Flush, Narayanan et al. 2021)", _1f1b),
    "eager-1f1b": Policy("1F1B with forwards ahead, so that messages have time to travel (Zhuang et al. 2023)",
                         _eager_1f1b, aliases=("eager1f1b",)),
    "interleaved-1f1b": Policy(
        "1F1B over several stages a rank (Megatron-LM, Narayanan et al. 2021)", _interleaved, chunks=None, default=2,
        made_for=lambda p, m: -(-m // p) * p,
        aliases=("interleaved", "interleaved1f1b"),
    ),
    "looped-bfs": Policy("all forwards of a stage, then of the rank's next (breadth first, Lamy-Poirier 2023)",
                         _looped_bfs, chunks=None, default=2, constant=False,
                         aliases=("loopedbfs", "looped-breadth-first")),
    "zb-h1": Policy("1F1B with weight gradients in its bubbles, and its memory (Zero Bubble, Qi et al. 2024)", _zb_h1,
                    split=True, made_for=_at_least_2p, aliases=("zbh1",)),
    "zb-h2": Policy("almost no bubble, at twice the memory (Zero Bubble, Qi et al. 2024)", _zb_h2, split=True,
                    made_for=_at_least_2p, aliases=("zbh2",)),
    "zb-v": Policy("almost no bubble, two stages a rank in a V, and 1F1B's memory on all (Qi et al. 2024)", _zb_v,
                   chunks=(2,), default=2, placement=vee, split=True, made_for=lambda p, m: max(m, 2 * p - 1),
                   aliases=("zbv", "zbvzerobubble")),
    "v-half": Policy("half the memory of 1F1B and half its bubble, two stages a rank in a V (Qi et al. 2024)",
                     table=repeated((1, 2, 1, 2), lambda p: (p + 2) // 2), chunks=(2,), default=2, placement=vee,
                     split=True, aliases=("vhalf",)),
    "v-min": Policy("a third of the memory of 1F1B and two thirds of its bubble, two stages a rank in a V (Qi et al. "
                    "2024)",
                    table=repeated((1, 1, 1, 1), lambda p: (p + 4) // 3), chunks=(2,), default=2, placement=vee,
                    split=True, aliases=("vmin",)),
    "dualpipe-v": Policy("two directions in a V, a forward and a backward at once (DualPipe, DeepSeek-AI 2024)",
                         _dualpipe_v, chunks=(2,), default=2, placement=vee, split=True, made_for=_at_least_2p,
                         aliases=("dualpipev",)),
    "onnxruntime": Policy("greedy first fit (ONNX Runtime, pull request 4524)", table=_onnxruntime, latest=True,
                          aliases=("onnx", "ort")),
}  # fmt: skip
