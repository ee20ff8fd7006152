"""Softmax and layer norm. What is normalized over stays whole."""

from __future__ import annotations

from autopar.rules.registry import rule


def _over_dim(operands: int, position: int):
    """All operands have one shape, and the dim in argument ``position`` is whole."""

    def bound(x, *args, **_) -> str:
        dims = [f"d{k}" for k in range(len(x.shape))]
        if dims:
            dims[args[position - 1]] = "whole!"
        one = " ".join(dims) or "()"
        return f"{', '.join([one] * operands)} -> {one}"

    return bound


rule(_over_dim(1, 1), "_softmax _log_softmax")
rule(_over_dim(2, 2), "_softmax_backward_data _log_softmax_backward_data", linear="0")


def _layer_norm(x, normalized_shape, *_, **__) -> str:
    whole = " ".join(f"k{i}!" for i in range(len(normalized_shape)))
    ones = " ".join("1" for _ in normalized_shape)
    return f"... {whole}, {whole}, {whole} -> ... {whole}, ... {ones}, ... {ones}"


def _layer_norm_backward(dy, x, normalized_shape, *_, **__) -> str:
    """A split batch leaves dx split and the weight's and bias's gradients pending."""
    whole = " ".join(f"k{i}!" for i in range(len(normalized_shape)))
    ones = " ".join("1" for _ in normalized_shape)
    return f"... {whole}, ... {whole}, ... {ones}, ... {ones}, {whole}, {whole} -> ... {whole}, {whole}, {whole}"


rule(_layer_norm, "native_layer_norm")
rule(_layer_norm_backward, "native_layer_norm_backward", linear="0")
