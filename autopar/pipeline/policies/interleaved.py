"""Make interleaved 1F1B: micro-batches go through the chunks in groups of as many as there are ranks.

After Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", 2021. A
group's forwards go through chunk after chunk, its backwards through the chunks in reverse. All groups have this size:
with a smaller last group, ranks would wait for each other forever.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.pipeline.policies.phases import Phases


def interleaved(p: int, r: int, m: int, v: int) -> Phases:
    """Return the phases of interleaved 1F1B: a rank is two passes ahead of the next.

    The last rank has (v - 1) p passes before the first backward.
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
