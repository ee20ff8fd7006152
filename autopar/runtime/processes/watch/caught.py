"""Say in an exception of a step what the verdict says of this rank, for callers that catch the exception."""

from __future__ import annotations

from autopar.errors import add_note
from autopar.runtime.current_op import where_raised
from autopar.runtime.processes.watch.beat import broke_off
from autopar.runtime.processes.watch.wording import at, in_words


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
