"""Softmax, running sums, layer norm, group norm. What is normalized over, or run along, stays whole."""

from __future__ import annotations

from autopar.rules.dims import along, names, tensor, wholes
from autopar.rules.registry import rule

rule(along("whole -> whole", 1), "_softmax _log_softmax _safe_softmax cumprod logcumsumexp")
rule(along("whole -> whole", 1), "cumsum", linear="0")
rule(along("whole, whole -> whole", 2), "_softmax_backward_data _log_softmax_backward_data", linear="0")


def _layer_norm(operands: str, results: str, shape: int):
    """``k``: what is normalized over; ``1``: its place in a mean. A split batch leaves the weight's gradient pending."""

    def pattern(*args, **_) -> str:
        count = len(args[shape])
        return f"{operands} -> {results}".replace("1", " ".join(["1"] * count)).replace("k", wholes(count, "k"))

    pattern.__doc__ = f"``{operands} -> {results}``, where ``k`` is what is normalized over, and stays whole."
    return pattern


rule(_layer_norm("... k, k, k", "... k, ... 1, ... 1", 1), "native_layer_norm")
rule(_layer_norm("... k, ... k, ... 1, ... 1, k, k", "... k, k, k", 2), "native_layer_norm_backward", linear="0")
rule(_layer_norm("... k, k", "... k, ... 1", 1), "_fused_rms_norm")
rule(_layer_norm("... k, ... k, ... 1, k", "... k, k", 2), "_fused_rms_norm_backward", linear="0")


def _group_norm(operands: str, results: str, of: int):
    """An image in its groups: batch and groups come apart, the channels of a group and the places stay together."""

    def pattern(*args, **_) -> tuple[str, dict[str, int]]:
        image = f"n (g c!) {wholes(len(args[of].shape) - 2, 's')}"
        return f"{operands} -> {results}".replace("image", image), {"g": args[6 + 2 * of]}

    pattern.__doc__ = f"``{operands} -> {results}``: groups come apart."
    return pattern


GROUPS = {3: "n", 4: "g c", 6: "g"}
rule(_group_norm("image, (g c!), (g c!)", "image, n g, n g", 0), "native_group_norm", sizes=GROUPS, empty=False)
rule(_group_norm("image, image, n g, n g, (g c!)", "image, (g c!), (g c!)", 1), "native_group_norm_backward", linear="0",
     sizes={k + 2: size for k, size in GROUPS.items()}, empty=False)  # fmt: skip


def _weight_norm(operands: str, results: str, of: int, where: int):
    """Each place in one dim is a vector ``v`` with a length ``g``; it stays whole."""

    def pattern(*args, **_) -> str:
        dims = [f"d{k}!" for k in range(len(args[of].shape))]
        dim = args[where] if len(args) > where else 0
        dims[dim] = "o"
        lengths = ["1"] * len(dims)
        lengths[dim] = "o"
        return f"{operands} -> {results}".replace("v", tensor(dims)).replace("g", tensor(lengths))

    pattern.__doc__ = f"``{operands} -> {results}``, where ``v`` are vectors that stay whole, and ``g`` their lengths."
    return pattern


rule(_weight_norm("v, g", "v, g", 0, 2), "_weight_norm_interface", empty=False)
rule(_weight_norm("v, v, g, g", "v, g", 1, 4), "_weight_norm_interface_backward", linear="0", empty=False)


def _renorm(x, p, dim: int, *_) -> str:
    """Each place in ``dim`` has a norm, over all others."""
    one = tensor(d + "!" * (k != dim % len(x.shape)) for k, d in enumerate(names(len(x.shape))))
    return f"{one} -> {one}"


rule(_renorm, "renorm")


def _glu(results: str, before: str = ""):
    """The halves of one dim are multiplied, so each half is split by itself: ``(half! d)``."""

    def pattern(*args) -> tuple[str, dict[str, int]]:
        x, dim = args[-2:] if len(args) > 1 and isinstance(args[-1], int) else (args[-1], -1)
        single = names(len(x.shape))
        double = list(single)
        double[dim] = f"(half! {single[dim]})"
        sides = {"x": tensor(double), "y": tensor(single)}
        return f"{before and sides[before] + ', '}{sides['x']} -> {sides[results]}", {"half": 2}

    pattern.__doc__ = _glu.__doc__
    return pattern


rule(_glu("y"), "glu")
rule(_glu("x", before="y"), "glu_backward", linear="0")
