"""List the functions that compute each row from the same row of their operands, and check that a call does.

A call is checked on meta tensors: it is made with two numbers of rows, and its result must have exactly one dim that
has this number. A function that keeps its shape although it mixes rows, such as a softmax over them, is checked by its
dim. A function in no table is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from autopar.capture.values.rows import Count, Rows
from autopar.torch_private import pytree, without_function_modes, without_modes

PROBES = 10007, 10009  # numbers of rows: primes that no size is


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


POINTWISE = _names("""
    abs acos add addcdiv addcmul asin atan atan2 bool bfloat16 ceil celu clamp clamp_max clamp_min clip clone
    contiguous cos cosh deg2rad detach div divide double elu eq erf erfc erfinv exp exp2 expm1 fill float floor
    floor_divide fmax fmin fmod frac ge gelu gt half hardsigmoid hardswish hardtanh int isfinite isinf isnan le
    leaky_relu lerp log log10 log1p log2 logaddexp logical_and logical_not logical_or logical_xor logit logsigmoid
    long lt masked_fill maximum minimum mish mul multiply nan_to_num ne neg negative ones_like pow prelu reciprocal
    relu relu6 remainder round rsqrt rsub selu sigmoid sign silu sin sinh softplus softsign sqrt square sub subtract
    tan tanh to true_divide trunc type type_as where xlogy zeros_like full_like __add__ __sub__ __mul__ __truediv__
    __floordiv__ __mod__ __pow__ __radd__ __rsub__ __rmul__ __rtruediv__ __rdiv__ __rpow__ __eq__ __ne__ __lt__
    __le__ __gt__ __ge__ __neg__ __abs__ __and__ __or__ __xor__ __invert__ and or __iadd__ __isub__ __imul__
    __itruediv__ __idiv__ dropout
""")
VIEWS = _names("""
    view reshape unsqueeze squeeze transpose permute flatten unflatten expand t swapaxes swapdims movedim
    __getitem__ narrow select chunk split unbind view_as expand_as
""")
PRODUCTS = _names("""
    linear matmul mm bmm __matmul__ embedding bilinear
""")
REDUCTIONS = _names("""
    sum mean amax amin max min prod norm logsumexp all any argmax argmin std var topk cat concat stack one_hot
    cosine_similarity
""")
ALONG = _names("""
    gather softmax log_softmax cumsum cumprod normalize sort argsort flip glu softmin
""")
TRAILING = _names("""
    layer_norm rms_norm
""")
MAYBE_IN_PLACE = _names("""
    relu relu6 silu mish elu celu selu leaky_relu hardtanh hardsigmoid hardswish
""")
LOSSES = _names("""
    mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy binary_cross_entropy_with_logits
""")  # of each element
RANDOM = frozenset({"dropout"})
MADE = _names("""
    arange bincount eye empty_like flatten full linspace meshgrid new_full new_ones new_zeros ones pad repeat roll
    scalar_tensor tensor tile tril triu unfold zeros
""")  # functions that draw no random numbers, beside those below
REMEDIES = {  # of functions that mix rows
    "softmax": "fill the other rows before it: h.masked_fill(~mask[:, None], -math.inf).softmax(0)",
    "log_softmax": "fill the other rows before it: h.masked_fill(~mask[:, None], -math.inf).log_softmax(0)",
    "cumsum": "fill the other rows with zeros before it: h.masked_fill(~mask[:, None], 0).cumsum(0)",
    "var": "compute it of sums: the mean of h[mask].square() minus that of h[mask], squared",
    "std": "compute it of sums: the mean of h[mask].square() minus that of h[mask], squared",
    "max": "take the values alone: h[mask].amax(0)",
    "min": "take the values alone: h[mask].amin(0)",
    "einsum": "write it as a product: h[mask].t() @ g[mask]",
    "": "compute with all rows, and choose with torch.where",
}
ROWWISE = POINTWISE | VIEWS | PRODUCTS | REDUCTIONS | ALONG | TRAILING | LOSSES | {"batch_norm"}


class Result(NamedTuple):
    """One tensor that a call returns: its sizes (``None`` for the rows), which dim has the rows, its dtype."""

    sizes: tuple[int | None, ...]
    at: int
    dtype: torch.dtype


class Mixed(Exception):
    """The call mixes rows."""


def name_of(function: Any) -> str:
    return str(getattr(function, "__name__", function))


def results(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, list[Result]]:
    """Return the structure of what a call returns, and its tensors.

    Raises:
        Mixed: a row of the result is not computed from the same row of the operands alone, or that is not known.
    """
    name = name_of(function)
    in_place = kwargs.get("inplace") or (name in MAYBE_IN_PLACE and len(args) > 1 and args[-1] is True)
    if name not in ROWWISE or in_place or (name == "embedding" and isinstance(args[1], Rows)):
        raise Mixed
    if name == "batch_norm" and (kwargs.get("training") or len(args) > 5):
        raise Mixed
    (first, spec), (second, _) = (_probed(function, args, kwargs, rows) for rows in PROBES)
    found = [_result(a, b) for a, b in zip(first, second, strict=True)]
    operands = [value for value in pytree.tree_leaves((args, dict(kwargs))) if isinstance(value, Rows)]
    if name in ("view", "reshape", "flatten", "unflatten", "squeeze", "view_as"):
        before = math.prod(operands[0].sizes[: operands[0].at])  # type: ignore[arg-type]
        if any(math.prod(result.sizes[: result.at]) != before for result in found):  # type: ignore[arg-type]
            raise Mixed
    if name in ALONG:
        dim = kwargs.get("dim", kwargs.get("dims", args[1] if len(args) > 1 else None))
        dim = (
            -1
            if dim is None and name in ("glu", "sort", "argsort")
            else 1
            if dim is None and name == "normalize"
            else dim
        )
        if name == "normalize":
            dim = kwargs.get("dim", args[2] if len(args) > 2 else 1)
        dims = dim if isinstance(dim, (tuple, list)) else [dim]
        if any(type(d) is not int or d % operands[0].dim() == operands[0].at for d in dims):
            raise Mixed
    if name in TRAILING:
        shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())
        if operands[0].at >= operands[0].dim() - len(shape):
            raise Mixed
    return spec, found


def probed(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return what a call returns for two numbers of rows, on meta; raises ``Mixed`` where it fails."""
    first, second = (_probed(function, args, kwargs, rows)[0] for rows in PROBES)
    return first, second


def _probed(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], rows: int) -> tuple[list[Any], Any]:
    def stand_in(value: Any) -> Any:
        if isinstance(value, Count):
            return rows
        if isinstance(value, torch.device):
            return torch.device("meta")
        shape = [rows if size is None else size for size in value.sizes] if isinstance(value, Rows) else value.shape
        return torch.empty(shape, dtype=value.dtype, device="meta")

    with without_modes(), without_function_modes(), torch.no_grad():
        args, kwargs = pytree.tree_map_only(
            (Rows, torch.Tensor, Count, torch.device), stand_in, (tuple(args), dict(kwargs))
        )
        kwargs = {key: value for key, value in kwargs.items() if key != "device"}
        try:
            return pytree.tree_flatten(function(*args, **kwargs))
        except Exception as error:
            raise Mixed from error


def _result(a: Any, b: Any) -> Result:
    if not isinstance(a, torch.Tensor):
        raise Mixed
    differ = [dim for dim, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m != n]
    if len(differ) != 1 or (a.shape[differ[0]], b.shape[differ[0]]) != PROBES:
        raise Mixed
    return Result(tuple(None if dim == differ[0] else size for dim, size in enumerate(a.shape)), differ[0], a.dtype)
