"""Discovery: the rule of one call of an op that has none, found by running the op on small pieces.

Guesses (``guesses``) are proven as registered rules are; what does not hold stays whole. Nothing is found for an op
that writes, draws random numbers, gives another result the second time, or does not run on the CPU in double precision. All of
it happens in a sandbox: an op that ends its process there has no rule, and what it keeps is not kept here.

What is found holds on the calls that were tried. An op that behaves in another way where sizes or values are beyond those is
not seen through: a registered rule is sure, and ``strict=True`` takes nothing else. All processes find the same.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autopar.errors import RuleError
from autopar.ir.record import TensorType
from autopar.rules.binding import bind, slots
from autopar.rules.registry import Rule
from autopar.rules.unknown import Finding, discover_with
from autopar.runtime.discovery.guesses import NothingError, Search, raised
from autopar.runtime.discovery.sandbox import CrashError, SandboxError, isolated
from autopar.runtime.discovery.scaled import scales
from autopar.torch_private import OpOverload, is_seeded, mutates, without_modes

Found = tuple[str, str, str]  # a pattern and what is linear; or why there is none

_FOUND: dict[Any, Found] = {}


@discover_with
def discover(rule: Rule, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[TensorType | None]) -> Finding:
    """The rule of one call, tensors given as their types. Calls that are alike when they are made small share it.

    Args:
        rule: that of the op, which says nothing yet.
    """
    why = _refused(op, slots(op, args, kwargs), results)
    if why:
        return Finding(None, why)
    ways = scales(args, kwargs)
    if not ways:
        return Finding(None, "its operands are too large to be tried")
    sizes = ways[0].sizes
    there = tuple(r and tuple(("as", sizes[n]) if n in sizes else n for n in r.shape) for r in results)
    key = (op, there, repr([way(args, kwargs) for way in ways]))
    if key not in _FOUND:
        _FOUND[key] = _found(Search(rule, op, args, kwargs, results))
    pattern, linear, why = _FOUND[key]
    if why:
        return Finding(None, why)
    found = replace(rule, pattern=pattern, linear=linear, empty=False)
    try:
        bind(op, args, kwargs, results, found)
    except RuleError as error:
        return Finding(None, str(error))
    return Finding(found)


def _refused(op: OpOverload, given: Sequence[Any], results: Sequence[TensorType | None]) -> str:
    """Why an op is not run at all."""
    shapes = [value.shape for value in (*given, *results) if isinstance(value, TensorType)]
    if mutates(op):
        return "it writes to its arguments"
    if is_seeded(op):
        return "it draws random numbers"
    if not any(isinstance(value, TensorType) and value.shape for value in given):
        return "it has no operand with dims"
    return "a tensor is empty" if any(0 in shape for shape in shapes) else ""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What is run inside is seen by no trace: no warnings, no gradients."""
    with warnings.catch_warnings(), without_modes(), torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        warnings.simplefilter("ignore")
        yield


def _found(search: Search) -> Found:
    """What a search finds, in a sandbox; where an op does not survive pieces that do not fit together, without such."""
    for search.together in (False, True):
        try:
            return isolated(lambda: _searched(search))
        except CrashError as error:
            why = str(error)
        except SandboxError as error:
            return "", "", str(error)
    return "", "", why


def _searched(search: Search) -> Found:
    try:
        with _quiet():
            rule = search.run()
        return str(rule.pattern), str(rule.linear), ""
    except NothingError as reason:
        return "", "", str(reason)
    except Exception as error:  # whatever an op raises on operands of other values
        return "", "", raised(error)
