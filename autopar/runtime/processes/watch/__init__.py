"""Watch the ranks of a job: end all of them, with one message, if one fails, is lost, or makes no progress.

``watch`` has the thread, ``beat`` the message that each rank posts and what it says of the rank, ``followed_ranks``
what all of them say, ``verdict`` the judgement over all beats, ``waits`` who waits for whom, ``wording`` the words of a
verdict, ``job_end`` who prints the verdict, with the store and without it, ``traces`` the short traceback and what an
exception says that the caller catches, and ``ending`` the way a process leaves. ``launcher`` knows which process owns
the store, and watches the launcher of this host; ``other_hosts`` knows whether other hosts are there. ``alarm`` wakes
the watch.
"""

from autopar.runtime.processes.watch.watch import Watch

__all__ = ["Watch"]
