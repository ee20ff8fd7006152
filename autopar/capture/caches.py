"""Empty the ``functools.lru_cache`` caches that forward fills while it is traced.

A cache that is filled in a trace holds fake tensors, and the next call of the model would read them.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch

CACHE = type(functools.lru_cache(lambda: None))


@contextlib.contextmanager
def caches_forgotten(model: torch.nn.Module) -> Iterator[None]:
    """Empty each cache that the ``with`` block adds to; see ``_caches`` for those that are watched."""
    before = {cache: cache.cache_info().misses for cache in _caches(model)}
    try:
        yield
    finally:
        for cache, misses in before.items():
            if cache.cache_info().misses != misses:
                cache.cache_clear()


def _caches(model: torch.nn.Module) -> list[Any]:
    """Return the caches in the model's classes, in the files of these, and behind their functions' decorators."""
    kinds = {base for module in model.modules() for base in type(module).__mro__}
    kinds = {kind for kind in kinds if kind.__module__.partition(".")[0] not in ("torch", "builtins")}
    files = [vars(sys.modules[name]) for name in {kind.__module__ for kind in kinds} if name in sys.modules]
    caches: dict[int, Any] = {}
    for names in (*files, *(vars(kind) for kind in kinds)):
        for value in list(names.values()):
            value = getattr(value, "__func__", value) if isinstance(value, (staticmethod, classmethod)) else value
            if isinstance(value, CACHE):
                caches[id(value)] = value
            for cell in getattr(value, "__closure__", None) or () if type(value) is FUNCTION else ():
                with contextlib.suppress(ValueError):  # an empty cell
                    if isinstance(cell.cell_contents, CACHE):
                        caches[id(cell.cell_contents)] = cell.cell_contents
    return list(caches.values())


FUNCTION = type(_caches)
