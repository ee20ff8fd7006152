"""Which process holds the store of a job, and takes it along when it goes."""

from __future__ import annotations

import os

import torch.distributed as dist

from autopar.runtime.processes.watch.beat import Beat, Process, process_of

STORE_VARIABLE = "AUTOPAR_STORE"  # host:port of the store of ``launch``, which shows the message itself


def is_launched() -> bool:
    """Whether ``launch`` started this process: it marks the lines of all ranks but 0, and shows the message last."""
    return bool(os.environ.get(STORE_VARIABLE))


class Holder:
    """A launcher (ours, or torchrun), or rank 0, or a file."""

    def __init__(self, store: dist.Store) -> None:
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        launched = is_launched() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self.is_rank_0 = not launched and not isinstance(store, dist.FileStore)
        self._launcher = process_of(os.getppid()) if launched else None

    def process(self, rank_0: Beat | None) -> Process | None:
        """As far as it is known; ``rank_0`` is what it last told of itself."""
        if self.is_rank_0:
            return None if rank_0 is None else rank_0.process
        return self._launcher
