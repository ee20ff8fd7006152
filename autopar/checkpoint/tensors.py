"""Check whether a checkpoint can keep a tensor, and describe a tensor in the same words on all ranks."""

from __future__ import annotations

import zlib

import torch

from autopar.checkpoint.manifest import DTYPES, described
from autopar.errors import class_of
from autopar.runtime.dtensors import is_dtensor

SMALL = 2**20  # bytes; the values of smaller integer tensors are compared between ranks


def check_tensor(name: str, tensor: torch.Tensor) -> None:
    """Raise ``TypeError`` or ``ValueError`` if a checkpoint cannot keep a tensor."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and not is_dtensor(tensor):
        raise TypeError(f"{name} is {class_of(tensor)}; a checkpoint keeps plain tensors and DTensors")
    check_dtype(name, tensor)
    if tensor.is_meta:
        raise ValueError(f"{name} is on the meta device and has no values; to_empty() and init it")


def check_dtype(name: str, tensor: torch.Tensor) -> None:
    """Raise ``TypeError`` if a checkpoint has no name for a tensor's dtype, or the tensor is not dense."""
    if tensor.dtype not in DTYPES or tensor.layout is not torch.strided:
        kind = (
            described(tensor.dtype, tuple(tensor.shape))
            if tensor.layout is torch.strided
            else str(tensor.layout).removeprefix("torch.")
        )
        raise TypeError(
            f"{name} is {kind}, which a checkpoint cannot keep; it keeps dense tensors of "
            f"{', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES)}"
        )


def describe_tensor(tensor: torch.Tensor) -> str:
    """Describe dtype, shape and placements, the same on all ranks that hold the same tensor."""
    words = described(tensor.dtype, tuple(tensor.shape))
    if not is_dtensor(tensor):
        return words
    mesh = tensor.device_mesh.mesh.flatten().tolist()
    ranks = "" if mesh == list(range(len(mesh))) else f" of ranks {' '.join(map(str, mesh))}"
    return f"{words} {tuple(tensor.placements)} on {tuple(tensor.device_mesh.shape)}{ranks}"


def describe_values(tensor: torch.Tensor) -> str:
    """Describe the values of a replicated integer tensor, such as the state of a generator.

    It may differ between ranks, and only one rank's would be saved.
    """
    if is_dtensor(tensor) or tensor.is_floating_point() or tensor.is_complex() or tensor.nbytes > SMALL:
        return ""
    return (
        f" with the CRC-32 "
        f"{zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data):08x}"
    )
