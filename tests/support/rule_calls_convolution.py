"""Give calls of ops that look at neighbours: convolution, pooling, resampling, padding."""

from __future__ import annotations

from typing import Any

import torch
from operands import Call, Calls, F, I, K, call

from autopar.rules.registry import overload

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

CONVOLUTION: Calls = [
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
    # seldom ones, of which torch's samples have none, or too few
    ("max_unpool2d", [call(K(at(places)), K(places), [4, 5]) for places in OVERLAPPING]),
    *((f"{op}.vec", [call(*args, None) for args, _ in calls]) for op, calls in VECTORS),
    ("_upsample_bilinear2d_aa _upsample_bicubic2d_aa", resampled(2, False)),
    ("_upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward", resampled_backward(2, False)),
    ("native_channel_shuffle", [call(F(4, 6, 3, 2), 3), call(F(3, 8, 5), 2)]),
]  # fmt: skip
