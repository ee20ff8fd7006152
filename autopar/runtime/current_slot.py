"""Say which slot of a pipeline's schedule this process is in, and which ranks it waits for.

The loop of a rank enters and leaves some thousand slots a step, so both are plain assignments. Another thread reads
them (``current_op.where``):

    with slot("BW03 of stage 1 (micro-batch 3)"):
        with waiting_for((2,), "BR03 from stage 2"):
            wait(handle)
        run(tensors)                                # ops are found by their lines, as in any step

``with slot(…)`` without an error costs about 0.2 µs. The objects hold no state: a loop may make them once and enter
them in each step. Slots do not nest.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import NamedTuple

_SLOT, _WAIT = "_autopar_slot", "_autopar_wait"  # attributes of an error that passed through a slot or a wait


class Wait(NamedTuple):
    """A wait for other ranks.

    Attributes:
        peers: the ranks that it waits for.
        collective: what all of them and this rank enter together, by a name that is the same on these ranks; empty for
            a message.
    """

    peers: tuple[int, ...]
    collective: str = ""


class slot:
    """A block in which this process runs one slot of a schedule.

    Args:
        text: what messages call the slot; an object is turned into a string only for a message.
    """

    __slots__ = ("text",)

    def __init__(self, text: object) -> None:
        self.text = text

    def __enter__(self) -> None:
        global _slot, _entered
        _slot = self.text
        _entered += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _slot
        _slot = ""  # and not the one before: the loops of simulated ranks take turns, so theirs overlap
        if error is not None:
            _note(error, _SLOT, str(self.text))


class waiting_for:
    """A block in which this process waits for other ranks.

    Args:
        peers: the ranks.
        text: what it waits for.
        is_collective: whether the peers and this rank all enter this block together; then ``text`` is the same on all.
    """

    __slots__ = ("text", "wait")

    def __init__(self, peers: Iterable[int], text: str, *, is_collective: bool = False) -> None:
        self.text, self.wait = text, Wait(tuple(peers), text if is_collective else "")

    def __enter__(self) -> None:
        global _waiting, _entered
        _waiting = self
        _entered += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _waiting
        _waiting = None
        if error is not None:
            _note(error, _WAIT, self)


_slot: object = ""
_waiting: waiting_for | None = None
_entered = 0


def entered() -> int:
    """Return how many slots and waits this process has entered."""
    return _entered


def current_slot(error: BaseException | None = None) -> str:
    """Return the text of the slot that this process is in, or that raised ``error``; empty outside of slots."""
    return str(_slot) if error is None else error.__dict__.get(_SLOT, str(_slot))


def current_wait(error: BaseException | None = None) -> waiting_for | None:
    """Return the wait that this process is in, or that raised ``error``."""
    return _waiting if error is None else error.__dict__.get(_WAIT)


def _note(error: BaseException, name: str, value: object) -> None:
    """Write on an error where it was raised: the blocks are left before anybody looks at it. The innermost counts."""
    error.__dict__.setdefault(name, value)  # ``setattr`` fails on errors that are frozen
