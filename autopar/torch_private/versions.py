"""Warn of a torch that autopar was not tried on."""

from __future__ import annotations

import warnings

import torch

TRIED = (2, 11), (2, 15)  # the first and the last


def warn_of(version: str) -> None:
    """Warn if a version of torch is none of those in ``TRIED``."""
    major, minor = version.split(".")[:2]
    first, last = TRIED
    release = int(major), int(minor)
    if first <= release <= last:
        return
    how = "newer" if release > last else "older"
    warnings.warn(
        f"torch {version} is {how} than those that autopar was tried on, {first[0]}.{first[1]} to "
        f"{last[0]}.{last[1]}: compare results with a single device, or install 'torch>={first[0]}.{first[1]},"
        f"<{last[0]}.{last[1] + 1}'",
        stacklevel=2,
    )


warn_of(torch.__version__)  # once in a process, when autopar first uses torch
