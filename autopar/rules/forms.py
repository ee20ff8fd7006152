"""Build the patterns of matrix products, norms, convolutions, attention and solvers from a call's arguments."""

from __future__ import annotations

from autopar.rules.dims import all_whole, broadcast, broadcasting, elements, names, ndim, tensor, wholes

# -- matmul ------------------------------------------------------------------------------------------------------------


def bias(pattern: str):
    """Return the pattern with a bias that broadcasts: its leading dims may be missing or of size one."""
    left, result = pattern.split(" -> ")

    def bound(bias, *_, **__) -> str:
        return f"{broadcast(bias.shape, result.split())}, {left} -> {result}"

    bound.__doc__ = f"``bias, {pattern}``, where the bias broadcasts."
    return bound


def addmv(bias, matrix, *_, **__) -> str:
    """A bias that broadcasts gives a result of its own size if torch gets an empty piece."""
    bias_dim, m = ("m", "m") if bias.shape == matrix.shape[:1] else ("1" if bias.shape else "()", "m!")
    return f"{bias_dim}, {m} k, k -> {m}"


def trilinear(a, b, c, expand_a, expand_b, expand_c, summed, *_) -> str:
    """A product of three tensors, each without the dims it is expanded by, summed over some dims."""
    dims = [f"d{k}" for k in range(len(a.shape) + len(expand_a))]
    sides = [tensor(d for k, d in enumerate(dims) if k not in gone) for gone in (expand_a, expand_b, expand_c, summed)]
    return f"{', '.join(sides[:3])} -> {sides[3]}"


def trilinear_work(a, b, c, expand_a, *_) -> str:
    """A product of two tensors that is multiplied by the third and summed, as for ``bilinear``."""
    return f"2 {' '.join(names(len(a.shape) + len(expand_a)))}"


def grouped(a, b, ends=None, bias=None, *_, **__) -> str:
    """Products of experts ``e``: tokens and experts stay whole.

    The tokens of all experts are in one dim, up to each expert's end.
    """
    where = ", e!" if ends is not None else ", ()"
    left, right, result = {
        (2, 3): ("t! k", "e! k n", "t! n"), (3, 2): ("e! m k", "k t!", "m t!"), (2, 2): ("m t!", "t! n", "e! m n"),
        (3, 3): ("e m k", "e k n", "e m n"),
    }[len(a.shape), len(b.shape)]  # fmt: skip
    return f"{left}, {right}{where}, {'()' if bias is None else 'e! n'} -> {result}"


def grouped_work(a, b, *_, **__) -> str:
    """Each token meets the weights of one expert."""
    return {(2, 3): "2 t k n", (3, 2): "2 m k t", (2, 2): "2 m t n", (3, 3): "2 e m k n"}[len(a.shape), len(b.shape)]


# -- normalization -----------------------------------------------------------------------------------------------------


def layer_norm(operands: str, results: str, shape: int):
    """The normalized dims ``k`` stay whole; a split batch leaves the weight's gradient pending.

    ``k``: the normalized dims; ``1``: their position in a mean.
    """

    def pattern(*args, **_) -> str:
        count = len(args[shape])
        return f"{operands} -> {results}".replace("1", " ".join(["1"] * count)).replace("k", wholes(count, "k"))

    pattern.__doc__ = f"``{operands} -> {results}``, where ``k`` are the normalized dims, which stay whole."
    return pattern


def group_norm(operands: str, results: str, of: int):
    """An image in its groups: batch and groups can be split, the channels of a group and the positions stay whole."""

    def pattern(*args, **_) -> tuple[str, dict[str, int]]:
        image = f"n (g c!) {wholes(len(args[of].shape) - 2, 's')}"
        return f"{operands} -> {results}".replace("image", image), {"g": args[6 + 2 * of]}

    pattern.__doc__ = f"``{operands} -> {results}``: groups can be split."
    return pattern


def weight_norm(operands: str, results: str, of: int, where: int):
    """Each index in one dim has a vector ``v`` with a length ``g``, which stays whole."""

    def pattern(*args, **_) -> str:
        dims = [f"d{k}!" for k in range(len(args[of].shape))]
        dim = args[where] if len(args) > where else 0
        dims[dim] = "o"
        lengths = ["1"] * len(dims)
        lengths[dim] = "o"
        return f"{operands} -> {results}".replace("v", tensor(dims)).replace("g", tensor(lengths))

    pattern.__doc__ = f"``{operands} -> {results}``, where ``v`` are vectors that stay whole, and ``g`` their lengths."
    return pattern


def renorm(x, p, dim: int, *_) -> str:
    """Each index in ``dim`` has a norm over all other dims."""
    side = tensor(d + "!" * (k != dim % len(x.shape)) for k, d in enumerate(names(len(x.shape))))
    return f"{side} -> {side}"


def glu(results: str, before: str = ""):
    """The halves of one dim are multiplied, so each half is split by itself: ``(half! d)``."""

    def pattern(*args) -> tuple[str, dict[str, int]]:
        x, dim = args[-2:] if len(args) > 1 and isinstance(args[-1], int) else (args[-1], -1)
        single = names(len(x.shape))
        double = list(single)
        double[dim] = f"(half! {single[dim]})"
        sides = {"x": tensor(double), "y": tensor(single)}
        return f"{before and sides[before] + ', '}{sides['x']} -> {sides[results]}", {"half": 2}

    pattern.__doc__ = glu.__doc__
    return pattern


# -- convolution -------------------------------------------------------------------------------------------------------


def channels(weight, transposed: bool, groups: int, summed: str = "i") -> tuple[str, str, str]:
    """Return the factors of input channels, output channels and the weight.

    Groups can be split, and the channels of each.
    """
    kernel = wholes(len(weight.shape) - 2, "k")
    if groups == 1:
        return summed, "o", f"{summed} o {kernel}" if transposed else f"o {summed} {kernel}"
    i, o = f"(g {summed})", "(g o)"
    return i, o, f"{i} o {kernel}" if transposed else f"{o} {summed} {kernel}"


def convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups: int):
    """``n i s!, o i k!, o -> n o t!``: split input channels, which are summed, need a pending bias."""
    i, o, w = channels(weight, transposed, groups)
    count = len(x.shape) - 2
    return f"n {i} {wholes(count, 's')}, {w}, {o} -> n {o} {wholes(count, 't')}", {"g": groups}


def convolution_backward(
    gradient, x, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups: int, mask
):
    """``n o t!, n i s!, o i k! -> n i s!, o i k!, o``.

    If input channels were split, every rank would compute the whole gradient of the bias, and not a part of it. Capture
    makes that gradient a separate sum; if it has not, these channels stay whole.
    """
    i, o, w = channels(weight, transposed, groups, "i!" if mask[2] else "i")
    count = len(x.shape) - 2
    image, result = f"n {i} {wholes(count, 's')}", f"n {o} {wholes(count, 't')}"
    return f"{result}, {image}, {w} -> {image}, {w}, {o}", {"g": groups}


def convolution_work(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups: int) -> str:
    """Each position of the result, or of the image if transposed, meets the whole kernel. Padding counts too."""
    count = len(x.shape) - 2
    places, kernel = names(count, "s" if transposed else "t"), names(count, "k")
    return f"2 n {'g ' * (groups > 1)}o i {' '.join(places + kernel)}"


def convolution_backward_work(
    gradient, x, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups: int, mask
) -> str:
    """Each gradient, of the image and of the weight, takes as much as the forward; that of the bias is not counted."""
    return f"{sum(mask[:2])} " + convolution_work(
        x, weight, None, stride, padding, dilation, transposed, output_padding, groups
    )


def shuffled(x, groups: int):
    """``n (g! c) … -> n (c g!) …``."""
    rest = tensor(names(len(x.shape) - 2))
    return f"n (g! c) {rest} -> n (c g!) {rest}", {"g": groups}


# -- attention ---------------------------------------------------------------------------------------------------------


def factors(query, key, causal: bool, mask, rows: bool = True) -> dict[str, str]:
    """Return the factors of query, key, value, output, mask, and the log-sum-exp of each query's row.

    Under a causal mask a query's position matters, so the sequence stays whole; also if rows are padded. Several heads
    may share a key: ``(h r)``.
    """
    s = "s!" if causal or not rows else "s"
    h, g = ("h", "h") if query.shape[1] == key.shape[1] else ("(h r)", "h")
    mask_factors = "()" if mask is None else broadcast(mask.shape, ["b", h, s, "t!"], [*query.shape[:3], key.shape[2]])
    row = f"b {h} {s if rows else 'rows!'}"
    return {
        "q": f"b {h} {s} d!",
        "k": f"b {g} t! d!",
        "v": f"b {g} t! e!",
        "o": f"b {h} {s} e!",
        "mask": mask_factors,
        "row": row,
        "column": f"{row} 1",
    }


def text(sides: str, factors: dict[str, str]) -> str:
    """Return ``q, k, v -> o, row`` with the factors of each name; other words stay as they are: ``()``, ``none!``."""
    sides, by, kind = sides.partition(" by ")
    return (
        " -> ".join(", ".join(factors.get(name, name) for name in side.split(", ")) for side in sides.split(" -> "))
        + by
        + kind
    )


def attention(sides: str, query: int, causal: int | None = None, mask: int | str | None = None, **options):
    """Return the pattern of a kernel with its operands and results in this order."""

    def pattern(*args, **kwargs) -> str:
        masked = (
            kwargs.get(mask) if isinstance(mask, str) else args[mask] if mask is not None and len(args) > mask else None
        )
        is_causal = causal is not None and len(args) > causal and args[causal]
        return text(sides, factors(args[query], args[query + 1], is_causal, masked, **options))

    pattern.__doc__ = f"``{sides}``."
    return pattern


def attention_work(query: int, causal: int | None = None):
    """Return the work of a kernel: two products, ``q k`` and ``p v``; in backward ``q k`` again, and four gradients.

    Under a causal mask half of the scores are computed. A backward has the gradient before its query.
    """
    scores, values = (6, 4) if query else (2, 2)

    def work(*args, **_) -> str:
        half = causal is not None and len(args) > causal and bool(args[causal])
        h = "h" if args[query].shape[1] == args[query + 1].shape[1] else "h r"
        return f"{scores // 2 if half else scores} b {h} s t d + {values // 2 if half else values} b {h} s t e"

    return work


# -- linalg ------------------------------------------------------------------------------------------------------------


def vectors(pattern: str, bare: str, position: int):
    """Return the pattern of an op that returns vectors, or else tensors without elements in their place."""

    def bound(*args, **kwargs) -> str:
        wanted = args[position] if len(args) > position else True
        return pattern if wanted else bare

    bound.__doc__ = f"``{pattern}``; without vectors ``{bare}``."
    return bound


def solved(pattern: str, mirrored: str):
    """Return the pattern of a solver: columns of the right-hand side can be split.

    If the unknown is on the left, ``X A = B``, rows can be split.
    """

    def bound(*_, left: bool = True, **__) -> str:
        return pattern if left else mirrored

    bound.__doc__ = f"``{pattern}``; if the unknown is on the left ``{mirrored}``."
    return bound


def solution(a, b, *, left: bool = True, **_) -> str:
    """The right-hand side, a matrix or one vector each, stays whole.

    Every rank computes the whole factorization.
    """
    side = "... i!" if b.shape == a.shape[:-1] else "... i! c!" if left else "... c! i!"
    return f"... i! j!, {side} -> {side}, ... i! j!, ... i!, ..."


def solution_work(a, b, **_) -> str:
    """A factorization, and two triangular systems for each right-hand side."""
    return "2/3 ... i i j + 2 ... i j" + " c" * (b.shape != a.shape[:-1])


def cross(x, y, *, dim: int = -1) -> str:
    """Vectors of three elements along ``dim``."""
    dims, sides = broadcasting(x.shape, y.shape)
    return f"{', '.join(sides)} -> {tensor(dims)}".replace(dims[dim], f"{dims[dim]}!")


# -- selection ---------------------------------------------------------------------------------------------------------


def scatter_reduce(x, dim: int, index, source, reduce: str, **_) -> str:
    """Sums could be split along the index too; maxima and means could not."""
    if index.shape != source.shape:
        return all_whole(x, index, source, results=tensor(f"a{k}!" for k in range(ndim(x))))
    table, picked = elements(x, dim, index)
    return f"{table}, {picked}, {picked} -> {table}"


def taken(x, index) -> str:
    """``whole, ... -> ...``: elements by their position in the flattened tensor."""
    return f"{wholes(ndim(x)) or '()'}, ... -> ..."


def searched(rows, *values, sorter=None, **__) -> str:
    """``s, ... -> ...``: one row for all values, or one row for each row of values. A sorter needs the whole row."""
    s = "s" if sorter is None else "s!"
    if values and not hasattr(values[0], "shape"):
        return f"{s}, {s} -> ()"
    return f"{s}, ..., {s} -> ..." if ndim(rows) == 1 else f"... {s}, ... v, ... {s} -> ... v"


def is_in(x, among, *, invert: bool = False, **_) -> str:
    """A value is in the whole set if it is in a part of it."""
    return f"..., {tensor(names(ndim(among)))} -> ... by {'min' if invert else 'max'}"


def bags(weight, indices, offsets, by_frequency: bool = False, mode: int = 0, *_) -> str:
    """Bags of indices are summed row by row: columns can be split.

    Results that are equal on all ranks are written as their maximum.
    """
    return f"v! d, i!, b!, i! -> bags! d, o!, sizes!, {'places! d' if mode == 2 else 'places!'} by max"


def bags_backward(
    gradient, indices, offsets, into, sizes, places, count: int, by_frequency: bool, mode: int, *_
) -> str:
    return f"bags! d, i!, b!, o!, sizes!, {'places! d' if mode == 2 else 'places!'}, i! -> v! d"


# -- reduction ---------------------------------------------------------------------------------------------------------


def binned(x, bins: int = 100, low: float = 0, high: float = 0) -> str:
    """Counts add up; without bounds, the bins depend on all values."""
    return f"{tensor(names(len(x.shape)))} -> bins!" if low != high else all_whole(x, results="bins!")
