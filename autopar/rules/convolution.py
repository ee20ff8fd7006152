"""Convolutions, pooling, resampling and padding. Batch and channels come apart; places in an image stay whole."""

from __future__ import annotations

import math

from autopar.rules.registry import rule


def _places(name: str, count: int) -> str:
    return " ".join(f"{name}{k}!" for k in range(count))


def _channels(weight, transposed: bool, groups: int, summed: str = "i") -> tuple[str, str, str]:
    """The factors of channels in, of channels out, and of the weight.

    The channels of each group come apart; the groups stay together, because the op is told their number.
    """
    i, o = (summed, "o") if groups == 1 else (f"(g! {summed})", "(g! o)")
    kernel = _places("k", len(weight.shape) - 2)
    return i, o, f"{i} o {kernel}" if transposed else f"{o} {summed} {kernel}"


def _convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups: int):
    """Where the channels that are summed over are split, the bias must be pending too."""
    i, o, w = _channels(weight, transposed, groups)
    ndim = len(x.shape) - 2
    return f"n {i} {_places('s', ndim)}, {w}, {o} -> n {o} {_places('t', ndim)}", {"g": groups}


def _convolution_backward(gradient, x, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups: int, mask):
    """Every rank would have all of the bias's gradient, and not a part of it, where channels in are split.

    Capture takes that gradient out, as a sum of its own; where it is not, those channels stay whole.
    """
    i, o, w = _channels(weight, transposed, groups, "i!" if mask[2] else "i")
    ndim = len(x.shape) - 2
    image, result = f"n {i} {_places('s', ndim)}", f"n {o} {_places('t', ndim)}"
    return f"{result}, {image}, {w} -> {image}, {w}, {o}", {"g": groups}


def _adds(x, weight, bias, *_) -> str:
    return "0, 1" if bias is None else "0+2, 1+2"


rule(_convolution, "convolution", linear=_adds, empty=False)
rule(_convolution_backward, "convolution_backward", linear="0", empty=False)

# what looks at neighbours, image by image: kernels, sizes and paddings are the same for every piece
for ndim, pools, padded in (
    (1, "", "reflection_pad1d replication_pad1d"),
    (2, "avg_pool2d _adaptive_avg_pool2d", "reflection_pad2d replication_pad2d"),
    (3, "avg_pool3d _adaptive_avg_pool3d", "reflection_pad3d replication_pad3d"),
):
    old, new = _places("s", ndim), _places("t", ndim)
    rule(f"... {old} -> ... {new}", f"{pools} {padded}", linear="0", empty=False)
    backward = " ".join(f"{op}_backward" for op in f"{pools} {padded}".split())
    rule(f"... {new}, ... {old} -> ... {old}", backward, linear="0", empty=False)

for ndim in (2, 3):
    old, new = _places("s", ndim), _places("t", ndim)
    rule(f"... {old} -> ... {new}, ... {new}", f"max_pool{ndim}d_with_indices adaptive_max_pool{ndim}d", empty=False)
# a gradient goes to its place in the plane; one kernel wants to see all of them
rule("... t0! t1!, ... s0! s1!, ... t0! t1! -> ... s0! s1!", "max_pool2d_with_indices_backward", linear="0", empty=False)
rule("... t0 t1, ... s0! s1!, ... t0 t1 -> ... s0! s1!", "adaptive_max_pool2d_backward", linear="0", empty=False)
rule("... t0 t1 t2, ... s0! s1! s2!, ... t0 t1 t2 -> ... s0! s1! s2!",
     "max_pool3d_with_indices_backward adaptive_max_pool3d_backward", linear="0", empty=False)  # fmt: skip

for ndim, ops in (
    (1, "upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d"),
    (2, "upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d upsample_bicubic2d"),
    (3, "upsample_nearest3d _upsample_nearest_exact3d upsample_trilinear3d"),
):
    old, new = _places("s", ndim), _places("t", ndim)
    rule(f"n c {old} -> n c {new}", ops, linear="0", empty=False)
    backward = " ".join(f"{op}_backward" for op in ops.split())
    rule(f"n c {new} -> n c {old}", backward, linear="0", sizes={2: "*"}, empty=False)


def _unfolded(x, kernel, *_):
    return "... c h! w! -> ... (c k!) l!", {"k": math.prod(kernel)}


def _folded(x, size, kernel, *_):
    return "... (c k!) l! -> ... c h! w!", {"k": math.prod(kernel)}


rule(_unfolded, "im2col", linear="0", empty=False)
rule(_folded, "col2im", linear="0", empty=False)

# channels that become places, and back; channels that change places
rule(lambda x, r: ("... (c a! b!) h w -> ... c (h a!) (w b!)", {"a": r, "b": r}), "pixel_shuffle", linear="0", view=True, empty=False)
rule(lambda x, r: ("... c (h a!) (w b!) -> ... (c a! b!) h w", {"a": r, "b": r}), "pixel_unshuffle", linear="0", view=True, empty=False)


def _shuffled(x, groups: int):
    rest = " ".join(f"d{k}" for k in range(len(x.shape) - 2))
    return f"n (g! c) {rest} -> n (c g!) {rest}", {"g": groups}


rule(_shuffled, "channel_shuffle", linear="0")
