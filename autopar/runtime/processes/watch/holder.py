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
    """The owner of a job's store: a launcher (ours, or torchrun), rank 0, or a file."""

    def __init__(self, store: dist.Store) -> None:
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        launched = is_launched() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self.is_rank_0 = not launched and not isinstance(store, dist.FileStore)
        self._launcher = process_of(os.getppid()) if launched else None

    def process(self, rank_0: Beat | None) -> Process | None:
        """Return the process, if it is known. ``rank_0``: the newest beat of rank 0."""
        if self.is_rank_0:
            return None if rank_0 is None else rank_0.process
        return self._launcher
