"""Check that the communication of all ranks fits together and finishes without a deadlock.

Each rank has a sequence of tasks. ``check`` compares all of them:

* the members of a group run the same collectives in the same order, with the same payload (``payloads``);
* between two ranks the i-th message sent is the i-th received: tags do not count, and none overtakes another;
* all ranks finish on channels that buffer all, some or no messages. An error names the cycle of ranks that wait.

Each stream of the same ranks is a group of its own: what is on two streams has no common order.

Programs that finish without any buffer are what the MPI standard calls *safe* (MPI 4.0, section 3.5).
"""

from autopar.verify.channels.check import check
from autopar.verify.channels.tasks import (
    ALL,
    ASYNCHRONOUS,
    BLOCKING,
    GROUPED,
    Channels,
    Collective,
    Group,
    Receive,
    Send,
    Task,
    buffered,
)

__all__ = [
    "ALL", "ASYNCHRONOUS", "BLOCKING", "GROUPED", "Channels", "Collective", "Group", "Receive", "Send", "Task",
    "buffered", "check",
]  # fmt: skip
