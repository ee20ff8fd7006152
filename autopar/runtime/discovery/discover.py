"""Discover the rule of one call of an op without a rule, by running the op on small pieces.

Guesses (``guesses``) are proven as registered rules are; a dim whose guess fails stays whole. No rule is discovered for
an op that writes, draws random numbers, returns another result the second time, or does not run on the CPU in double
precision. The ops run in a sandbox, so an op that ends its process only has no rule, and changes nothing in this
process.

A discovered rule holds on the calls that were tried, with an infinity, a NaN, a huge number and all zeros among them.
It may be wrong for an op that behaves differently for other sizes or values, and claims no linear operand. A registered
rule is certain, and ``strict=True`` accepts nothing else. All processes discover the same rules.
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
from autopar.report.progress import doing
from autopar.rules.binding import bind, slots
from autopar.rules.registry import Rule
from autopar.rules.unknown import Finding, discover_with
from autopar.runtime.discovery.guesses import NothingError, Search, raised
from autopar.runtime.discovery.sandbox import CrashError, SandboxError, isolated
from autopar.runtime.discovery.scaled import scales
from autopar.torch_private import OpOverload, is_seeded, mutates, without_modes

Outcome = tuple[str, str]  # the pattern, "" — or "", the reason why there is no rule

_OUTCOMES: dict[Any, Outcome] = {}


@discover_with
def discover(
    rule: Rule, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[TensorType | None]
) -> Finding:
    """Discover the rule of one call. Calls that become equal when they are scaled down share the result.

    Args:
        rule: the op's rule without a pattern.
        args, kwargs: the arguments, with a type in the place of each tensor.
        results: the types of the results.
    """
    why = _refused(op, slots(op, args, kwargs), results)
    if why:
        return Finding(None, why)
    candidates = scales(args, kwargs)
    if not candidates:
        return Finding(None, "its operands are too large to be tried")
    sizes = candidates[0].sizes
    result_shapes = tuple(r and tuple(("as", sizes[n]) if n in sizes else n for n in r.shape) for r in results)
    key = (op, result_shapes, repr([scale(args, kwargs) for scale in candidates]))
    if key not in _OUTCOMES:
        with doing(f"proof of {rule.op}"):
            _OUTCOMES[key] = _search_in_sandbox(Search(rule, op, args, kwargs, results))
    pattern, why = _OUTCOMES[key]
    if why:
        return Finding(None, why)
    discovered = replace(rule, pattern=pattern, empty=False)
    try:
        bind(op, args, kwargs, results, discovered)
    except RuleError as error:
        return Finding(None, str(error))
    return Finding(discovered)


def _refused(op: OpOverload, arguments: Sequence[Any], results: Sequence[TensorType | None]) -> str:
    """Return why an op must not be run; empty if it may."""
    shapes = [value.shape for value in (*arguments, *results) if isinstance(value, TensorType)]
    if mutates(op):
        return "it writes to its arguments"
    if is_seeded(op):
        return "it draws random numbers"
    if not any(isinstance(value, TensorType) and value.shape for value in arguments):
        return "it has no operand with dims"
    return "a tensor is empty" if any(0 in shape for shape in shapes) else ""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Run the block outside of any trace, without warnings and without gradients."""
    with (
        warnings.catch_warnings(),
        without_modes(),
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        warnings.simplefilter("ignore")
        yield


def _search_in_sandbox(search: Search) -> Outcome:
    """Run a search in a sandbox.

    If the op crashes on pieces that do not fit together, search again without such pieces.
    """
    for search.together in (False, True):
        try:
            return isolated(lambda: _outcome(search))
        except CrashError as error:
            why = str(error)
        except SandboxError as error:
            return "", str(error)
    return "", why


def _outcome(search: Search) -> Outcome:
    try:
        with _quiet():
            rule = search.run()
        return str(rule.pattern), ""
    except NothingError as reason:
        return "", str(reason)
    except Exception as error:  # an op may raise anything on other operands
        return "", raised(error)
