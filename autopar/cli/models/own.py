"""Make the user's own model: by a function that returns it, alone or with the arguments of a call, or by its class."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch

from autopar.cli.models.files import called, function_of
from autopar.cli.models.raised import raised
from autopar.cli.train.refused import Refused
from autopar.errors import class_of
from autopar.ir.structure import flatten

RETURNS = (
    "it must return a model, or a pair, return model, (x,), of a model and the arguments of one call; a class of a "
    "module does, too"
)
ARGUMENTS = "it must return the arguments of one call: a tuple, a dict of keywords, or both as a pair"


def own_model(name: str, example: str | None, values: bool) -> tuple[torch.nn.Module, Any, tuple[str, ...]]:
    """Return what a function of the user's makes: a model, the arguments of one call or ``None``, and remarks.

    Both are on meta, where tensors take no memory, unless the functions read values of tensors or name a device.

    Args:
        name: of the function, or of a class of modules without required arguments: ``FILE.py:NAME``.
        example: of a function that makes the arguments.
        values: whether the tensors have values, so that the model can run.

    Raises:
        Refused: there is no such file or function, or a function returns something else.
    """
    make = function_of(name, RETURNS)
    arguments = None if example is None else function_of(example, ARGUMENTS)
    if values:
        return *_made(name, make, example, arguments), ()
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter")  # of weights that are loaded
            made = _made(name, make, example, arguments)
        if _is_on_meta(made):
            return *made, ()
        why = "it names a device"
    except Refused as error:  # it may need values: then it is made with them, and what it raises then is said
        why = str(error) if error.__cause__ is None else raised(error.__cause__)
    return *_made(name, make, example, arguments), (f"the model has its values, which take memory: on meta, {why}",)


def _made(
    name: str, make: Callable[[], Any], example: str | None, arguments: Callable[[], Any] | None
) -> tuple[torch.nn.Module, Any]:
    model, own = called(name, make), None
    if isinstance(model, tuple) and len(model) == 2 and isinstance(model[0], torch.nn.Module):
        model, own = model
        if not isinstance(own, (tuple, dict)):
            raise Refused(f"{name} returns a model and {class_of(own)}; {RETURNS}")
    if not isinstance(model, torch.nn.Module):
        raise Refused(f"{name} returns {class_of(model)}; {RETURNS}")
    if example is not None and arguments is not None:
        own = called(example, arguments)
        if not isinstance(own, (tuple, dict)):
            raise Refused(f"--example {example} returns {class_of(own)}; {ARGUMENTS}")
    return model, own


def _is_on_meta(made: tuple[torch.nn.Module, Any]) -> bool:
    """Return whether all tensors are: a model on meta cannot be called with others."""
    leaves = [leaf for leaf in flatten(made[1])[0] if isinstance(leaf, torch.Tensor)]
    return all(tensor.is_meta for tensor in (*made[0].parameters(), *made[0].buffers(), *leaves))


def takes(model: torch.nn.Module) -> list[str]:
    """Return the names of the arguments that forward takes."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [name for name, p in inspect.signature(model.forward).parameters.items() if p.kind not in kinds]
