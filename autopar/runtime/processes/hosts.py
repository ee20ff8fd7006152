"""Learn on which host each rank of a job runs: from torchrun's environment, or else from the name of the host.

An emulated wire with several hosts emulates these, too.
"""

from __future__ import annotations

import os
import socket

from torch import distributed

from autopar.ir.hosts import Hosts
from autopar.runtime.processes.agreement import Agreement
from autopar.runtime.wire.wire_groups import EMULATED

NODE_VARIABLES = ("GROUP_RANK", "SLURM_NODEID")  # the number of a node, as torchrun and Slurm say it to each process


def own_identity() -> tuple[str, str]:
    """Return the launcher's number of this process's node, empty if it gives none, and the name of the host."""
    number = next((os.environ[name] for name in NODE_VARIABLES if os.environ.get(name)), "")
    return number, socket.gethostname()


def hosts_of(agreement: Agreement) -> Hosts:
    """Return the hosts of all ranks. All ranks call it."""
    emulated = EMULATED[0].settings.get("ranks_per_host") if EMULATED else None
    if emulated is not None:
        return Hosts.of((str(rank // emulated), "emulated") for rank in range(distributed.get_world_size()))
    return Hosts.of(agreement.gathered(own_identity()))
