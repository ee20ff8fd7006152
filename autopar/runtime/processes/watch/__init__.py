"""Watch the ranks of a job: end all of them, with one message, if one fails, is lost, or makes no progress.

``watch`` has the thread, ``beat`` the message that each rank posts, ``followed_rank`` what its beats tell, ``verdict``
the judgement over all beats, ``waits`` who waits for whom, ``wording`` the words of a verdict, ``holder`` the process
that owns the store, and ``ending`` the way a process leaves.
"""

from autopar.runtime.processes.watch.watch import Watch

__all__ = ["Watch"]
