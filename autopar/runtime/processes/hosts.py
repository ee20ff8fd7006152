"""Learn on which host each rank of a job runs: from torchrun's environment, or else from the name of the host."""

from __future__ import annotations

import os
import socket

from autopar.ir.hosts import Hosts
from autopar.runtime.processes.agreement import Agreement

NODE_VARIABLES = ("GROUP_RANK", "SLURM_NODEID")  # the number of a node, as torchrun and Slurm say it to each process


def own_identity() -> tuple[str, str]:
    """Return the launcher's number of this process's node, empty if it gives none, and the name of the host."""
    number = next((os.environ[name] for name in NODE_VARIABLES if os.environ.get(name)), "")
    return number, socket.gethostname()


def hosts_of(agreement: Agreement) -> Hosts:
    """Return the hosts of all ranks. All ranks call it."""
    return Hosts.of(agreement.gathered(own_identity()))
