"""Send bundles that belong to no slot of a schedule, all at the same time: copies, sums that go home, and outputs."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch

from autopar.runtime.lowering.bundles import Bundle
from autopar.runtime.lowering.tags import tag_of
from autopar.runtime.running.messages import Message, Messages

Move = tuple[
    Bundle, list[torch.Tensor]
]  # a rank's part of a bundle, and its pieces of the values; empty if it has none


def exchange(
    rank: int, moves: Sequence[Move], messages: Messages, first: int, words: str
) -> Generator[Any, Any, list[list[torch.Tensor]]]:
    """Send and receive bundles. All ranks call it with the same bundles, in the same order.

    Args:
        first: the number of the first bundle, in the place of a boundary; those of stages are below it.
        words: what is sent, in errors.

    Returns:
        For each bundle the new pieces; nothing if the rank gets none.
    """
    starting = []
    for k, (bundle, pieces) in enumerate(moves):
        tag = tag_of(first + k, "forward", 0)
        packed = bundle.pack(pieces) if pieces else {}
        starting += [Message(("send", k), True, other, memory, tag, words) for other, memory in packed.items()]
        starting += [
            Message(("receive", k), False, other, messages.buffer(bytes), tag, words)
            for other, bytes in bundle.receives.items()
        ]
    if starting:
        messages.start(starting)
    tasks = {message.task for message in starting}
    results = []
    for k, (bundle, pieces) in enumerate(moves):
        received = (yield from messages.wait(("receive", k))) if ("receive", k) in tasks else {}
        gets = bool(bundle.values) and rank in bundle.values[0].ends.target.mesh
        results.append(bundle.unpack(received, messages.device, pieces) if gets else [])
    for k in range(len(moves)):
        if ("send", k) in tasks:
            yield from messages.wait(("send", k))
    return results


def share_buffers(
    rank: int, held: Mapping[str, torch.Tensor], written: Sequence[Bundle], messages: Messages, first: int
) -> Generator[Any, Any, None]:
    """Write the buffers that a stage has written on the ranks of all other stages, which keep them too.

    Args:
        held: this rank's pieces, by the user's names.
        written: the buffers, as they go to each other stage.
        first: as of ``exchange``.
    """
    moves: list[Move] = []
    for bundle in written:
        (value,) = bundle.values
        moves.append((bundle, [held[value.name]] if rank in value.ends.source.mesh else []))
    received = yield from exchange(rank, moves, messages, first, "the buffers of all stages")
    for bundle, pieces in zip(written, received, strict=True):
        if pieces and bundle.values[0].name in held:
            held[bundle.values[0].name].copy_(pieces[0])
