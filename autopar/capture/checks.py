"""Detect what Python does in a forward besides tensor ops; note it or refuse it, because a step does not repeat it."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from autopar.capture.guards import Reads
from autopar.capture.guards.unrepeated import Unrepeated
from autopar.capture.provenance import user_line
from autopar.errors import CaptureError
from autopar.ir.ops.sharded_lookup import within
from autopar.torch_private import conversions_replaced, value_checks_replaced


class PythonEffects:
    """Watches a forward for value checks and for random numbers that are not tensors.

    Attributes:
        unchecked: the user's lines that only check the values of tensors.
        drawn: names of the Python or NumPy generators that forward draws from.
        unrepeated: what a captured step does not repeat.
    """

    def __init__(self) -> None:
        self.unchecked: list[str] = []
        self.drawn: list[str] = []
        self.unrepeated: list[Unrepeated] = []

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        before = _generators()
        with value_checks_replaced(lambda: self.unchecked.append(user_line())):
            yield
        self.drawn = [name for name, state in _generators().items() if state != before[name]]

    def refuse(self, reads: Reads, changed: Mapping[str, str], keep: bool) -> None:
        """Refuse what a captured step does not repeat, or note it where the first values are to be kept.

        Args:
            changed: what forward reads and changes: in words → the name alone.

        Raises:
            CaptureError: forward draws in Python, advances an iterator, reads a clock, or reads what it changes.
        """
        found = [Unrepeated.drawn(name, reads.line_of("random")) for name in self.drawn]
        found += [Unrepeated.changed(words, reads.line_of(name)) for words, name in changed.items()]
        self.unrepeated = [*found, *reads.watch.found()]
        if self.unrepeated and not keep:
            raise CaptureError(str(self.unrepeated[0]))

    def notes(self) -> list[str]:
        checks = [
            f"this line checks values of tensors, and the captured step leaves the check out\n    {line}"
            for line in dict.fromkeys(self.unchecked)
        ]
        return checks + [
            f"forward {each.does}; the captured step keeps the value of the first call\n    {each.line}"
            for each in self.unrepeated
        ]


class ClassesChecked(TorchFunctionMode):
    """Adds an op that checks the classes to the graph: ``one_hot`` cannot check those of a fake tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.one_hot:
            named = dict(zip(("tensor", "num_classes"), args, strict=False)) | kwargs
            if (count := named.get("num_classes", -1)) > 0:
                args, kwargs = (within(named["tensor"], count), count), {}
        return func(*args, **kwargs)


@contextlib.contextmanager
def assignments_refused() -> Iterator[None]:
    """Refuse ``x.data = y``: it is no op, so the captured step would leave it out."""
    kind: Any = torch.Tensor  # Any, because its property is replaced
    data, own_data = kind.data, vars(kind).get("data")  # one capture may run inside another

    def refuse(self: torch.Tensor, value: torch.Tensor) -> None:
        raise CaptureError(
            f"forward assigns to .data, which a captured step does not do again\n    {user_line()}\n"
            f"  give the value another name; a buffer's next value is assigned to the buffer itself, or copied into "
            f"it with copy_()"
        )

    kind.data = property(data.__get__, refuse)
    try:
        yield
    finally:
        if own_data is None:
            del kind.data  # restores the property of the base class
        else:
            kind.data = own_data


@contextlib.contextmanager
def conversions_refused() -> Iterator[None]:
    """Refuse ``module.to(dtype)`` in forward, where it changes a parameter; where it changes nothing, do nothing."""

    def refuse(module: torch.nn.Module) -> None:
        raise CaptureError(
            f"forward converts the parameters of a module ({type(module).__name__}), which a captured step does not do "
            f"again\n    {user_line()}\n  convert the module before the call"
        )

    with conversions_replaced(refuse):
        yield


COMPUTED_BEFORE: dict[str, tuple[str, str]] = {  # module of a hook's class → what registers it, and what to use instead
    "torch.nn.utils.weight_norm": (
        "torch.nn.utils.weight_norm",
        "use torch.nn.utils.parametrizations.weight_norm, which computes the same",
    ),
    "torch.nn.utils.spectral_norm": (
        "torch.nn.utils.spectral_norm",
        "use torch.nn.utils.parametrizations.spectral_norm, which computes the same",
    ),
    "torch.nn.utils.prune": (
        "torch.nn.utils.prune",
        "end it with torch.nn.utils.prune.remove(module, {name!r}), or multiply by the mask in a parametrization",
    ),
}


@contextlib.contextmanager
def hooked_weights_refused(paths: Mapping[int, str]) -> Iterator[None]:
    """Refuse torch's hooks that put a computed tensor into a module before each forward.

    ``paths``: id of a module → its path.
    """

    def check(module: torch.nn.Module, args: Any) -> None:
        for hook in module._forward_pre_hooks.values():
            kind = next((base.__module__ for base in type(hook).__mro__ if base.__module__ in COMPUTED_BEFORE), None)
            if kind is not None:
                registered, remedy = COMPUTED_BEFORE[kind]
                name = getattr(hook, "name", None) or getattr(hook, "_tensor_name", "weight")
                where = f"{paths.get(id(module), '')}.{name}".lstrip(".")
                raise CaptureError(
                    f"a hook of {registered} puts a computed tensor into {where} before each forward, which a "
                    f"captured step cannot do\n"
                    f"    {user_line()}\n"
                    f"  {remedy.format(name=name)}"
                )

    handle = torch.nn.modules.module.register_module_forward_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()


def _generators() -> dict[str, Any]:
    """Return the state of Python's own generator, and of NumPy's if it has been imported."""
    states: dict[str, Any] = {"random": random.getstate(), "numpy.random": None}
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy.random"] = (name, keys.tobytes(), *rest)
    return states
