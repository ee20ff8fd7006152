"""Ops on lists of tensors, one after the other: each tensor comes apart by itself."""

from __future__ import annotations

from autopar.rules.dims import broadcasting, every, names, tensor
from autopar.rules.registry import rule


def _each(lists: int, single: int = 0):
    """``lists`` lists come first; the tensors at one place of them broadcast. Then ``single`` tensors without dims."""

    def pattern(*args, **_) -> str:
        given = [value for value in args if isinstance(value, (list, tuple)) and value and hasattr(value[0], "shape")][:lists]
        rows, results = [[] for _ in given], []
        for k, shapes in enumerate(zip(*([x.shape for x in one] for one in given), strict=True)):
            dims, sides = broadcasting(*shapes, prefix=f"t{k}d")
            results.append(tensor(dims))
            for row, side in zip(rows, sides, strict=True):
                row.append(side)
        operands = [side for row in rows for side in row] + ["()"] * single
        return f"{', '.join(operands)} -> {', '.join(results)}"

    pattern.__doc__ = f"{'A list' if lists == 1 else f'{lists} lists'}, each of its tensors as in the op on one."
    return pattern


def _jointly(*alternatives: tuple[int, ...]):
    """A sum passes through all tensors of these lists together."""

    def linear(first, *_, **__) -> str:
        count = len(first)
        return ", ".join("+".join(every(count, one * count) for one in lists) for lists in alternatives)

    return linear


def _norms(tensors, *_, **__) -> str:
    operands = [" ".join(f"{d}!" for d in names(len(x.shape), f"t{k}d")) or "()" for k, x in enumerate(tensors)]
    return f"{', '.join(operands)} -> {', '.join(['()'] * len(tensors))}"


def _maxima(tensors, *_, **__) -> str:
    return _norms(tensors).replace("!", "") + " by max"


def _overloads(ops: str, kinds: str) -> str:
    return " ".join(f"_foreach_{op}.{kind}".removesuffix(".default") for op in ops.split() for kind in kinds.split())


rule(_each(1), _overloads("neg", "default") + " " + _overloads("mul div", "Scalar ScalarList"), linear=_jointly((0,)))
rule(_each(1), _overloads("""
    abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 reciprocal round rsqrt sigmoid sign
    sin sinh sqrt tan tanh trunc
""", "default") + " " + _overloads("add sub clamp_max clamp_min maximum minimum pow", "Scalar ScalarList"))  # fmt: skip
rule(_each(1), "_foreach_pow.ScalarAndTensor")
rule(_each(1, 1), "_foreach_mul.Tensor", linear=_jointly((0,)))
rule(_each(1, 1), "_foreach_div.Tensor", linear=_jointly((0,)))
rule(_each(1, 1), "_foreach_add.Tensor")
rule(_each(2), _overloads("add sub", "List") + " _foreach_lerp.Scalar _foreach_lerp.ScalarList", linear=_jointly((0, 1)))
rule(_each(2), "_foreach_mul.List", linear=_jointly((0,), (1,)))
rule(_each(2), "_foreach_div.List", linear=_jointly((0,)))
rule(_each(2), _overloads("clamp_max clamp_min maximum minimum pow", "List") + " _foreach_copy", linear="")
rule(_each(3), "_foreach_lerp.List", linear=_jointly((0, 1)))
rule(_each(3), _overloads("addcmul", "Scalar ScalarList"), linear=_jointly((0, 1), (0, 2)))
rule(_each(3), _overloads("addcdiv", "Scalar ScalarList"), linear=_jointly((0, 1)))
rule(_norms, "_foreach_norm.Scalar", empty=False)
rule(_maxima, "_foreach_max", empty=False)
