"""Refuse nested, sparse and quantized tensors: their memory has no dims that could be split."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from autopar.errors import CaptureError

REMEDIES = {
    "nested": "pad it to one length, as to_padded_tensor() does, and keep a mask of what counts",
    "sparse": "make it dense: to_dense(), or sparse=False in an embedding",
    "quantized": "make it floating: dequantize(); torch.fake_quantize_per_tensor_affine rounds in the same way",
    "mkldnn": "make it dense: to_dense(), and leave oneDNN's own layout out of the model",
}

QUANTIZED = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)


def kind_of(value: Any) -> str | None:
    """Return ``nested``, ``sparse_coo`` and so on for a tensor that is not dense; ``None`` for other values."""
    if not isinstance(value, torch.Tensor):
        return None
    if value.is_nested:
        return "nested"
    if value.layout is not torch.strided:
        return str(value.layout).removeprefix("torch.").removeprefix("_")
    return "quantized" if value.is_quantized else None


def remedy_of(kind: str) -> str:
    return REMEDIES["sparse" if kind.startswith("sparse") else kind]


def require_dense(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise ``CaptureError`` for the first tensor that is not dense.

    Each tensor comes with its name for a reader, as in ``argument x``.
    """
    for label, tensor in named:
        if (kind := kind_of(tensor)) is not None:
            raise CaptureError(f"{label} is a {kind} tensor, which has no pieces\n  {remedy_of(kind)}")


def met_in(op: str, args: Iterable[Any], results: Iterable[Any] = ()) -> tuple[str, str] | None:
    """Return what an op does with a tensor that is not dense, and the remedy; ``None`` if all tensors are dense."""
    # a fake of its result is an ordinary tensor
    if any(isinstance(value, torch.dtype) and value in QUANTIZED for value in args):
        return f"{op} makes a quantized tensor, which has no pieces", REMEDIES["quantized"]
    for verb, values in (("reads", args), ("makes", results)):
        for value in values:
            if (kind := kind_of(value)) is not None:
                return f"{op} {verb} a {kind.partition('_')[0]} tensor, which has no pieces", remedy_of(kind)
    return None
