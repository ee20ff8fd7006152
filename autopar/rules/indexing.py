"""Build the patterns of look-ups along a dim of a tensor, of their reverse, and of losses that look up a class.

The indexed dim stays whole.
"""

from __future__ import annotations

import re

import torch

NONE, SUM = 0, 2  # torch's numbers for a loss's reduction; 1 is the mean


def embedding_backward(gradient, index, count: int, padding: int, by_frequency: bool) -> str:
    """If rows are divided by the frequency of their index, they are no longer a sum over the batch."""
    batch = " ".join(f"b{k}!" for k in range(len(index.shape))) if by_frequency else "..."
    return f"{batch} d, {batch or '()'} -> v! d"


def _along(x, dim: int) -> tuple[str, str]:
    """Return the factors of a tensor whose ``dim`` is indexed, and of one with the chosen elements in that dim."""
    dims = [f"d{k}" for k in range(len(x.shape))]
    if not dims:
        return "()", "i"
    chosen = list(dims)
    dims[dim], chosen[dim] = "v!", "i"
    return " ".join(dims), " ".join(chosen)


def index_select(x, dim: int, index) -> str:
    whole, chosen = _along(x, dim)
    return f"{whole}, i -> {chosen}"


def index_add(x, dim: int, index, source, **_) -> str:
    """If the added rows are split, the tensor they are added to must be counted only once."""
    if not source.shape:
        return f"{'v!' if x.shape else '()'}, i!, () -> {'v!' if x.shape else '()'}"
    whole, chosen = _along(x, dim)
    return f"{whole}, i, {chosen} -> {whole}"


def gather_held(x, dim: int, index, held, size: int) -> str:
    whole, chosen = _along(x, dim)
    return f"{whole.replace('!', '')}, {chosen}, v -> {chosen}"


def scatter_held(source, dim: int, index, held, size: int) -> str:
    whole, chosen = _along(source, dim)
    return f"{chosen}, {chosen}, v -> {whole.replace('!', '')}"


def _elements(x, dim: int, index) -> tuple[str, str]:
    """Return the factors of ``x`` and of an index into it.

    If the index is shorter along a dim, that dim stays whole.
    """
    dims, chosen = [], []
    for k, (n, m) in enumerate(zip(x.shape, index.shape, strict=True)):
        along = k == dim % len(x.shape)
        dims.append("v!" if along else f"d{k}" if n == m else f"d{k}!")
        chosen.append("i" if along else f"d{k}" if n == m else f"i{k}!")
    return " ".join(dims) or "()", " ".join(chosen) or "()"


def gather(x, dim: int, index, **_) -> str:
    table, chosen = _elements(x, dim, index)
    return f"{table}, {chosen} -> {chosen}"


def scatter(x, dim: int, index, source) -> str:
    """Later elements overwrite earlier ones, so the indices along ``dim`` stay whole."""
    table, chosen = _elements(x, dim, index)
    if index.shape != source.shape:
        table, chosen = (" ".join(d.rstrip("!") + "!" for d in side.split()) for side in (table, chosen))
        return f"{table}, {chosen}, {' '.join(f's{k}!' for k in range(len(source.shape)))} -> {table}"
    chosen = " ".join(d + "!" * (d == "i") for d in chosen.split())
    return f"{table}, {chosen}, {chosen} -> {table}"


def scatter_add(x, dim: int, index, source) -> str:
    if index.shape != source.shape:
        return scatter(x, dim, index, source)
    table, chosen = _elements(x, dim, index)
    return f"{table}, {chosen}, {chosen} -> {table}"


def scatter_value(x, dim: int, index, value) -> str:
    table, chosen = _elements(x, dim, index)
    return f"{table}, {' '.join(d + '!' * (d == 'i') for d in chosen.split())} -> {table}"


def _index(x, indices) -> tuple[str, str, list[str]]:
    """Return the factors of ``x``, of the index tensors, and the dims of ``x[indices]``.

    The tensors broadcast together.
    """
    indexed = [k for k, index in enumerate(indices) if index is not None]
    ndim = max(len(indices[k].shape) for k in indexed)
    shape = [
        max((i.shape[d] for i in (indices[k] for k in indexed) if len(i.shape) >= -d), default=1)
        for d in range(-ndim, 0)
    ]
    broadcast = [f"i{d}" for d in range(ndim)]
    sides = []
    for index in indices:
        index_shape = () if index is None else index.shape
        lead = ndim - len(index_shape)
        sides.append(
            " ".join("1" if n == 1 != shape[lead + d] else broadcast[lead + d] for d, n in enumerate(index_shape))
            or "()"
        )
    dims = [f"v{k}!" if k in indexed else f"d{k}" for k in range(len(x.shape))]
    left = [d for d in dims if not d.endswith("!")]
    adjacent = indexed == list(range(indexed[0], indexed[-1] + 1))
    place = indexed[0] if adjacent else 0
    return " ".join(dims), ", ".join(sides), left[:place] + broadcast + left[place:]


def index_tensor(x, indices) -> str:
    whole, sides, result = _index(x, indices)
    return f"{whole}, {sides} -> {' '.join(result) or '()'}"


def index_put(x, indices, values, accumulate: bool = False) -> str:
    """Indices can be split if one value is added for each index.

    If values overwrite each other, the indices stay whole.
    """
    if any(index is not None and index.dtype == torch.bool for index in indices):
        return _masked_put(x, indices, values)
    whole, sides, result = _index(x, indices)
    size = {f"d{k}": n for k, n in enumerate(x.shape)}
    lead = len(result) - len(values.shape)
    value_dims = ["1" if n == 1 != size.get(result[lead + k]) else result[lead + k] for k, n in enumerate(values.shape)]
    text = f"{whole}, {sides}, {' '.join(value_dims) or '()'} -> {whole}"
    added = accumulate and all(dim in value_dims for dim in result if dim.startswith("i"))
    return text if added else re.sub(r"\b(i\d+)", r"\1!", text)


def _masked_put(x, indices, values) -> str:
    """The position of each value depends on the whole mask."""
    whole = " ".join(f"v{k}!" for k in range(len(x.shape))) or "()"
    masks = [
        " ".join(f"m{k}x{d}!" for d in range(len(i.shape))) if i is not None else "" for k, i in enumerate(indices)
    ]
    value_dims = " ".join(f"n{k}!" for k in range(len(values.shape))) or "()"
    return f"{whole}, {', '.join(mask or '()' for mask in masks)}, {value_dims} -> {whole}"


def _classes(scores) -> tuple[str, str]:
    """Return the factors of scores and targets: classes alone, a batch of them, or a batch with positions."""
    places = " ".join(f"d{k}" for k in range(len(scores.shape) - 2))
    return ("c!", "()") if len(scores.shape) == 1 else (f"b c! {places}", f"b {places}")


def nll_loss(scores, target, weight, reduction: int, *_) -> str:
    scored, targets = _classes(scores)
    return f"{scored}, {targets}, c! -> {targets if reduction == NONE else '()'}, ()"


def nll_loss_backward(gradient, scores, target, weight, reduction: int, *_) -> str:
    scored, targets = _classes(scores)
    return f"{targets if reduction == NONE else '()'}, {scored}, {targets}, c!, () -> {scored}"


def multilabel_margin_loss_backward(gradient, x, *_) -> str:
    """A row of scores and a row of targets; the gradient is a number, or one for each row."""
    side = ["()", "c!", "n c!"][len(x.shape)]
    return f"{'n' if gradient.shape else '()'}, {side}, {side}, {side} -> {side}"


def multi_margin_loss_backward(gradient, x, target, *_) -> str:
    """A row of scores and one target."""
    side, target = ("n c!", "n") if len(x.shape) == 2 else ("c!" if x.shape else "()", "1" if target.shape else "()")
    return f"{'n' if gradient.shape else '()'}, {side}, {target}, c! -> {side}"
