"""The watch: all ranks of a job end, with one message, when one fails, is lost, or is waited for too long.

``watch`` is the thread; ``beat`` what a rank tells the others; ``verdict`` what follows from all beats; ``holder``
whose the store is; ``ending`` how a process leaves.
"""

from autopar.runtime.processes.watch.watch import Watch

__all__ = ["Watch"]
