"""Flatten the arguments of a call, name them after the parameters of ``forward``, and compute the key of a capture."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autopar.capture.model_state import ModelState
from autopar.errors import CaptureError, class_of
from autopar.ir.dense import require_dense
from autopar.ir.program import Program
from autopar.ir.structure import Structure, flatten_with_path, unflatten
from autopar.torch_private import DisableTorchFunctionSubclass


@dataclass
class Arguments:
    """The tensors of one call with their names, and what is needed to rebuild the call.

    Attributes:
        passed: the names of the arguments.
        names: the name of each tensor.
        tensors: the tensors among the arguments, in order.
        spec: the structure of ``(args, kwargs)``.
        flat: all leaves of that structure.
        whole: whether the tensors have the size of the whole batch, although each rank brings a piece of it.
    """

    passed: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    spec: Structure = field(default_factory=Structure)
    flat: list[Any] = field(default_factory=list)
    whole: bool = False

    def with_leaves(self, leaves: Sequence[Any]) -> Arguments:
        """Return the same call with other leaves: tensors for tensors, constants for constants."""
        return replace(self, flat=list(leaves), tensors=[leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])

    def keyword(self, name: str) -> Any:
        """Return the argument that the call passes by this keyword; ``None`` if there is none."""
        place = self._place_of(name)
        return None if place is None else unflatten(self.flat[place], self.spec.parts[1].parts[self._position_of(name)])

    def with_keyword(self, name: str, tensor: torch.Tensor) -> Arguments:
        """Return the same call with a tensor as the argument of this keyword."""
        place, k = self._place_of(name), self._position_of(name)
        assert place is not None
        positional, keywords = self.spec.parts
        spec = replace(
            self.spec,
            parts=(positional, replace(keywords, parts=(*keywords.parts[:k], Structure(), *keywords.parts[k + 1 :]))),
        )
        before, after = _tensors(self.flat[: place.start]), _tensors(self.flat[: place.stop])
        names = [*self.names[:before], name, *self.names[after:]]
        return replace(self, spec=spec, names=names).with_leaves(
            [*self.flat[: place.start], tensor, *self.flat[place.stop :]]
        )

    def _position_of(self, keyword: str) -> int:
        return self.spec.parts[1].keys.index(keyword)

    def _place_of(self, keyword: str) -> slice | None:
        """Return the positions of a keyword's leaves among all leaves."""
        positional, keywords = self.spec.parts
        if keyword not in keywords.keys:
            return None
        k = self._position_of(keyword)
        start = sum(_leaves(part) for part in (positional, *keywords.parts[:k]))
        return slice(start, start + _leaves(keywords.parts[k]))


def _leaves(structure: Structure) -> int:
    return sum(1 for _ in structure.paths())


def _tensors(leaves: Sequence[Any]) -> int:
    return sum(isinstance(leaf, torch.Tensor) for leaf in leaves)


def bind_arguments(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """Flatten a call, and name each tensor after its parameter in the signature of ``forward``."""
    arguments = Arguments()
    paths, arguments.spec = flatten_with_path((tuple(args), dict(kwargs)))
    forward = model.forward
    signature = _parameters_of(forward.__func__, True) if inspect.ismethod(forward) else _parameters_of(forward, False)
    arguments.passed = [*(_argument_name(("0", str(k)), signature) for k in range(len(args))), *kwargs]
    for path, value in paths:
        arguments.flat.append(value)
        if isinstance(value, torch.Tensor):
            require_dense([(f"argument {_argument_name(path, signature)}", value)])
            arguments.names.append(_argument_name(path, signature))
            arguments.tensors.append(value)
        elif not isinstance(value, (bool, int, float, str, type(None), torch.dtype, torch.device)):
            raise CaptureError(
                f"argument {_argument_name(path, signature)} is {class_of(value)}, which capture cannot look "
                f"into; pass tensors, numbers, strings, or containers and dataclasses of them"
            )
    return arguments


@functools.lru_cache(maxsize=256)
def _parameters_of(forward: Callable[..., Any], bound: bool) -> tuple[str, ...]:
    """Return the names of a forward's parameters, without the first if ``bound``.

    Cached, because reading a signature takes 0.1 ms.
    """
    try:
        return tuple(inspect.signature(types.MethodType(forward, ()) if bound else forward).parameters)
    except (TypeError, ValueError):
        return ()


def _argument_name(path: Sequence[str], signature: Sequence[str]) -> str:
    side, *keys = path
    if side == "0" and keys and int(keys[0]) < len(signature):
        keys[0] = signature[int(keys[0])]
    return "_".join(keys)


Facts = tuple[tuple[int, ...], torch.dtype, torch.device, bool]  # shape, dtype, device, requires_grad


@dataclass(frozen=True)
class Signature:
    """The key of a capture: two calls with equal signatures have the same captured step.

    Attributes:
        spec: the structure of the arguments.
        tensors: shape, dtype, device and ``requires_grad`` of each tensor argument.
        constants: the other arguments, with their types (1, 1.0 and True are equal in Python).
        state: for each parameter and buffer its name, its facts, and the first name of the same tensor.
        training: the training flag of each module, once for each of its names.
        modes: whether gradients are on, the deterministic mode (0: off, 1: warn, 2: raise), the default dtype, and the
            autocast state.
        names: the names of the tensor arguments, for messages.
    """

    spec: Structure
    tensors: tuple[Facts, ...]
    constants: tuple[tuple[type, str], ...]
    state: tuple[tuple[str, Facts, str], ...]
    training: tuple[bool, ...]
    modes: tuple[Any, ...]
    names: tuple[str, ...] = field(default=(), compare=False)


def signature_of(state: ModelState, arguments: Arguments) -> Signature:
    named = [*state.all_parameters, *state.all_buffers]
    first: dict[int, str] = {}
    for name, tensor in named:
        first.setdefault(id(tensor), name)
    with DisableTorchFunctionSubclass():
        facts = tuple((name, _facts(tensor), first[id(tensor)]) for name, tensor in named)
    return Signature(
        arguments.spec,
        tuple(map(_facts, arguments.tensors)),
        tuple((type(v), repr(v)) for v in arguments.flat if not isinstance(v, torch.Tensor)),
        facts,
        tuple(state.training),
        (
            torch.is_grad_enabled(),
            torch.get_deterministic_debug_mode(),
            torch.get_default_dtype(),
            *((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")),
        ),
        tuple(arguments.names),
    )


def _facts(tensor: torch.Tensor) -> Facts:
    return tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad


def difference(before: Signature, now: Signature) -> str:
    """Describe what has changed between two signatures: ``x is float32[6, 8], it was float32[4, 8]``."""
    if before.spec != now.spec or len(before.tensors) != len(now.tensors):
        return "the arguments have another structure"
    changes = [
        f"{name} is {_facts_text(b)}, it was {_facts_text(a)}"
        for name, a, b in zip(now.names, before.tensors, now.tensors, strict=True)
        if a != b
    ]
    changes += [
        f"a constant is {b}, it was {a}"
        for (_, a), (_, b) in zip(before.constants, now.constants, strict=True)
        if a != b
    ]
    old = {name: facts for name, facts, _ in before.state}
    changes += [
        f"{name} is {_facts_text(facts)}, it was {_facts_text(old[name])}"
        for name, facts, _ in now.state
        if old.get(name, facts) != facts
    ]
    return ", ".join(changes) or "the parameters or buffers are others"


def _facts_text(facts: Facts) -> str:
    shape, dtype, device, requires_grad = facts
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}" + " with gradients" * requires_grad


# -- at sizes ----------------------------------------------------------------------------------------------------------
#
# Capture a call again with inputs of other sizes.


@dataclass(frozen=True, eq=False)
class AtSizes:
    """A call without the values of its tensors, to be captured at other sizes.

    Attributes:
        arguments: the arguments; tensors are on meta.
        trace: captures a call.
        grad: whether gradients were on.
    """

    arguments: Arguments
    trace: Callable[[Arguments], Program]
    grad: bool

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Input → shape."""
        return {
            name: tuple(tensor.shape) for name, tensor in zip(self.arguments.names, self.arguments.tensors, strict=True)
        }

    @property
    def integers(self) -> frozenset[str]:
        """The inputs with integers."""
        named = zip(self.arguments.names, self.arguments.tensors, strict=True)
        return frozenset(name for name, tensor in named if not tensor.is_floating_point() and not tensor.is_complex())

    def __call__(self, shapes: Mapping[str, Sequence[int]]) -> Program:
        """Return the traced program of the call with inputs of these shapes."""
        names = iter(self.arguments.names)
        leaves = [
            _like(leaf, shapes[next(names)]) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.arguments.flat
        ]
        with torch.set_grad_enabled(self.grad):
            return self.trace(self.arguments.with_leaves(leaves))


def at_sizes(arguments: Arguments, trace: Callable[[Arguments], Program]) -> AtSizes:
    """Return the call without the values of its tensors."""
    leaves = [_like(leaf, leaf.shape) if isinstance(leaf, torch.Tensor) else leaf for leaf in arguments.flat]
    return AtSizes(arguments.with_leaves(leaves), trace, torch.is_grad_enabled())


def _like(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    empty = torch.empty(tuple(shape), dtype=tensor.dtype, device="meta")
    return empty.requires_grad_(tensor.requires_grad)
