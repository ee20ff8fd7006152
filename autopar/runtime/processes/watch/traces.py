"""Print an error of a job once and briefly: one rank's traceback, with the user's frames and without those inside."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import Any

from autopar.capture.provenance import is_users
from autopar.errors import AutoparError, EditError, SimulationError, VerifyError, add_note
from autopar.runtime.current_op import where_raised
from autopar.runtime.processes.watch.beat import broke_off
from autopar.runtime.processes.watch.ending import say
from autopar.runtime.processes.watch.wording import at, in_words

DEFECTS = (EditError, SimulationError, VerifyError)  # of autopar, whose frames are wanted
OURS = f"{os.sep}autopar{os.sep}"


def short_traceback(error: BaseException) -> str:
    """Return the traceback of an error as a job prints it.

    The message of a refusal says all, so it has the user's frames alone, and no causes. Of another error, the frames
    of autopar and torch between the user's are left out. A defect of autopar is printed whole.
    """
    made = traceback.TracebackException.from_exception(error)
    if is_refusal(error):
        made.__cause__ = made.__context__ = None
        _keep(made, lambda frame, is_last: is_users(frame.filename))
    elif not isinstance(error, DEFECTS) and not _is_inside(error):
        _keep(made, lambda frame, is_last: is_last or is_users(frame.filename))
    return "".join(made.format())


def is_refusal(error: BaseException) -> bool:
    """Return whether autopar has raised it, to say what is wrong and the remedy."""
    if isinstance(error, AutoparError):
        return not isinstance(error, DEFECTS)
    return isinstance(error, (ValueError, TypeError, RuntimeError)) and type(error) in PLAIN and _is_inside(error)


PLAIN = (ValueError, TypeError, RuntimeError, NotImplementedError)


def _is_inside(error: BaseException) -> bool:
    """Return whether the innermost frame is of autopar."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and OURS in frames[-1].filename and not is_users(frames[-1].filename)


def _keep(made: traceback.TracebackException, wanted: Callable[[traceback.FrameSummary, bool], bool]) -> None:
    frames = [frame for k, frame in enumerate(made.stack) if wanted(frame, k == len(made.stack) - 1)]
    made.stack = traceback.StackSummary.from_list(frames or made.stack[-1:])


@contextlib.contextmanager
def refused_once() -> Iterator[None]:
    """Let the ranks of torchrun print a refusal of this block once, if it ends them: they have no store yet."""
    try:
        yield
    except Exception as error:
        if "RANK" in os.environ and sys.excepthook is sys.__excepthook__ and is_refusal(error):
            sys.excepthook = partial(_print, error)
        raise


def _print(refused: Exception, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
    if error is not refused:
        return sys.__excepthook__(kind, error, trace)
    if (rank := os.environ["RANK"]) == "0":
        return say(short_traceback(error))
    return say(f"rank {rank} refuses: {one_line(error)}\n")


def one_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its message, without its notes."""
    return f"{type(error).__name__}: {error}".strip().partition("\n")[0]


# -- an exception that a caller catches --------------------------------------------------------------------------------


def with_place(error: Exception, rank: int) -> Exception:
    """Return the exception that a caller can catch: it names the rank, the slot and the op.

    An exception of this rank is returned with a note. One of a broken connection names the rank at
    the other end, and has the exception of the backend as its cause.
    """
    place = where_raised(error)
    if not broke_off(error):
        add_note(error, f"rank {rank} failed {at(place)}")
        return error
    lost = f"the connection to {in_words(place.peers)}" if place.peers else "a connection"
    found = RuntimeError(
        f"rank {rank} lost {lost} {at(place)}: another rank has failed or ended, and the message of the job names it"
    )
    found.__dict__.update(error.__dict__)  # with the slot
    return found.with_traceback(error.__traceback__)
