"""Find the function object of a frame or of a code object, to read its closure and its defaults."""

from __future__ import annotations

import gc
import types
from collections.abc import Collection
from typing import Any


def function_of(frame: types.FrameType) -> types.FunctionType | None:
    """Return the function that runs in a frame.

    It is looked up by name, in its Python module or as a method of its first argument.
    """
    code = frame.f_code
    if any(name != "__class__" for name in code.co_freevars):  # several functions may share this code
        return None
    path = getattr(code, "co_qualname", code.co_name).split(".")  # a path from Python 3.11 on
    value: Any = frame.f_globals.get(path[0])
    for name in path[1:]:
        value = vars(value).get(name) if isinstance(value, type) else None
    if (function := _function(value, code)) is not None or not code.co_argcount:
        return function
    first = frame.f_locals.get(code.co_varnames[0])
    for base in (first if isinstance(first, type) else type(first)).__mro__:
        if (function := _function(vars(base).get(code.co_name), code)) is not None:
            return function
    return None


def _function(value: Any, code: types.CodeType) -> types.FunctionType | None:
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    return value if isinstance(value, types.FunctionType) and value.__code__ is code else None


def functions_of(codes: Collection[types.CodeType]) -> list[types.FunctionType]:
    """Return all functions that exist of these code objects. This takes tens of milliseconds."""
    return [function for function in gc.get_referrers(*codes) if isinstance(function, types.FunctionType)]
