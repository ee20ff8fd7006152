"""Measure the peak memory of a call, from the events of torch's allocator, and the memory that tensors hold."""

from __future__ import annotations

import gc

import torch

from autopar.runtime.measuring.peak import peak_bytes

__all__ = ["live_bytes", "peak_bytes"]


def live_bytes() -> int:
    """Return the bytes of the storages on CPU of all tensors that Python holds, each once."""
    gc.collect()
    found = {}
    for tensor in gc.get_objects():
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu":
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())
