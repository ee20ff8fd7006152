"""Find the process that owns the store of a job: the store ends with it."""

from __future__ import annotations

import os

import torch.distributed as dist

from autopar.runtime.processes.watch.beat import Beat, Process, process_of

STORE_VARIABLE = "AUTOPAR_STORE"  # host:port of the store of ``launch``, which shows the message itself


def is_launched() -> bool:
    """Return whether ``launch`` started this process. Then ``launch`` shows the message, and prefixes lines."""
    return bool(os.environ.get(STORE_VARIABLE))


class Holder:
    """The owner of a job's store: a launcher (ours, or torchrun), rank 0, or a file.

    Attributes:
        is_rank_0: whether it is rank 0.
        is_elsewhere: whether it is on another host: a launcher of several hosts holds the store on the host of rank 0.
        launcher: the launcher of this process; ``None`` if there is none.
    """

    def __init__(self, store: dist.Store, rank: int) -> None:
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        launched = is_launched() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        is_file = isinstance(store, dist.FileStore)
        self.is_rank_0 = not launched and not is_file
        self.launcher = process_of(os.getppid()) if launched or "TORCHELASTIC_RUN_ID" in os.environ else None
        node = os.environ.get("GROUP_RANK", "0")
        self.is_elsewhere = node != "0" if launched and not is_launched() else self.is_rank_0 and rank != 0

    def process(self, rank_0: Beat | None) -> Process | None:
        """Return the process, if it is known and on this host. ``rank_0``: the newest beat of rank 0."""
        if self.is_rank_0:
            return None if rank_0 is None else rank_0.process
        return None if self.is_elsewhere else self.launcher
