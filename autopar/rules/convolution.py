"""Shard convolutions, pooling, resampling and padding by batch and by channels. Positions in an image stay whole."""

from __future__ import annotations

import functools
import math

from autopar.rules import forms as to
from autopar.rules.dims import names, sized, tensor, wholes
from autopar.rules.registry import rule

# ops that are linear in their first operand, and do not take empty pieces
linear = functools.partial(rule, linear="0", empty=False)

rule(to.convolution, "convolution", linear=lambda x, weight, bias, *_: "0, 1" if bias is None else "0+2, 1+2",
     sizes={8: "g"}, empty=False, work=to.convolution_work)  # fmt: skip
rule(to.convolution_backward, "convolution_backward", linear="0", sizes={9: "g"}, empty=False,
     work=to.convolution_backward_work)  # fmt: skip

# ops that read neighbours, image by image: kernels, sizes and paddings are the same for every piece
for ndim, ops in (
    (1, "reflection_pad1d replication_pad1d"),
    (2, "avg_pool2d _adaptive_avg_pool2d reflection_pad2d replication_pad2d"),
    (3, "avg_pool3d _adaptive_avg_pool3d reflection_pad3d replication_pad3d"),
):
    old, new = wholes(ndim, "s"), wholes(ndim, "t")
    linear(f"... {old} -> ... {new}", ops)
    linear(f"... {new}, ... {old} -> ... {old}", " ".join(f"{op}_backward" for op in ops.split()))

# a gradient goes to its position in the plane; one kernel needs all of them
for ndim in (2, 3):
    old, new, targets = wholes(ndim, "s"), wholes(ndim, "t"), tensor(names(ndim, "t"))
    rule(f"... {old} -> ... {new}, ... {new}", f"max_pool{ndim}d_with_indices adaptive_max_pool{ndim}d", empty=False)
    linear(f"... {new}, ... {new} -> ... {old}", f"max_unpool{ndim}d")
    linear(f"... {targets}, ... {old}, ... {targets} -> ... {old}", f"adaptive_max_pool{ndim}d_backward")
    rule(
        f"... {old}, ... which! -> ... {new}, ... {new}".replace("...", "n c"),
        f"fractional_max_pool{ndim}d",
        empty=False,
    )
    linear(f"... {new}, ... {old}, ... {new} -> ... {old}", f"fractional_max_pool{ndim}d_backward")
linear("... t0! t1!, ... s0! s1!, ... t0! t1! -> ... s0! s1!", "max_pool2d_with_indices_backward")
linear("... t0 t1 t2, ... s0! s1! s2!, ... t0 t1 t2 -> ... s0! s1! s2!", "max_pool3d_with_indices_backward")

for ndim, ops in (
    (1, "upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d"),
    (
        2,
        "upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa "
        "_upsample_bicubic2d_aa",
    ),
    (3, "upsample_nearest3d _upsample_nearest_exact3d upsample_trilinear3d"),
):
    old, new = wholes(ndim, "s"), wholes(ndim, "t")
    linear(f"n c {old} -> n c {new}", ops)
    linear(f"n c {old} -> n c {new}", " ".join(f"{op}.vec" for op in ops.split()))
    linear(f"n c {new} -> n c {old}", " ".join(f"{op}_backward" for op in ops.split()), sizes={2: "*"})

# values are read from an image at positions in a grid: the grid can be split, the image cannot
for ndim, places in ((2, "y x"), (3, "z y x")):
    image, grid = f"n c {wholes(ndim, 's')}", f"n {places} which!"
    linear(f"{image}, {grid} -> n c {places}", f"grid_sampler_{ndim}d")
    linear(f"n c {places}, {image}, {grid} -> {image}, {grid}", f"grid_sampler_{ndim}d_backward")

linear(sized("... c h! w! -> ... (c k!) l!", lambda x, kernel, *_: {"k": math.prod(kernel)}), "im2col")
linear(sized("... (c k!) l! -> ... c h! w!", lambda x, size, kernel, *_: {"k": math.prod(kernel)}), "col2im")

# channels become positions, and back; channels change their order
linear(sized("... c (h a!) (w b!) -> ... (c a! b!) h w", lambda x, r: {"a": r, "b": r}), "pixel_unshuffle", view=True)
linear(sized("... (c a! b!) h w -> ... c (h a!) (w b!)", lambda x, r: {"a": r, "b": r}), "pixel_shuffle", view=True)
rule(to.shuffled, "channel_shuffle native_channel_shuffle", linear="0")
