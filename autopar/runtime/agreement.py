"""Agreement: all ranks make the same calls, in the same order, with tensors of the same shapes.

Ranks that do not would meet in collectives that do not belong together, and some of these give wrong sums without an
error. So with each call a digest of all that was called so far goes round, while the step computes; it is compared before
the step's first collective.
"""

from __future__ import annotations

import hashlib

import torch
from torch import distributed

from autopar.runtime import where


class Agreement:
    """What this rank has done so far, compared with the others.

    Args:
        control: a gloo group of all ranks.
    """

    def __init__(self, control: distributed.ProcessGroup) -> None:
        self._control = control
        self._history = hashlib.blake2b(digest_size=7)  # a number and its negative are int64
        self._pending: tuple[distributed.Work, torch.Tensor, str] | None = None

    def add(self, event: str) -> None:
        """This rank does something that all do; compared with the next call."""
        self._history.update(event.encode())

    def begin(self, call: str) -> None:
        """This rank makes a call. ``finish`` compares."""
        self.add(call)
        number = int.from_bytes(self._history.digest(), "little")
        both = torch.tensor([number, -number])
        work = distributed.all_reduce(both, distributed.ReduceOp.MAX, self._control, async_op=True)
        assert work is not None
        self._pending = (work, both, call)

    def finish(self) -> None:
        """Wait for the others' calls, unless that was done.

        Raises:
            RuntimeError: a rank makes another call; each call is told.
        """
        if self._pending is None:
            return
        (work, both, call), self._pending = self._pending, None
        work.wait()
        largest, negated = both.tolist()
        if largest == -negated:  # which is the smallest
            return
        calls: list[str] = [""] * self._control.size()
        distributed.all_gather_object(calls, call, self._control)
        ranks: dict[str, list[int]] = {}
        for rank, one in enumerate(calls):
            ranks.setdefault(one, []).append(rank)
        told = "".join(f"\n    {_ranks(some)}: {one}" for one, some in ranks.items())
        if len(ranks) == 1:
            raise RuntimeError(f"the ranks have not made the same calls before this one{told}\n  let all ranks call forward and backward alike, also in the last step")
        raise RuntimeError(
            f"the ranks make different calls{told}\n  let all ranks call with tensors of the same shapes: with inputs=\"global\" the same batch, "
            f"with inputs=\"local\" batches of the same size (drop_last=True)"
        )


where.register(Agreement.finish.__code__, {Agreement.finish.__code__.co_firstlineno: "the comparison of the ranks' calls"})


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {' '.join(map(str, ranks))}"
