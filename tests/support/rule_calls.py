"""Calls that rules are proven on: for every op of the tables, with real tensors, some."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from autopar.rules.registry import overload
from autopar.torch_private import pytree

Maker = Callable[[tuple[int, ...], torch.Generator], torch.Tensor]


@dataclass(frozen=True)
class Operand:
    """A random tensor of a call: its shape and how its values are drawn."""

    shape: tuple[int, ...]
    draw: Maker


def F(*shape: int) -> Operand:
    """Floats on both sides of zero."""
    return Operand(shape, lambda s, g: 2 * torch.randn(s, dtype=torch.float64, generator=g))


def P(*shape: int) -> Operand:
    """Floats between 0.1 and 0.9: probabilities, and what logarithms and roots are taken of."""
    return Operand(shape, lambda s, g: 0.1 + 0.8 * torch.rand(s, dtype=torch.float64, generator=g))


def W(*shape: int, dtype: torch.dtype = torch.float32) -> Operand:
    """Whole numbers in a narrow dtype: sums of them are exact."""
    return Operand(shape, lambda s, g: torch.randint(-8, 9, s, generator=g).to(dtype))


def I(*shape: int, below: int = 9) -> Operand:  # noqa: E743
    """Integers, as indices."""
    return Operand(shape, lambda s, g: torch.randint(0, below, s, generator=g))


def B(*shape: int) -> Operand:
    """Booleans."""
    return Operand(shape, lambda s, g: torch.rand(s, generator=g) < 0.5)


def K(values: list[Any], dtype: torch.dtype | None = None) -> Operand:
    """These very values."""
    given = torch.tensor(values, dtype=dtype)
    return Operand(tuple(given.shape), lambda s, g: given.double() if given.is_floating_point() else given.clone())


Call = tuple[tuple[Any, ...], dict[str, Any]]


def call(*args: Any, **kwargs: Any) -> Call:
    return args, kwargs


def made(spec: Call, op: str) -> Call:
    """The call with real tensors, the same ones in every run."""
    generator = torch.Generator().manual_seed(zlib.crc32(op.encode()))
    return pytree.tree_map_only(Operand, lambda o: o.draw(o.shape, generator), spec)


# -- the calls -----------------------------------------------------------------------------------------------------

SHAPES = [(4, 5), (6,), (), (2, 3, 4), (2, 1, 3, 5), (1, 4)]  # 2 and 3: a rank has one element
PAIRS = [
    ((4, 5), (4, 5)), ((4, 5), (5,)), ((5,), (4, 5)), ((4, 1), (1, 5)), ((2, 3, 4), (3, 1)), ((4, 5), ()), ((), ()),
    ((2, 1, 3, 5), (4, 1, 5)), ((4, 1), (4, 1)), ((3, 2), (3, 2)), ((3, 2), (2,)), ((2, 1), (1, 3)),
]  # fmt: skip


def unary(draw: Callable[..., Operand], *rest: Any, **options: Any) -> list[Call]:
    return [call(draw(*shape), *rest, **options) for shape in SHAPES]


def binary(draw: Callable[..., Operand], *rest: Any, **options: Any) -> list[Call]:
    return [call(draw(*a), draw(*b), *rest, **options) for a, b in PAIRS]


def saved(*rest: Any, **options: Any) -> list[Call]:
    """A gradient and what the forward kept, of one shape."""
    return [call(F(*shape), P(*shape), *rest, **options) for shape in SHAPES]


def along(*before: Callable[..., Operand], after: tuple[Any, ...] = ()) -> list[Call]:
    """Ops along one dim, of tensors of one to four dims, on dims from both ends."""
    shapes = [
        ((4, 5), 1),
        ((4, 5), 0),
        ((5,), 0),
        ((3, 4, 5), -1),
        ((3, 4, 5), 1),
        ((2, 3, 4, 2), -2),
        ((1, 6), 1),
        ((3, 2), 0),
    ]
    return [call(*(draw(*shape) for draw in before), dim, *after) for shape, dim in shapes]


REDUCED = [
    ((4, 5), 1),
    ((4, 5), 0),
    ((5,), 0),
    ((3, 4, 5), -1),
    ((3, 4, 5), 1),
    ((2, 3, 4, 5), 2),
    ((1, 6), 0),
    ((3, 2), 1),
]
BY_DIM = [call(F(*shape), dim, keep) for shape, dim in REDUCED for keep in (False, True)]
BY_DIMS = [call(F(*shape), [dim], keep) for shape, dim in REDUCED for keep in (False, True)] + [
    call(F(3, 4, 5), [0, 2]), call(F(3, 4, 5), [0, -1], True), call(F(4, 5), [0, 1]),
    call(F(2, 3, 4, 5), [1, 2, 3], True),
]  # fmt: skip
WHOLE = [call(F(*shape)) for shape in ((4, 5), (6,), (3, 4, 5), ())]
TRUTHS = [call(B(*shape), dim, keep) for shape, dim in REDUCED for keep in (False, True)]

NORMS: list[tuple[tuple[int, ...], tuple[int, ...], bool, bool]] = [  # shape, normalized dims, weight, bias
    ((4, 6), (6,), True, True), ((4, 6), (6,), True, False), ((4, 6), (6,), False, False),
    ((3, 4, 6), (4, 6), True, True), ((3, 4, 6), (6,), True, True), ((2, 3, 1, 6), (1, 6), False, False),
    ((6,), (6,), True, True),
]  # fmt: skip


def layer_norm(shape: tuple[int, ...], over: tuple[int, ...], weight: bool, bias: bool) -> Call:
    return call(F(*shape), list(over), F(*over) if weight else None, F(*over) if bias else None, 1e-5)


def layer_norm_backward(shape: tuple[int, ...], over: tuple[int, ...], weight: bool, bias: bool, *mask: bool) -> Call:
    rows = (*shape[: len(shape) - len(over)], *[1] * len(over))
    given = mask or (True, weight, bias)
    return call(F(*shape), F(*shape), list(over), F(*rows), P(*rows), F(*over) if weight else None,
                F(*over) if bias else None, list(given))  # fmt: skip


ATTENTION: list[tuple[bool, tuple[int, ...] | None, int]] = [  # causal, the mask's shape, heads of keys
    (False, None, 4), (True, None, 4), (False, (5, 4), 4), (False, (3, 1, 5, 4), 4), (False, (1, 4, 1, 4), 4),
    (True, None, 2), (False, None, 1), (False, (1, 4, 1, 4), 2),
]  # fmt: skip


def attention(causal: bool, mask: tuple[int, ...] | None, heads: int) -> Call:
    keys = 5 if causal else 4
    return call(F(3, 4, 5, 6), F(3, heads, keys, 6), F(3, heads, keys, 6), 0.0, causal, attn_mask=mask and F(*mask))


def attention_backward(causal: bool, mask: tuple[int, ...] | None, heads: int) -> Call:
    (q, k, v, *rest), options = attention(causal, mask, heads)
    return call(q, q, k, v, q, F(*q.shape[:3]), *rest, **options)


# image, weight, groups, transposed, bias
CONVOLUTIONS: list[tuple[tuple[int, ...], tuple[int, ...], int, bool, bool]] = [
    ((4, 4, 5), (6, 4, 3), 1, False, True), ((3, 4, 5), (5, 4, 3), 1, False, False),
    ((4, 6, 5, 4), (4, 6, 3, 2), 1, False, True), ((3, 4, 4, 5), (6, 2, 3, 3), 2, False, True),
    ((3, 4, 4, 5), (8, 1, 3, 3), 4, False, True), ((3, 4, 5), (4, 1, 3), 4, False, False),
    ((4, 6, 5), (6, 4, 3), 1, True, True), ((3, 4, 4, 3), (4, 3, 2, 3), 2, True, True),
    ((2, 3, 4, 3, 4), (4, 3, 2, 2, 2), 1, False, True),
]  # fmt: skip


def convolution(image: tuple[int, ...], weight: tuple[int, ...], groups: int, transposed: bool, bias: bool) -> Call:
    ndim, out = len(image) - 2, weight[1] * groups if transposed else weight[0]
    how = ([2] * ndim, [1] * ndim, [1] * ndim, transposed, [0] * ndim, groups)
    return call(F(*image), F(*weight), F(out) if bias else None, *how)


def convolution_backward(*row: Any, mask: tuple[bool, ...] = (True, True, False)) -> Call:
    (x, weight, _, *how), _ = convolution(*row)
    result = torch.ops.aten.convolution(torch.zeros(x.shape), torch.zeros(weight.shape), None, *how)
    return call(F(*result.shape), x, weight, [result.shape[1]] if mask[2] else None, *how, list(mask))


POOLS = ([3, 2], [2, 1], [1, 1])
POOLS_3D = ([2, 2, 2], [2, 1, 2], [1, 0, 1])
PLANES = [(4, 5, 5, 4), (3, 5, 4)]
SPACES = [(3, 4, 4, 3, 5), (2, 4, 3, 5)]


def pooled(op: str, *how: Any, shapes: list[tuple[int, ...]], index_at: int | None = None) -> list[Call]:
    """The backward of a pooling: gradients, the image, and for a maximum the place of each in its plane."""
    found = []
    for shape in shapes:
        made = overload(op)(torch.zeros(shape), *how)
        given = [F(*(made if index_at is None else made[0]).shape), F(*shape), *how]
        found.append(call(*(given if index_at is None else [*given, I(*made[0].shape)])))
    return found


# windows with the same largest element
OVERLAPPING = ([[[0, 4, 2], [7, 4, 11], [2, 15, 0]]] * 4, [[[[0, 4, 2], [4, 9, 0]]] * 2])


def at(places: Any) -> Any:
    """A value for each place, the same for the same place."""
    return [at(p) for p in places] if isinstance(places, list) else 1.0 + places / 2


def resampled(ndim: int, *corners: bool) -> list[Call]:
    return [call(F(3, 4, *(4, 5, 3)[:ndim]), list((6, 5, 4)[:ndim]), *corners)]


def resampled_backward(ndim: int, *corners: bool) -> list[Call]:
    old, new = (4, 5, 3)[:ndim], (6, 5, 4)[:ndim]
    return [call(F(3, 4, *new), list(new), [3, 4, *old], *corners)]


RESAMPLED = {"upsample_linear1d": 1, "upsample_bilinear2d": 2, "upsample_bicubic2d": 2, "upsample_trilinear3d": 3}
NEAREST = [f"upsample_nearest{n}d" for n in (1, 2, 3)] + [f"_upsample_nearest_exact{n}d" for n in (1, 2, 3)]
VECTORS = [*((op, resampled(int(op[-2]))) for op in NEAREST),
           *((op, resampled(n, False)) for op, n in RESAMPLED.items()),
           *((op, resampled(2, False)) for op in ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"))]  # fmt: skip
PADS = [(1, [(4, 5, 6), (3, 4)], [2, 1]), (2, PLANES, [1, 2, 2, 0]), (3, SPACES, [1, 0, 1, 2, 0, 1])]
GROUP_NORMS: list[tuple[tuple[int, ...], int, bool]] = [
    ((4, 6, 3), 2, True),
    ((3, 4, 3, 2), 4, True),
    ((5, 4, 3, 2), 1, False),
]


def group_norm(shape: tuple[int, ...], groups: int, affine: bool) -> Call:
    n, c, *places = shape
    scale = (F(c), F(c)) if affine else (None, None)
    return call(F(*shape), *scale, n, c, math.prod(places), groups, 1e-5)


def group_norm_backward(shape: tuple[int, ...], groups: int, affine: bool) -> Call:
    (x, weight, _, n, *how, _), _ = group_norm(shape, groups, affine)
    return call(x, x, F(n, groups), P(n, groups), weight, n, *how, [True, affine, affine])


NONE, SUM = 0, 2


def nll(reduction: int, ignore: int, weight: bool, *shape: int, below: int = 6) -> Call:
    """Scores of 6 classes at dim 1 (at dim 0 where there is no batch)."""
    scores = (shape[0], 6, *shape[1:]) if shape else (6,)
    return call(F(*scores), I(*shape, below=below), P(6) if weight else None, reduction, ignore)


def nll_backward(reduction: int, ignore: int, weight: bool, *shape: int) -> Call:
    """Classes below 2 are in every piece of the classes: torch does not look at the bounds here."""
    (scores, target, weights, *rest), _ = nll(reduction, ignore, weight, *shape, below=2)
    return call(F(*shape) if reduction == NONE else F(), scores, target, weights, *rest, P())


NLL = [(reduction, ignore, weight, 5) for reduction in (NONE, SUM) for ignore in (-100, 1) for weight in (False, True)]
NLL_2D = [(reduction, ignore, weight, 4, 3, 2) for reduction, ignore, weight, _ in NLL]

VIEWS = [
    ((4, 6), (24,)), ((24,), (4, 6)), ((5, 3, 4), (15, 4)), ((15, 4), (5, 3, 4)), ((5, 3, 4), (5, 12)),
    ((6, 4), (4, 6)), ((4, 1, 6), (4, 6)), ((4, 6), (1, 4, 1, 6)), ((2, 3, 4, 5), (6, 20)), ((6, 20), (2, 3, 4, 5)),
    ((4, 6), (-1, 3)), ((), (1,)), ((1,), ()), ((7, 2), (2, 7)), ((4, 6), (8, 3)), ((3, 5), (3, 5)),
    ((9, 2, 5), (3, 6, 5)),
]  # fmt: skip
VIEW = [call(F(*old), list(new)) for old, new in VIEWS]

CALLS: list[tuple[str, list[Call]]] = [
    # element by element
    ("neg clone alias detach", unary(F)),
    ("neg clone", [call(W(4, 5, dtype=torch.int64))]),
    ("mul.Scalar div.Scalar", unary(F, 3.0)),
    ("exp exp2 expm1 reciprocal square abs sign sgn floor ceil round trunc frac", unary(F)),
    ("sin cos tan atan sinh cosh tanh asinh acosh erf erfc lgamma digamma sinc nan_to_num isnan isinf", unary(F)),
    ("log log1p log2 log10 sqrt rsqrt asin acos atanh erfinv logit", unary(P)),
    ("polygamma", [call(1, P(4, 5)), call(2, P(6))]),
    ("relu gelu silu sigmoid elu celu leaky_relu hardtanh hardsigmoid hardswish hardshrink softshrink softplus "
     "mish", unary(F)),
    ("gelu", [call(F(4, 5), approximate="tanh")]),
    ("elu", [call(F(4, 5), 1.5, 1.1, 0.9)]),
    ("softplus", [call(F(4, 5), 2.0, 1.0)]),
    ("add.Scalar sub.Scalar rsub.Scalar pow.Tensor_Scalar remainder.Scalar fmod.Scalar clamp clamp_min "
     "clamp_max", unary(F, 3)),
    ("pow.Scalar", [call(2, F(4, 5)), call(0.5, F(2, 3, 4))]),
    ("clamp", [call(F(4, 5), -1.0, 1.0), call(F(4, 5), None, 0.5)]),
    ("threshold", unary(F, 0.1, 0.2)),
    ("eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar", unary(I, 4)),
    ("logical_not", [*unary(B), call(F(4, 5))]),
    ("bitwise_not", [*unary(B), *unary(I)]),
    ("add.Tensor sub.Tensor", [*binary(F), call(F(4, 5), F(5), alpha=0.5), call(I(4, 5), I(5))]),
    ("mul.Tensor", [*binary(F), call(F(4, 5), B(5)), call(I(4), I(4))]),
    ("div.Tensor", binary(P)),
    ("maximum minimum atan2 hypot logaddexp remainder.Tensor fmod.Tensor floor_divide", binary(F)),
    ("pow.Tensor_Tensor xlogy.Tensor", binary(P)),
    ("div.Tensor_mode", [*binary(F, rounding_mode="floor"), call(F(4, 5), F(5), rounding_mode="trunc")]),
    ("clamp_min.Tensor clamp_max.Tensor", binary(F)),
    ("logical_and logical_or logical_xor", [*binary(B), *binary(I)]),
    ("bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor", [*binary(B), *binary(I)]),
    ("eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor", binary(lambda *s: I(*s, below=3))),
    ("_prelu_kernel", [call(F(4, 5), F(1, 5)), call(F(4, 5), F(1, 1)), call(F(2, 3, 4), F(1, 3, 1))]),
    ("where.self", [call(B(4, 5), F(4, 5), F(4, 5)), call(B(4, 1), F(5), F(4, 5)), call(B(5), F(3, 4, 5), F()),
                    call(B(), F(4), F(4))]),
    ("clamp.Tensor", [call(F(4, 5), F(4, 5), F(5)), call(F(4, 5), None, F(4, 5)), call(F(4, 5), F(5), None)]),
    ("lerp.Scalar", binary(F, 0.3)),
    ("lerp.Tensor", [call(F(4, 5), F(4, 5), P(5)), call(F(4, 1), F(5), P(4, 5)), call(F(3), F(3), P(3))]),
    ("addcmul", [call(F(4, 5), F(4, 5), F(5), value=0.5), call(F(4, 1), F(5), F(4, 5)), call(F(3), F(3), F())]),
    ("addcdiv", [call(F(4, 5), F(4, 5), P(5), value=0.5), call(F(4, 1), F(5), P(4, 5)), call(F(3), F(3), P())]),
    ("masked_fill.Scalar", [call(F(4, 5), B(4, 5), 2.0), call(F(3, 4, 5), B(4, 1), 1.5), call(F(4), B(), 0.0)]),
    ("masked_fill.Tensor", [call(F(4, 5), B(4, 5), F()), call(F(3, 4, 5), B(4, 1), F())]),
    ("fill.Scalar", unary(F, 2.0)),
    ("fill.Tensor", [call(F(4, 5), F()), call(F(3), F())]),
    ("copy", [call(F(4, 5), F(4, 5)), call(F(4, 5), F(5)), call(F(3, 4), F(3, 1)), call(F(3), F())]),
    ("_to_copy", [call(F(4, 5)), call(F(4, 5), dtype=torch.float32), call(F(4, 5), dtype=torch.bfloat16)]),
    ("_to_copy", [call(W(4, 5), dtype=torch.float64), call(W(4, 5), dtype=torch.int32),
                  call(I(4, 5), dtype=torch.float64)]),
    ("_to_copy", [call(W(3, dtype=torch.bfloat16), dtype=torch.float32), call(B(4, 5), dtype=torch.float64),
                  call(F())]),
    # their backwards
    ("silu_backward tanh_backward sigmoid_backward hardsigmoid_backward hardswish_backward mish_backward "
     "logit_backward", saved()),
    ("gelu_backward", [*saved(), call(F(4, 5), F(4, 5), approximate="tanh")]),
    ("threshold_backward hardshrink_backward softshrink_backward", saved(0.5)),
    ("elu_backward", [call(F(*s), 1.5, 1.1, 0.9, kept, F(*s)) for s in SHAPES for kept in (False, True)]),
    ("leaky_relu_backward", saved(0.1, False)),
    ("rrelu_with_noise_functional", [call(F(*s), P(*s)) for s in SHAPES]),
    ("hardtanh_backward", saved(0.3, 0.6)),
    ("softplus_backward", saved(2.0, 1.0)),
    ("_prelu_kernel_backward", [call(F(4, 5), F(4, 5), F(1, 5)), call(F(2, 3, 4), F(2, 3, 4), F(1, 3, 1))]),
    # matrix products
    ("mm", [call(F(4, 5), F(5, 6)), call(F(1, 5), F(5, 3)), call(F(4, 1), F(1, 3)), call(F(7, 2), F(2, 1))]),
    ("bmm", [call(F(3, 4, 5), F(3, 5, 2)), call(F(1, 4, 6), F(1, 6, 1))]),
    ("mv", [call(F(4, 5), F(5)), call(F(1, 4), F(4))]),
    ("dot", [call(F(5), F(5)), call(F(1), F(1))]),
    ("addmm", [call(F(6), F(4, 5), F(5, 6)), call(F(4, 6), F(4, 5), F(5, 6)), call(F(1, 6), F(4, 5), F(5, 6))]),
    ("addmm", [call(F(4, 1), F(4, 5), F(5, 6), beta=0.5, alpha=2.0), call(F(), F(4, 5), F(5, 6)),
               call(F(1), F(4, 5), F(5, 6))]),
    ("baddbmm", [call(F(3, 4, 2), F(3, 4, 5), F(3, 5, 2)),
                 call(F(1, 1, 2), F(3, 4, 5), F(3, 5, 2), beta=2.0, alpha=0.5)]),
    ("addmv", [call(F(4), F(4, 5), F(5)), call(F(1), F(4, 5), F(5)), call(F(), F(4, 5), F(5))]),
    ("_trilinear", [call(F(4, 5), F(3, 5, 6), F(4, 6), [1, 3], [0], [1, 2], [2, 3])]),
    ("_trilinear", [call(F(4, 5), F(4, 5), F(4, 5), [], [], [], [1]),
                    call(F(4, 5), F(4, 3), F(5), [2], [1], [0, 2], [1, 2])]),
    # reductions
    ("sum amax amin max min prod count_nonzero", WHOLE),
    ("argmax argmin", WHOLE),
    ("sum.dim_IntList amax amin", BY_DIMS),
    ("sum.dim_IntList", [call(F(4, 5), None), call(F(4, 5), []), call(I(4, 5), [0]), call(F(), [])]),
    ("sum", [call(I(4, 5)), call(W(4, 5), dtype=torch.float64)]),
    ("count_nonzero.dim_IntList", [call(I(4, 5, below=2), [1]), call(I(3, 4, 5, below=2), [0, 2]), call(B(6), [0])]),
    ("count_nonzero", [call(I(4, 5, below=2))]),
    ("prod.dim_int argmax argmin max.dim min.dim", BY_DIM),
    ("logsumexp", BY_DIMS),
    ("linalg_vector_norm", [call(x, 3.0, *rest) for (x, *rest), _ in BY_DIMS]),
    ("linalg_vector_norm", [call(F(4, 5)), call(F(3, 4, 5), float("inf"), None), call(F(4, 5), 2, None, True)]),
    ("any.dim all.dim", TRUTHS),
    ("any all", [call(B(4, 5)), call(B(6)), call(B(3, 4, 5))]),
    ("sort", [call(F(4, 5)), call(F(4, 5), 0), call(F(3, 4, 5), 1, True), call(F(5))]),
    ("topk", [call(F(4, 5), 2), call(F(4, 5), 2, 0), call(F(3, 4, 5), 3, 1, False), call(F(5), 5)]),
    # normalization
    ("_softmax _log_softmax", along(F, after=(False,))),
    ("_safe_softmax", along(F)),
    ("cumsum cumprod logcumsumexp", along(F)),
    ("_softmax_backward_data _log_softmax_backward_data", along(F, P, after=(torch.float64,))),
    ("glu", [call(F(4, 6), 1), call(F(4, 6)), call(F(6), 0), call(F(3, 8, 5), 1), call(F(2, 3), 0)]),
    ("glu_backward", [call(F(4, 3), F(4, 6), 1), call(F(3, 4, 5), F(3, 8, 5), 1), call(F(3), F(6), -1)]),
    ("native_layer_norm", [layer_norm(*norm) for norm in NORMS]),
    ("native_layer_norm_backward", [layer_norm_backward(*norm) for norm in NORMS]),
    ("native_layer_norm_backward",
     [layer_norm_backward(*NORMS[0], *mask) for mask in ((False, True, True), (True, False, True), (True, False, False),
                                                         (False, False, True))]),
    ("native_group_norm", [group_norm(*row) for row in GROUP_NORMS]),
    ("native_group_norm_backward", [group_norm_backward(*row) for row in GROUP_NORMS]),
    # convolution, and what else looks at neighbours
    ("convolution", [convolution(*row) for row in CONVOLUTIONS]),
    ("convolution_backward", [convolution_backward(*row) for row in CONVOLUTIONS]),
    ("convolution_backward",
     [convolution_backward(*CONVOLUTIONS[k], mask=mask) for k in (0, 3) for mask in ((True, True, True),
         (False, True, False), (True, False, False), (False, False, True))]),
    ("max_pool2d_with_indices", [call(F(*s), *POOLS) for s in PLANES]),
    ("max_pool3d_with_indices", [call(F(*s), *POOLS_3D) for s in SPACES]),
    ("max_pool2d_with_indices_backward",
     pooled("max_pool2d_with_indices", *POOLS, [1, 1], False, shapes=PLANES, index_at=1)),
    ("max_pool3d_with_indices_backward",
     pooled("max_pool3d_with_indices", *POOLS_3D, [1, 1, 1], False, shapes=SPACES, index_at=1)),
    ("adaptive_max_pool2d", [call(F(*s), [2, 3]) for s in PLANES]),
    ("adaptive_max_pool3d", [call(F(*s), [2, 3, 2]) for s in SPACES]),
    ("adaptive_max_pool2d_backward", [call(F(*s[:-2], 2, 3), F(*s), I(*s[:-2], 2, 3)) for s in PLANES]),
    ("adaptive_max_pool3d_backward", [call(F(*s[:-3], 2, 3, 2), F(*s), I(*s[:-3], 2, 3, 2)) for s in SPACES]),
    ("avg_pool2d", [call(F(*s), *POOLS, *more) for s in PLANES for more in ((), (True, False), (False, True, 5))]),
    ("avg_pool3d", [call(F(*s), *POOLS_3D, *more) for s in SPACES for more in ((), (True, False))]),
    ("avg_pool2d_backward", pooled("avg_pool2d", *POOLS, False, False, None, shapes=PLANES)),
    ("avg_pool3d_backward", pooled("avg_pool3d", *POOLS_3D, False, True, None, shapes=SPACES)),
    ("_adaptive_avg_pool2d", [call(F(*s), [2, 3]) for s in PLANES]),
    ("_adaptive_avg_pool3d", [call(F(*s), [2, 3, 2]) for s in SPACES]),
    ("_adaptive_avg_pool2d_backward", [call(F(*s[:-2], 2, 3), F(*s)) for s in PLANES]),
    ("_adaptive_avg_pool3d_backward", [call(F(*s[:-3], 2, 3, 2), F(*s)) for s in SPACES]),
    *((f"upsample_nearest{n}d _upsample_nearest_exact{n}d", resampled(n)) for n in (1, 2, 3)),
    *((f"upsample_nearest{n}d_backward "
       f"_upsample_nearest_exact{n}d_backward", resampled_backward(n)) for n in (1, 2, 3)),
    *((op, resampled(n, c)) for op, n in RESAMPLED.items() for c in (False, True)),
    *((f"{op}_backward", resampled_backward(n, c)) for op, n in RESAMPLED.items() for c in (False, True)),
    *((f"reflection_pad{n}d replication_pad{n}d", [call(F(*s), pad) for s in shapes]) for n, shapes, pad in PADS),
    *((f"{op}_pad{n}d_backward",
       [call(*args) for args, _ in pooled(f"{op}_pad{n}d", pad, shapes=shapes)]) for op in ("reflection",
           "replication") for n, shapes, pad in PADS),
    ("im2col", [call(F(*s), [2, 3], [1, 1], [1, 0], [2, 1]) for s in PLANES]),
    ("col2im", [call(F(*lead, 5 * 6, 6), [4, 5], [2, 3], [1, 1], [0, 0], [1, 2]) for lead in ((4,), ())]),
    ("pixel_shuffle", [call(F(4, 12, 3, 2), 2), call(F(8, 2, 3), 2), call(F(2, 3, 9, 2, 2), 3)]),
    ("pixel_unshuffle", [call(F(4, 3, 6, 4), 2), call(F(2, 4, 6), 2), call(F(2, 3, 1, 3, 9), 3)]),
    ("channel_shuffle", [call(F(4, 6, 3, 2), 3), call(F(3, 8, 5), 2), call(F(2, 4, 3, 2, 2), 2)]),
    # losses
    ("smooth_l1_loss huber_loss", [call(F(*s), F(*s), NONE, 0.7) for s in SHAPES]),
    ("soft_margin_loss", [call(F(*s), F(*s), NONE) for s in SHAPES]),
    ("smooth_l1_loss_backward "
     "huber_loss_backward",
     [call(F(), F(4, 5), F(4, 5), NONE, 0.7), *(call(F(*s), F(*s), F(*s), NONE, 0.7) for s in SHAPES)]),
    ("soft_margin_loss_backward",
     [call(F(), F(4, 5), F(4, 5), NONE), *(call(F(*s), F(*s), F(*s), NONE) for s in SHAPES)]),
    ("binary_cross_entropy",
     [call(P(4, 5), P(4, 5), None, NONE), call(P(4, 5), P(4, 5), P(5), NONE), call(P(6), P(6), P(6), NONE)]),
    ("binary_cross_entropy_backward",
     [call(F(*g), P(4, 5), P(4, 5), w, NONE) for g in ((), (4, 5)) for w in (None, P(4, 5), P(4, 1))]),
    ("binary_cross_entropy_with_logits",
     [call(F(4, 5), P(4, 5), w, v, NONE) for w in (None, P(5)) for v in (None, P(5), P(4, 5))]),
    ("nll_loss_forward", [*(nll(*row) for row in NLL), nll(NONE, -100, True), nll(SUM, 2, False)]),
    ("nll_loss_backward",
     [*(nll_backward(*row) for row in NLL), nll_backward(NONE, -100, True), nll_backward(SUM, 0, False)]),
    ("nll_loss2d_forward", [nll(*row) for row in NLL_2D]),
    ("nll_loss2d_backward", [nll_backward(*row) for row in NLL_2D]),
    # look-ups
    ("embedding", [call(F(6, 5), I(4, below=6)), call(F(6, 5), I(3, 4, below=6), 2), call(F(6, 1), I(2, 1, 3, below=6)),
                   call(F(6, 4), I(below=6))]),
    ("embedding_dense_backward",
     [call(F(4, 5), I(4, below=6), 6, -1, False), call(F(3, 4, 5), I(3, 4, below=6), 6, 2, False)]),
    ("embedding_dense_backward",
     [call(F(3, 4, 5), I(3, 4, below=2), 6, 0, True), call(F(5), I(below=6), 6, -1, False)]),
    ("index_select", [call(F(4, 5), 1, I(3, below=5)), call(F(4, 5), 0, I(7, below=4)),
                      call(F(2, 3, 4), -1, I(2, below=4)), call(F(5), 0, I(3, below=5))]),
    ("index_add", [call(F(4, 5), 1, I(3, below=5), F(4, 3)), call(F(4, 5), 0, I(7, below=4), F(7, 5), alpha=0.5),
                   call(F(5), 0, I(6, below=5), F(6))]),
    ("gather", [call(F(4, 5), 1, I(4, 3, below=5)), call(F(4, 5), 0, I(7, 5, below=4)),
                call(F(4, 5), 1, I(2, 3, below=5)), call(F(5), 0, I(3, below=5))]),
    ("scatter_add", [call(F(4, 5), 1, I(4, 3, below=5), F(4, 3)), call(F(4, 5), 0, I(7, 5, below=4), F(7, 5)),
                     call(F(4, 5), 1, I(2, 3, below=5), F(2, 3)), call(F(5), 0, I(3, below=5), F(4))]),
    ("scatter.src", [call(F(4, 5), 1, I(4, 3, below=5), F(4, 3)), call(F(4, 5), 0, I(7, 5, below=4), F(7, 5)),
                     call(F(4, 5), 1, I(2, 3, below=5), F(3, 4))]),
    ("scatter.value", [call(F(4, 5), 1, I(4, 3, below=5), 2.0), call(F(4, 5), 0, I(2, 5, below=4), 2.0),
                       call(F(4, 5), 1, I(2, 3, below=5), 1.0)]),
    ("index.Tensor", [call(F(4, 5), [I(3, below=4)]), call(F(4, 5), [None, I(3, below=5)]),
                      call(F(4, 5), [I(3, below=4), I(3, below=5)]),
                      call(F(2, 3, 4), [I(5, below=2), None, I(5, below=4)])]),
    ("index.Tensor", [call(F(4, 5), [I(3, 2, below=4)]), call(F(4, 5), [I(3, 1, below=4), I(2, below=5)]),
                      call(F(2, 3, 4), [None, I(below=3)]), call(F(4), [I(2, below=4)])]),
    ("index_put", [call(F(4, 5), [I(6, below=4)], F(6, 5), True), call(F(4, 5), [None, I(3, below=5)], F(4, 3), True),
                   call(F(4, 5), [I(3, 1, below=4), I(2, below=5)], F(3, 2), True)]),
    ("index_put", [call(F(4, 5), [I(3, below=4)], F(), True), call(F(4, 5), [I(1, below=4)], F(1, 5)),
                   call(F(2, 3, 4), [I(5, below=2), None, I(5, below=4)], F(5, 3), True)]),
    ("index_put", [call(F(4, 5), [I(6, below=4)], F(6, 5)), call(F(4, 5), [I(3, below=4)], F(1, 5), True),
                   call(F(4, 5), [B(4, 5)], F()), call(F(4, 5), [None, B(5)], F(4, 1))]),
    # attention
    ("_scaled_dot_product_flash_attention_for_cpu", [attention(*row) for row in ATTENTION]),
    ("_scaled_dot_product_flash_attention_for_cpu_backward", [attention_backward(*row) for row in ATTENTION]),
    # regrouping and reordering
    ("view _unsafe_view reshape", VIEW),
    ("t", [call(F(4, 5)), call(F(6)), call(F()), call(F(1, 5))]),
    ("transpose.int", [call(F(4, 5), 0, 1), call(F(2, 3, 4), 0, -1), call(F(2, 3, 4, 5), 1, 2), call(F(4, 1), 1, 0),
                       call(F(), 0, 0)]),
    ("permute", [call(F(2, 3, 4), [2, 0, 1]), call(F(4, 5), [-1, 0]), call(F(2, 3, 4, 5), [0, 2, 1, 3]),
                 call(F(), [])]),
    ("unsqueeze", [call(F(4, 5), k) for k in (0, 1, 2, -1)] + [call(F(), 0)]),
    ("squeeze", [call(F(3, 1, 2)), call(F(1, 1)), call(F(2, 3)), call(F())]),
    ("squeeze.dim", [call(F(4, 1, 3), 1), call(F(3, 1, 2), 0), call(F(4, 5, 1), -1), call(F(), 0)]),
    ("squeeze.dims", [call(F(2, 1, 3, 1), [1, 3]), call(F(3, 1, 5), [0, 1]), call(F(3, 2), [])]),
    ("expand", [call(F(4, 5), [3, 4, 5]), call(F(4, 1), [4, 5]), call(F(1, 5), [4, -1]), call(F(), [4]),
                call(F(4, 1), [2, -1, 3]), call(F(4, 1), [4, 1])]),
    ("slice.Tensor", [call(F(4, 5), 1, 1, 4), call(F(4, 5), 0, 2), call(F(3, 7), -1, 0, 9223372036854775807, 2),
                      call(F(6), 0, 1, 3), call(F(2, 3, 4, 5), 2, 0, 2)]),
    ("slice.Tensor", [call(F(4, 12), 1, 4, 12), call(F(12, 3), 0, 0, 8), call(F(20), 0, 4, 12),
                      call(F(3, 12), -1, 4, 9223372036854775807)]),
    ("slice_backward", [call(F(4, 8), [4, 12], 1, 4, 12, 1), call(F(8), [20], 0, 4, 12, 1)]),
    ("split_with_sizes", [call(F(4, 12), [8, 4], 1), call(F(24), [12, 6, 6]), call(F(2, 10, 3), [4, 6], -2),
                          call(F(4, 6), [6, 0], 1)]),
    ("slice.Tensor", [call(F(4, 12), 1, 4, 8), call(F(12, 3), 0, 8, 9223372036854775807),
                      call(F(3, 12), -1, -6, 9223372036854775807), call(F(12), 0, 1, 12, 3),
                      call(F(5, 8), 1, 1, 9223372036854775807, 2), call(F(8), 0, -8, -4), call(F(6), 0, 0, 6)]),
    ("select.int", [call(F(4, 5), 1, 2), call(F(4, 5), 0, -1), call(F(2, 3, 4), -2, 1), call(F(6), 0, 4)]),
    ("slice_backward", [call(F(4, 3), [4, 5], 1, 1, 4, 1), call(F(2, 5), [4, 5], 0, 2, 4, 1),
                        call(F(2, 3, 2), [2, 3, 4], -1, 0, 4, 2)]),
    ("slice_backward", [call(F(4, 4), [4, 12], 1, 4, 8, 1), call(F(4, 3), [12, 3], 0, 8, 9223372036854775807, 1),
                        call(F(3, 6), [3, 12], -1, -6, 9223372036854775807, 1), call(F(4), [12], 0, 1, 12, 3)]),
    ("select_backward", [call(F(4), [4, 5], 1, 2), call(F(5), [4, 5], 0, -1), call(F(2, 4), [2, 3, 4], -2, 1),
                         call(F(), [6], 0, 3)]),
    ("slice_scatter", [call(F(4, 5), F(4, 3), 1, 1, 4), call(F(4, 5), F(2, 5), 0, 2, 4),
                       call(F(4, 6), F(4, 3), -1, 0, 6, 2), call(F(4, 12), F(4, 4), 1, 4, 8)]),
    ("select_scatter", [call(F(4, 5), F(4), 1, 2), call(F(4, 5), F(5), 0, -1), call(F(2, 3, 4), F(2, 4), -2, 1)]),
    ("cat", [call([F(4, 4), F(4, 8)], 1), call([F(12), F(6), F(6)]), call([F(2, 4, 3), F(2, 6, 3)], -2),
             call([F(4, 0), F(4, 6)], 1), call([F(0, 3), F(0, 3)])]),
    ("cat", [call([F(4, 5), F(4, 3)], 1), call([F(4, 5), F(2, 5), F(1, 5)]), call([F(5), F(2)]),
             call([F(2, 3, 4), F(2, 3, 4)], -1), call([F(4, 5)], 1)]),
    ("stack", [call([F(4, 5), F(4, 5)], k) for k in (0, 1, 2, -1)] + [call([F(), F(), F()]), call([F(3, 4)], 1)]),
    ("split_with_sizes", [call(F(4, 6), [2, 2, 2], 1), call(F(6), [3, 3]), call(F(2, 6, 3), [3, 3], -2),
                          call(F(4, 5), [5], 1), call(F(4, 5), [2, 3], 1), call(F(4, 5), [1, 3]),
                          call(F(2, 6, 3), [1, 2, 3], -2)]),
    ("unbind.int unbind_copy.int", [call(F(4, 5), 1), call(F(4, 5)), call(F(2, 3, 4), -2), call(F(3))]),
    ("repeat", [call(F(4, 5), [1, 2]), call(F(4, 5), [3, 2]), call(F(5), [2, 3]), call(F(4, 1), [1, 3]), call(F(), [3]),
                call(F(2, 3, 4), [2, 1, 2])]),
    ("flip", [call(F(4, 5), [1]), call(F(4, 5), [0, -1]), call(F(6), [0]), call(F(2, 3, 4), [-2])]),
    ("roll", [call(F(4, 5), [1], [1]), call(F(4, 5), [2]), call(F(2, 3, 4), [1, -1], [0, -1]), call(F(6), [2], [0])]),
    ("diagonal", [call(F(4, 5)), call(F(4, 5), 1), call(F(2, 4, 3), 0, 1, 2), call(F(3, 4, 5), -1, 0, -1)]),
    ("diagonal_backward",
     [call(F(4), [4, 5], 0, 0, 1), call(F(2, 3), [2, 4, 3], 0, 1, 2), call(F(4, 2), [3, 4, 5], -1, 0, 2)]),
    ("tril triu", [call(F(4, 5)), call(F(3, 4, 5), 1), call(F(2, 3, 4, 4), -1)]),
    ("constant_pad_nd", [call(F(4, 5), [1, 2]), call(F(4, 5), [0, 0, 1, 1], 2.0), call(F(2, 3, 4), [1, 0, 0, 2]),
                         call(F(6), [-1, -2])]),
    # constants
    ("full", [call([4, 5], 2.0), call([], 3), call([6], 1, dtype=torch.int64)]),
    ("zeros ones", [call([4, 5]), call([]), call([2, 3, 4], dtype=torch.float64)]),
    ("zeros_like ones_like", [*unary(F), call(I(4, 5), dtype=torch.float64)]),
    ("full_like", unary(F, 2.0)),
    ("scalar_tensor", [call(2.0), call(3, dtype=torch.int64)]),
    ("arange", [call(5)]),
    ("arange.start", [call(2, 7)]),
    ("arange.start_step", [call(0, 9, 2)]),
    ("linspace", [call(0, 1, 5)]),
    ("logspace", [call(0, 1, 5)]),
    ("linspace.Tensor_Tensor logspace.Tensor_Tensor", [call(F(), F(), 5)]),
    ("linspace.Tensor_Scalar logspace.Tensor_Scalar", [call(F(), 1, 5)]),
    ("linspace.Scalar_Tensor logspace.Scalar_Tensor", [call(1, F(), 5)]),
    ("eye", [call(4)]),
    ("eye.m", [call(4, 3)]),
    ("tril_indices triu_indices", [call(4, 3)]),
    ("rot90", [call(F(4, 5)), call(F(2, 3, 4), 2, [0, 2]), call(F(2, 3, 4), -1, [1, 2]), call(F(4, 5), 4)]),
    # seldom ones, of which torch's samples have none, or too few
    ("positive conj_physical square _neg_view", unary(F)),
    ("fmod.Scalar clamp_max xlogy.Scalar_Other special_xlog1py.other_scalar", unary(F, 3.0)),
    ("xlogy.Scalar_Self special_xlog1py.self_scalar special_zeta.self_scalar", [call(2.0, P(4, 5)), call(3.0, P(6))]),
    ("special_zeta.other_scalar", [call(P(4, 5), 2.0)]),
    ("remainder.Scalar_Tensor", [call(7, F(4, 5))]),
    ("div.Scalar_mode", [call(F(4, 5), 0.7, rounding_mode="floor"), call(F(4, 5), 0.7, rounding_mode="trunc")]),
    ("floor_divide.Scalar", unary(F, 0.7)),
    ("bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar", unary(I, 5)),
    ("bitwise_left_shift.Tensor_Scalar bitwise_right_shift.Tensor_Scalar isin.Tensor_Scalar", unary(I, 2)),
    ("bitwise_and.Scalar_Tensor bitwise_or.Scalar_Tensor bitwise_xor.Scalar_Tensor", [call(5, I(4, 5))]),
    ("_cdist_forward", [call(F(4, 5), F(3, 5), p, None) for p in (1.0, 2.0, 3.0)] + [call(F(2, 4, 5), F(2, 3, 5), 2.0,
        None)]),
    ("_grouped_mm", [call(W(3, 4, 24), W(3, 24, 48)), call(W(4, 24), W(2, 24, 48), K([1, 4], torch.int32))]),
    ("_grouped_mm", [call(W(2, 4, 24), W(24, 8), K([4, 8], torch.int32)),
                     call(W(24, 8), W(8, 24), K([2, 8], torch.int32))]),
    ("histc", [call(F(4, 5), 4, -2.0, 2.0), call(F(4, 5), 4), call(F(6), 3, 0, 1)]),
    ("_fused_rms_norm", [call(F(4, 6), [6], F(6), 1e-5), call(F(3, 4, 6), [4, 6], None, 1e-5),
                         call(F(6), [6], F(6), 1e-5)]),
    ("_weight_norm_interface",
     [call(F(4, 5), F(4, 1)), call(F(4, 3, 5), F(1, 1, 5), 2), call(F(6, 2, 3), F(6, 1, 1), 0)]),
    ("_weight_norm_interface_backward",
     [call(F(4, 5), F(4, 5), F(4, 1), P(4, 1), 0), call(F(4, 3, 5), F(4, 3, 5), F(1, 1, 5), P(1, 1, 5), 2)]),
    ("native_group_norm_backward",
     [call(*group_norm_backward(*GROUP_NORMS[0])[0][:-1], mask) for mask in ([False, True, True],
         [True, False, False])]),
    ("max_unpool2d", [call(K(at(places)), K(places), [4, 5]) for places in OVERLAPPING]),
    *((f"{op}.vec", [call(*args, None) for args, _ in calls]) for op, calls in VECTORS),
    ("_upsample_bilinear2d_aa _upsample_bicubic2d_aa", resampled(2, False)),
    ("_upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward", resampled_backward(2, False)),
    ("native_channel_shuffle", [call(F(4, 6, 3, 2), 3), call(F(3, 8, 5), 2)]),
    ("bucketize.Tensor", [call(F(4, 5), K([-1.0, 0.0, 0.5, 1.0])), call(F(), K([-1.0, 1.0]))]),
    ("bucketize.Scalar", [call(0.3, K([-1.0, 0.0, 0.5, 1.0]))]),
    ("searchsorted.Scalar", [call(K([-1.0, 0.0, 0.5, 1.0]), 0.3)]),
    ("isin.Tensor_Tensor", [call(I(4, 5), I(3)), call(I(6), I(2, 2))]),
    ("_embedding_bag "
     "_embedding_bag_forward_only",
     [call(F(6, 5), I(7, below=6), K([0, 3, 4]), False, mode, False, w) for mode, w in ((0, None), (0, F(7)), (1, None),
         (2, None))]),
    ("_embedding_bag_backward",
     [call(F(3, 5), I(7, below=6), K([0, 3, 4]), K([0, 0, 0, 1, 2, 2, 2]), K([3, 1, 3]), K([0, 0, 0]), 6, False, 0,
           False, w, -1) for w in (None, F(7))]),
    ("_embedding_bag_backward",
     [call(F(3, 5), I(7, below=6), K([0, 3, 4]), K([0, 0, 0, 1, 2, 2, 2]), K([3, 1, 3]), I(3, 5, below=6), 6, False, 2,
           False, None, -1)]),
    ("squeeze_copy.dims", [call(F(2, 1, 3, 1), [1, 3]), call(F(3, 1, 5), [0, 1])]),
    ("slice_copy.Tensor", [call(F(4, 5), 1, 1, 4), call(F(4, 5), 0, 2)]),
    ("select_copy.int", [call(F(4, 5), 1, 2), call(F(4, 5), 0, -1)]),
    ("unsafe_split_with_sizes", [call(F(4, 6), [2, 2, 2], 1), call(F(4, 5), [2, 3], 1)]),
]  # fmt: skip

TABLE: dict[str, list[Call]] = {}
for names, calls in CALLS:
    for name in names.split():
        TABLE.setdefault(name, []).extend(calls)
