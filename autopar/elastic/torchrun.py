"""Read what torchrun says about a start of the job, and refuse a setting under which a job that grows would hang."""

from __future__ import annotations

import os
from collections.abc import Mapping

VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def check_stores(environment: Mapping[str, str] = os.environ) -> None:
    """Refuse the shared store of torchrun's agents on several hosts.

    An agent learns its address once. When a host that comes first in the order of addresses joins later, it opens a new
    store, and the agents that were there send their ranks to the old one: all ranks wait. Seen with torch 2.13.

    Raises:
        ValueError: names the variable that switches it off.
    """
    shared = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if shared and int(environment.get("GROUP_WORLD_SIZE") or 1) > 1:
        raise ValueError(
            f"torchrun shares a store whose address it does not renew, so the job would hang when a host comes back\n"
            f"  set {VARIABLE}=1 in the environment of torchrun, on all hosts"
        )


def restarts_left(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return how often torchrun will start the ranks again after a loss; ``None`` if it has not started them."""
    allowed, used = (environment.get(f"TORCHELASTIC_{name}") for name in ("MAX_RESTARTS", "RESTART_COUNT"))
    return None if allowed is None or used is None else int(allowed) - int(used)
