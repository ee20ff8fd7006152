"""Identify tensors by their memory and their versions, and find generators."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from autopar.torch_private.tracing import DisableTorchFunctionSubclass


def storage_of(tensor: torch.Tensor) -> int:
    """Return a number that tensors share exactly if they share memory, on meta too. Tried on 2.11 to 2.15."""
    return tensor.untyped_storage()._cdata


class StorageReference:
    """A reference to a storage that does not keep it alive.

    While it exists, no other storage has the address. Tried on 2.11 to 2.15.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._address = storage._weak_ref()

    def __del__(self) -> None:
        torch.UntypedStorage._free_weak_ref(self._address)

    def expired(self) -> bool:
        return bool(torch.UntypedStorage._expired(self._address))

    def refers_to(self, storage: torch.UntypedStorage) -> bool:
        return self._address == storage._cdata

    def storage(self) -> torch.UntypedStorage | None:
        """Return the storage; ``None`` if it has expired."""
        return torch.UntypedStorage._new_with_weak_ptr(self._address)


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator of ops on a device. Tried on 2.11 to 2.15; public, except the place of CUDA's generators."""
    if device.type == "cpu":
        return torch.default_generator
    return getattr(torch, device.type).default_generators[device.index or 0]


def tensor_dict() -> Any:
    """Return a dict whose keys are tensors, by identity, which it does not keep alive. Tried on 2.11 to 2.15."""
    from torch.utils.weak import WeakTensorKeyDictionary

    return WeakTensorKeyDictionary()


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor's memory was written to; 0 for an inference tensor. Tried on 2.11 to 2.15."""
    return 0 if tensor.is_inference() else tensor._version


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return how often the memory of each tensor was written to; 0 for an inference tensor. Tried on 2.11 to 2.15."""
    with DisableTorchFunctionSubclass():
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]
