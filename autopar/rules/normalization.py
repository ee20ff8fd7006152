"""Softmax, running sums, layer norm, group norm. What is normalized over, or run along, stays whole."""

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


rule(_over_dim(1, 1), "_softmax _log_softmax _safe_softmax cumprod logcumsumexp")
rule(_over_dim(1, 1), "cumsum", linear="0")
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


def _group_norm(x, *_) -> str:
    """The op is told the number of groups, so those stay together."""
    image = f"n c! {' '.join(f's{k}!' for k in range(len(x.shape) - 2))}"
    return f"{image}, c!, c! -> {image}, n g!, n g!"


def _group_norm_backward(dy, x, *_) -> str:
    image = f"n c! {' '.join(f's{k}!' for k in range(len(x.shape) - 2))}"
    return f"{image}, {image}, n g!, n g!, c! -> {image}, c!, c!"


rule(_group_norm, "native_group_norm", sizes={3: 0}, empty=False)
rule(_group_norm_backward, "native_group_norm_backward", linear="0", sizes={5: 0}, empty=False)


def _glu(results: str, before: str = ""):
    """The halves of one dim are multiplied, so each half is split by itself: ``(half! d)``."""

    def bound(*args) -> tuple[str, dict[str, int]]:
        x, dim = args[-2:] if len(args) > 1 and isinstance(args[-1], int) else (args[-1], -1)
        single = [f"d{k}" for k in range(len(x.shape))]
        double = list(single)
        double[dim] = f"(half! {single[dim]})"
        sides = {"x": " ".join(double), "y": " ".join(single)}
        return f"{before and sides[before] + ', '}{sides['x']} -> {sides[results]}", {"half": 2}

    return bound


rule(_glu("y"), "glu")
rule(_glu("x", before="y"), "glu_backward", linear="0")
