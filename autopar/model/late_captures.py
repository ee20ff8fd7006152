"""Say that a capture has stopped a running loop for seconds, and what to do: one line of the first rank.

It goes to the logger ``autopar``, so it is in a log file, too; without handlers Python prints it to stderr.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from autopar.capture.arguments import Signature
from autopar.capture.guards import GuardedCall
from autopar.model.captures import Captures, about_recapture, without_sizes

if TYPE_CHECKING:
    from autopar.model.compiled import RankContext
    from autopar.model.sizes import SizedCaptures

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
