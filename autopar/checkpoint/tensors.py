"""One tensor of a state: whether a checkpoint can keep it, and what it is in words that all ranks share."""

from __future__ import annotations

import zlib

import torch

from autopar.checkpoint.manifest import DTYPES, described
from autopar.model.dtensor_parameters import is_dtensor

SMALL = 2**20  # bytes of a tensor of whole numbers that is compared between ranks


def check_tensor(name: str, tensor: torch.Tensor) -> None:
    """``TypeError`` and ``ValueError`` where a tensor is none that a checkpoint can keep."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and not is_dtensor(tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; a checkpoint keeps plain tensors and DTensors")
    check_dtype(name, tensor)
    if tensor.is_meta:
        raise ValueError(f"{name} is on the meta device and has no values; to_empty() and init it")


def check_dtype(name: str, tensor: torch.Tensor) -> None:
    """``TypeError`` where a checkpoint has no name for its dtype, or it is not dense."""
    if tensor.dtype not in DTYPES or tensor.layout is not torch.strided:
        kind = described(tensor.dtype, tuple(tensor.shape)) if tensor.layout is torch.strided else str(tensor.layout).removeprefix("torch.")
        raise TypeError(f"{name} is {kind}, which a checkpoint cannot keep; it keeps dense tensors of {', '.join(str(one).removeprefix('torch.') for one in DTYPES)}")


def in_words(tensor: torch.Tensor) -> str:
    """The same on all ranks that hold the same tensor: dtype, shape, and how it lies."""
    words = described(tensor.dtype, tuple(tensor.shape))
    return f"{words} {tuple(tensor.placements)} on {tuple(tensor.device_mesh.shape)}" if is_dtensor(tensor) else words  # type: ignore[attr-defined]


def values_in_words(tensor: torch.Tensor) -> str:
    """Of a whole tensor of whole numbers, such as the state of a generator: the ranks' may differ, and all but one would be lost."""
    if is_dtensor(tensor) or tensor.is_floating_point() or tensor.is_complex() or tensor.nbytes > SMALL:
        return ""
    return f" with the CRC-32 {zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()):08x}"
