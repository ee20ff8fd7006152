"""Notice writes to parameters between calls, and compare the ranks that hold the same pieces of what was written.

Torch counts the writes to a tensor. The counts go to the other ranks with each call, so nothing more is exchanged
unless there was a write. An optimizer's step is no such write: with equal gradients it writes the same on all ranks.
But a rank that steps alone has another count.
"""

from __future__ import annotations

import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autopar.torch_private import versions_of


class Replicas:
    """The parameters of a model on this rank.

    Args:
        parameters: name → DTensor. Who replaces a parameter replaces it here.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._parameters = parameters
        self._known = versions_of(parameters.values())
        self._counted, self._written = 0, list[str]()
        self._given = Counter[int]()  # id of a tensor → how often it was given other memory, which torch does not count
        if not _live:
            register_optimizer_step_pre_hook(lambda *_: _each(Replicas._look))
            register_optimizer_step_post_hook(lambda *_: _each(Replicas._pass_over))
        _live.add(self)

    def mark(self) -> float:
        """Return a number for the other ranks: 0 without a write since the last call, odd with one beside optimizers.

        It is the same on ranks that have written as often.
        """
        self._look()
        counted, self._counted = self._counted, 0
        return 2.0 * counted + bool(self._written)

    def compare(self, gathered: Callable[[Any], list[Any]], marks: Sequence[float]) -> str | None:
        """Compare what was written. All ranks call it. Returns what to say where ranks hold other values of a piece.

        Then the next call compares again.

        Args:
            gathered: returns what all ranks pass to it.
            marks: those of all ranks.
        """
        written, self._written = self._written, []
        alike = len(set(marks)) == 1
        if alike and not marks[0] % 2:
            return None
        names = dict.fromkeys(name for names in gathered(written) for name in names)
        names = names if alike else dict.fromkeys(self._parameters)
        every = gathered({name: _piece(self._parameters[name]) for name in names})
        for name in names:
            first: dict[Any, tuple[int, int]] = {}
            for rank, (place, digest) in enumerate(pieces[name] for pieces in every):
                other, known = first.setdefault(place, (rank, digest))
                if place is not None and digest != known:
                    self._known = []
                    return _differing(name, other, rank, marks)
        return None

    def _look(self) -> None:
        """Note the writes since the last look, as those of the user."""
        if given := self._were_given():
            self._written = list(dict.fromkeys([*self._written, *given]))
            self._counted += len(given)
        now = versions_of(self._parameters.values())
        if now != self._known:
            known = self._known if len(self._known) == len(now) else [-1] * len(now)
            changed = [name for name, old, new in zip(self._parameters, known, now, strict=True) if old != new]
            self._written = list(dict.fromkeys([*self._written, *changed]))
            self._counted += sum(now) - sum(known)
            self._known = now

    def _pass_over(self) -> None:
        """Count the writes since the last look, as those of an optimizer."""
        now = versions_of(self._parameters.values())
        self._counted += sum(now) - sum(self._known) + len(self._were_given())
        self._known = now

    def _were_given(self) -> list[str]:
        """Return the parameters that were given other memory since the last look: a name for each time."""
        if not self._given:
            return []
        given, self._given = self._given, Counter()
        return [name for name, parameter in self._parameters.items() for _ in range(given[id(parameter)])]


def note_memory_given(tensor: torch.Tensor) -> None:
    """Note that ``.data`` of a tensor was assigned."""
    for replicas in _live:
        replicas._given[id(tensor)] += 1


_live: weakref.WeakSet[Replicas] = weakref.WeakSet()


def _each(function: Any) -> None:
    for replicas in _live:
        function(replicas)


def _piece(tensor: Any) -> tuple[Any, int]:
    """Return which piece of a DTensor this rank has, ``None`` for none, and a digest of its bits."""
    at = tensor.device_mesh.get_coordinate()
    if at is None:
        return None, 0
    with torch.no_grad():
        bits = tensor.to_local().detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    place = tuple(k for k, placement in zip(at, tensor.placements, strict=True) if not placement.is_replicate())
    return place, zlib.crc32(bits.tobytes())


def _differing(name: str, a: int, b: int, marks: Sequence[float]) -> str:
    writers = [str(rank) for rank, mark in enumerate(marks) if mark]
    alone = f", on rank{'s' * (len(writers) > 1)} {' '.join(writers)} alone" * (len(writers) < len(marks))
    return (
        f"ranks {a} and {b} hold different values of {name}, which must be equal on these ranks: it was written since "
        f"the last call{alone}\n  write the same on all ranks: functions of torch.nn.init draw one device's numbers if "
        f"all ranks call them, parallel.load_state_dict and parallel.initialize() set the same values, and so does "
        f"what is written to the model before parallelize"
    )
