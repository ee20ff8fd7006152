"""Read how much memory this process may still take: of the host, or of an accelerator."""

from __future__ import annotations

import os
from pathlib import Path

import torch

# of a container: the file of the limit, and the one of what is in use
LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def free_memory(device: torch.device) -> int:
    """Return the bytes of a device's memory that are free; those of the host, within the limit of a container."""
    if device.type != "cpu":
        return torch.accelerator.get_memory_info(device)[0]
    return min([_of_host(), *(found for limit, used in LIMITS if (found := _of_container(limit, used)) is not None)])


def _of_host() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def _of_container(limit: str, used: str) -> int | None:
    """Return what is left of a limit; ``None`` without one. Files that are read often are no use of memory."""
    try:
        most, now = Path(limit).read_text().strip(), Path(used).read_text().strip()
        stat = dict(line.split() for line in Path(limit).with_name("memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if not most.isdecimal() or not now.isdecimal():
        return None
    return int(most) - int(now) + int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
