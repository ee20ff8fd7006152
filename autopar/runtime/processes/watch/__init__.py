"""Watch the ranks of a job: end all of them, with one message, if one fails, is lost, or makes no progress.

``watch`` has the thread, ``beat`` the message that each rank posts, ``followed_rank`` and ``followed_ranks`` what these
say, ``verdict`` the judgement over all beats, ``waits`` who waits for whom, ``wording`` and ``host_names`` the words of
a verdict, ``holder`` the process that owns the store, ``job_end`` who prints the verdict, ``lost_store`` the message
without the store, ``traces`` the short traceback, and ``ending`` the way a process leaves. Of several hosts,
``keepalive`` and ``other_hosts`` know whether they are there, and ``launcher`` watches the launcher of this one.
``alarm`` wakes the watch, and ``caught`` puts the verdict into an exception that the caller catches.
"""

from autopar.runtime.processes.watch.watch import Watch

__all__ = ["Watch"]
