"""Keep a tensor that the model made while it was captured: in full when it is small, else the hash of its bytes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch

from autopar.ir.record import DTYPE_NAMES

INLINE_ELEMENTS = 16  # constants up to this size are printed in full


@dataclass(frozen=True)
class Constant:
    """A tensor that the model made while it was captured. ``content`` is its numbers, or the hash of its bytes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    content: object
    tensor: torch.Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def meaning(self) -> tuple[object, ...]:
        """The value that equality of programs compares; nan equals itself, and 0.0 differs from -0.0 and 0."""
        return self.shape, self.dtype, repr(self.content)

    @staticmethod
    def of(tensor: torch.Tensor) -> Constant:
        tensor = tensor.detach()
        if tensor.numel() <= INLINE_ELEMENTS:
            content: object = _freeze(tensor.tolist())
        else:
            raw = tensor.contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes()
            content = f"{DTYPE_NAMES[tensor.dtype]}:" + hashlib.sha256(raw).hexdigest()[:16]
        return Constant(tuple(tensor.shape), tensor.dtype, content, tensor)


def _freeze(value: object) -> object:
    return tuple(_freeze(v) for v in value) if isinstance(value, list) else value
