"""Check that an op's overload takes tensors where its arguments are values.

``mul`` takes numbers, ``mul.Tensor`` tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from autopar.ir.text.printer import target_name
from autopar.torch_private import OpOverload, mutates, tensor_arguments


def misplaced(op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the arguments, and which overloads take them; ``None`` if all is right."""
    places = [place for place, value in (*enumerate(args), *kwargs.items()) if _has_value(value)]
    wrong = [place for place in places if place not in _takes_tensors(op)]
    if not wrong:
        return None
    packet = op.overloadpacket
    others = [getattr(packet, name) for name in packet.overloads()]
    fitting = [target_name(other) for other in others if set(places) <= _takes_tensors(other) and not mutates(other)]
    remedy = f"; an overload of it that does is {' or '.join(fitting)}" if fitting else ""
    return f"{target_name(op)} takes no tensor as its argument {wrong[0]}{remedy}"


def _takes_tensors(op: OpOverload) -> set[int | str]:
    return {place for position, name, _ in tensor_arguments(op) for place in (position, name)}


def _has_value(argument: object) -> bool:
    if isinstance(argument, (list, tuple)):
        return any(map(_has_value, argument))
    return isinstance(argument, fx.Node)
