"""Keep the capture of each call, find it again, and say that a late one has stopped a running loop."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch

from autopar.capture import Captured
from autopar.capture.arguments import Signature, difference
from autopar.capture.guards import GuardedCall, GuardedChange, Guards, Variants
from autopar.model.inputs import CallKey
from autopar.model.sizes import outline
from autopar.search.solutions.solution import Solution

if TYPE_CHECKING:
    from autopar.model.compiled import RankContext
    from autopar.model.sizes import SizedCaptures


# -- late captures -----------------------------------------------------------------------------------------------------
#
# Say that a capture has stopped a running loop for seconds, and what to do: one line of the first rank.
#
# It goes to the logger ``autopar``, so it is in a log file, too; without handlers Python prints it to stderr.


LATE = 2.0  # seconds from which on a capture is said
clock = time.perf_counter  # tests replace it
LOGGER = logging.getLogger("autopar")
OF_SIZES = (
    "pad it to the usual size, leave it out with DataLoader(…, drop_last=True), or give parallelize(…, dynamic=True), "
    "whose first capture serves all sizes"
)
WITHOUT_SYMBOLS = "pad it to the usual size, or leave it out with DataLoader(…, drop_last=True)"
OF_OTHERS = "capture it before the loop with .capture(…), or keep the call as it was"


@contextlib.contextmanager
def said_if_late(
    context: RankContext | None, captures: Captures[Any], call: GuardedCall, symbols: SizedCaptures
) -> Iterator[None]:
    """Say, after this block, that it has captured a call for long, if others were captured before.

    Args:
        context: this process as a rank; the first one says it.
        captures: those that there are before the block.
        call: of a model or of a step.
        symbols: the captures with symbols of the model, and why there are none.
    """
    if call.known or not len(captures) or (context is not None and context.rank):
        yield
        return
    keys, start = captures.keys, clock()
    yield
    seconds = clock() - start
    if seconds <= LATE:
        return
    sizes = any(without_sizes(key) == without_sizes(call.key) for key in keys)
    notes = about_recapture(_of_call(call.key), list(map(_of_call, keys)), call.changes, True)
    what = notes[0] if notes else f"capture {len(keys) + 1} of this model"
    remedy = OF_OTHERS
    if sizes and not call.changes:
        remedy = OF_SIZES if symbols.would_serve(_of_call(call.key)[0]) else WITHOUT_SYMBOLS
    LOGGER.warning("autopar: the loop has waited %.1f s for %s; %s", seconds, what, remedy)


def _of_call(key: Any) -> Any:
    """Return the key of the call in the key of a step."""
    return key if isinstance(key[0], Signature) else key[0]


# -- captures ----------------------------------------------------------------------------------------------------------


class HasCapture(Protocol):
    """What was made of the capture of a call."""

    @property
    def captured(self) -> Captured: ...


T = TypeVar("T", bound=HasCapture)


class Captures(Generic[T]):
    """The captures of calls. A call is found by its key and by the values that its forward read.

    Attributes:
        variants: the captures of each key, which differ in the values that forward read.
    """

    def __init__(self) -> None:
        self.variants = Variants()
        self._captured: dict[Any, T] = {}
        self._plans: dict[Any, tuple[Any, Solution]] = {}  # key without sizes → the first key, and its plan

    def __len__(self) -> int:
        return len(self._captured)

    def __getitem__(self, call: GuardedCall) -> T:
        return self._captured[call.identity]

    @property
    def traces(self) -> set[tuple[int, int]]:
        """What was traced: the capture of each call, and once what serves calls of many sizes."""
        return {
            (id(self), position) if compiled.captured.symbolic is None else (0, id(compiled.captured.symbolic))
            for position, compiled in enumerate(self._captured.values())
        }

    @property
    def changes(self) -> list[GuardedChange]:
        """The changes of values that forward reads for which calls were captured."""
        return [change for call in self.variants.calls for change in call.changes]

    @property
    def keys(self) -> list[Any]:
        """The key of each capture, from the oldest to the newest."""
        return [key for key, _ in self._captured]

    def call(self, key: Hashable, modules: Sequence[torch.nn.Module]) -> GuardedCall:
        """Return the call of a key, with the values that forward would read now."""
        return self.variants.call(key, modules)

    def plan(self, key: Any) -> Solution | None:
        """Return the plan of the first call that differs from this one in sizes alone, if there is one."""
        first, plan = self._plans.get(without_sizes(key), (key, None))
        return None if first == key else plan

    def add(
        self, call: GuardedCall, guards: Guards, captured: T, plan: Solution | None = None
    ) -> list[tuple[GuardedCall, T]]:
        """Keep the capture of a call, and its plan if that was searched.

        Returns the older captures that are dropped for it.
        """
        if plan is not None:
            self._plans.setdefault(without_sizes(call.key), (call.key, replace(plan, again=None, priced=None)))
        self._captured[call.identity] = captured
        return [(dropped, self._captured.pop(dropped.identity)) for dropped in self.variants.add(call, guards)]

    def clear(self) -> None:
        """Drop all captures."""
        self.variants, self._captured, self._plans = Variants(), {}, {}


def without_sizes(key: Any) -> Any:
    """Return the key of a call or of a step without the sizes of its inputs."""
    if not isinstance(key[0], Signature):
        return without_sizes(key[0]), *key[1:]
    signature, (layouts, _) = key
    return outline(signature), layouts


def about_recapture(
    key: CallKey, keys: Sequence[CallKey], changes: Sequence[GuardedChange], allowed: bool
) -> list[str]:
    """Explain in a note for the report how a call differs from the last captured call with the same modes.

    There is no note for the first call.

    Args:
        keys: the keys of the captures so far.
        changes: the changes of values that forward reads, if the key is one of ``keys``.
        allowed: whether another call may be captured after the first one.

    Raises:
        RuntimeError: it is not allowed.
    """
    alike = [
        signature for signature, _ in keys if (signature.training, signature.modes) == (key[0].training, key[0].modes)
    ]
    if not alike or (key in keys and not changes):  # the second: in a step whose optimizer trains other parameters
        return []
    changed = ", ".join(map(str, changes)) or difference(alike[-1], key[0])
    if not allowed and changes:
        raise RuntimeError(
            f"forward was captured with other values, and recapture=False: {changed}; restore these values, or "
            f"allow recapture=True"
        )
    if not allowed:
        raise RuntimeError(
            f"the step was captured for other arguments, and recapture=False: {changed}; pad to one shape, or allow "
            f"recapture=True"
        )
    return [f"capture {len(keys) + 1} of this model: {changed}"]
