"""Look-ups along one dim of a tensor, and their reverse. The dim that is indexed stays whole."""

from __future__ import annotations

from autopar.rules.registry import rule

rule("v! d, ... -> ... d", "embedding", linear="0")
rule("... d, ... -> v! d", "embedding_dense_backward", linear="0", sizes={2: 0})


def _along(x, dim: int) -> tuple[str, str]:
    """The factors of a tensor whose ``dim`` is indexed, and of one with the chosen elements there."""
    dims = [f"d{k}" for k in range(len(x.shape))]
    if not dims:
        return "()", "i"
    chosen = list(dims)
    dims[dim], chosen[dim] = "v!", "i"
    return " ".join(dims), " ".join(chosen)


def _index_select(x, dim: int, index) -> str:
    whole, chosen = _along(x, dim)
    return f"{whole}, i -> {chosen}"


def _index_add(x, dim: int, index, source, **_) -> str:
    """Where the added rows are split, the tensor they are added to may be counted only once."""
    whole, chosen = _along(x, dim)
    return f"{whole}, i, {chosen} -> {whole}"


rule(_index_select, "index_select", linear="0")
rule(_index_add, "index_add", linear="0+2")


def _elements(x, dim: int, index) -> tuple[str, str]:
    """The factors of ``x`` and of an index into it: a dim where the index is shorter is cut off, so it stays whole."""
    dims, chosen = [], []
    for k, (n, m) in enumerate(zip(x.shape, index.shape, strict=True)):
        along = k == dim % len(x.shape)
        dims.append("v!" if along else f"d{k}" if n == m else f"d{k}!")
        chosen.append("i" if along else f"d{k}" if n == m else f"i{k}!")
    return " ".join(dims) or "()", " ".join(chosen) or "()"


def _gather(x, dim: int, index, **_) -> str:
    table, chosen = _elements(x, dim, index)
    return f"{table}, {chosen} -> {chosen}"


def _scatter(x, dim: int, index, source) -> str:
    """Later elements overwrite earlier ones, so the indices along ``dim`` stay together."""
    table, chosen = _elements(x, dim, index)
    if index.shape != source.shape:
        table, chosen = (" ".join(d.rstrip("!") + "!" for d in side.split()) for side in (table, chosen))
        return f"{table}, {chosen}, {chosen.replace('i', 's').replace('d', 's')} -> {table}"
    chosen = " ".join(d + "!" * (d == "i") for d in chosen.split())
    return f"{table}, {chosen}, {chosen} -> {table}"


def _scatter_add(x, dim: int, index, source) -> str:
    if index.shape != source.shape:
        return _scatter(x, dim, index, source)
    table, chosen = _elements(x, dim, index)
    return f"{table}, {chosen}, {chosen} -> {table}"


def _scatter_value(x, dim: int, index, value) -> str:
    table, chosen = _elements(x, dim, index)
    return f"{table}, {' '.join(d + '!' * (d == 'i') for d in chosen.split())} -> {table}"


rule(_gather, "gather", linear="0")
rule(_scatter_value, "scatter.value")
rule(_scatter, "scatter.src", linear="0+2")
rule(_scatter_add, "scatter_add", linear="0+2")
