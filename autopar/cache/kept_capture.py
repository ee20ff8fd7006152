"""Write what a capture leaves behind once its program is placed: the structure of its outputs, and its random draws."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autopar.cache.addresses import class_address, resolve
from autopar.cache.folder import NotCached
from autopar.cache.program_rows import Types, op_name, op_of, plain, program_of, rows_of, size_of, size_row, written
from autopar.cache.records import Leaf, Records, given
from autopar.capture import Captured
from autopar.capture.guards import Guards
from autopar.capture.symbolic.captured import SymbolicCapture
from autopar.capture.symbolic.validity import SIGNS, SizeGuard, Validity, condition_text
from autopar.ir.ops.seeded_random import Like
from autopar.ir.program import Program
from autopar.ir.sizes import Values, expression_of, expression_text, read_size, symbol
from autopar.ir.structure import FIXED, Structure
from autopar.torch_private import OpOverload, pytree

# -- kept symbols ------------------------------------------------------------------------------------------------------
#
# Write a capture with symbols for sizes, and read it back: its program, and the sizes that it serves.
#
# An entry of the cache is for the sizes of its key. What it has with symbols serves other sizes, as in the process that
# has captured it: those that its patterns of shapes and its conditions allow.


KINDS = {sign: kind for kind, sign in SIGNS}


def symbols_to_json(captured: Captured) -> Any:
    """Return the capture with symbols that a capture was made of; ``None`` if there is none.

    Raises:
        NotCached: a part of it has no form that another process could read.
    """
    symbolic = captured.symbolic
    if symbolic is None:
        return None
    types, validity = Types(), symbolic.validity
    program = rows_of(symbolic.captured.program, types)
    return {
        "captured": captured_to_json(symbolic.captured),
        "program": program,
        "types": types.to_json(),
        "values": [[str(each), value] for each, value in validity.values.items()],
        "shapes": [[name, list(map(size_row, shape))] for name, shape in validity.shapes.items()],
        "guards": [[*_condition_row(guard.condition, validity.values), guard.source] for guard in validity.guards],
        "fixed": [[name, d, guard.text, guard.source] for (name, d), guard in validity.fixed.items()],
    }


def symbols_of(content: Any, guards: Guards) -> SymbolicCapture | None:
    """Return the capture with symbols. What is malformed raises an error of any kind."""
    if content is None:
        return None
    program = program_of(content["program"], Types.of(content["types"]))
    values = {symbol(name): value for name, value in content["values"]}
    conditions = [(_condition(row, values), source) for *row, source in content["guards"]]
    validity = Validity(
        {name: tuple(map(size_of, shape)) for name, shape in content["shapes"]},
        tuple(SizeGuard(condition_text(condition), source, condition) for condition, source in conditions),
        {(name, d): SizeGuard(text, source) for name, d, text, source in content["fixed"]},
    )
    if dict(validity.values) != values:
        raise ValueError("the shapes have other symbols than the capture")
    return SymbolicCapture(captured_of(content["captured"], program, guards), validity, uses=1)


def _condition_row(condition: Any, values: Values) -> list[str]:
    for kind, sign in SIGNS:
        if isinstance(condition, kind):
            row = [sign, *map(expression_text, condition.args)]
            if _condition(row, values) == condition:
                return row
    raise NotCached(f"the condition on sizes {condition_text(condition)} has no form that is read back alike")


def _condition(row: Any, values: Mapping[Any, int]) -> Any:
    sign, left, right = row
    return KINDS[sign](*(expression_of(read_size(text, values)) for text in (left, right)))


# -- kept capture ------------------------------------------------------------------------------------------------------


LEAVES = (bool, int, float, str, type(None))  # the outputs that are no tensors


def captured_to_json(captured: Captured) -> list[Any]:
    """Return a capture as JSON, without its program, its guards and its symbols.

    Raises:
        NotCached: a part of it has no form that another process could read.
    """
    if captured.numbers:
        raise NotCached("a float of the model is an input of the program")
    for value in captured.leaves.values():
        if type(value) not in LEAVES:
            raise NotCached(f"the model returns a {type(value).__qualname__}")
    own = replace(captured, at_sizes=None, symbolic=None, values={})
    row: list[Any] = Records(_forms(None, None)).written(own, Captured)
    return row


def captured_of(row: Sequence[Any], program: Program, guards: Guards) -> Captured:
    """Return the capture. What is malformed raises an error of any kind.

    Args:
        program: a program in the place of the traced one, which is not kept.
    """
    captured: Captured = Records(_forms(program, guards)).read(row, Captured)
    return captured


def _forms(program: Program | None, guards: Guards | None) -> dict[Any, Leaf]:
    return {
        Program: given(program),
        Guards: given(guards),
        Structure: Leaf(_structure, _structure_of),
        torch.device: Leaf(str, torch.device),
        OpOverload: Leaf(op_name, op_of),
        Any: Leaf(_like, _unlike),
    }


def _like(value: Any) -> Any:
    if isinstance(value, Like):
        return {"shape": list(map(size_row, value.shape)), "dtype": written(value.dtype)}
    if isinstance(value, (list, tuple)):
        return ["l" if isinstance(value, list) else "t", *map(_like, value)]
    if isinstance(value, dict):
        return ["m", [[key, _like(part)] for key, part in value.items()]]
    return written(value)


def _unlike(value: Any) -> Any:
    if isinstance(value, dict):
        return Like(tuple(map(size_of, value["shape"])), plain(value["dtype"]))
    if isinstance(value, list) and value[0] in ("l", "t", "m"):
        if value[0] == "m":
            return {key: _unlike(part) for key, part in value[1]}
        parts = [_unlike(part) for part in value[1:]]
        return parts if value[0] == "l" else tuple(parts)
    return plain(value)


# -- structures --------------------------------------------------------------------------------------------------------


def _structure(spec: Structure) -> Any:
    if spec.kind is None:
        return None
    if isinstance(spec.fixed, pytree.TreeSpec):
        try:
            fixed: list[Any] = ["tree", pytree.treespec_dumps(spec.fixed)]
            same = pytree.treespec_loads(fixed[1]) == spec.fixed
        except Exception as error:  # whatever a class of the user's has registered
            raise NotCached(f"a {spec.kind.__qualname__} that the model returns has no text: {error}") from None
        if not same:
            raise NotCached(f"a {spec.kind.__qualname__} that the model returns is not read back alike")
    elif all(isinstance(value, FIXED) and not isinstance(value, type) for _, value in spec.fixed):
        fixed = ["attributes", [[name, written(value)] for name, value in spec.fixed]]
    else:
        raise NotCached(f"a {spec.kind.__qualname__} that the model returns has attributes without text")
    for key in spec.keys:
        if type(key) not in LEAVES:
            raise NotCached(f"a {spec.kind.__qualname__} that the model returns has keys without text")
    return [list(class_address(spec.kind)), [written(key) for key in spec.keys], list(map(_structure, spec.parts)),
            fixed]  # fmt: skip


def _structure_of(row: Any) -> Structure:
    if row is None:
        return Structure()
    address, keys, parts, (how, fixed) = row
    if address[1] not in sys.modules:
        raise ValueError(f"{address[1]} is not loaded")
    kind = resolve(tuple(address), ())
    if not isinstance(kind, type):
        raise ValueError(f"{address} is no class")
    content = pytree.treespec_loads(fixed) if how == "tree" else tuple((name, plain(value)) for name, value in fixed)
    return Structure(kind, tuple(map(plain, keys)), tuple(map(_structure_of, parts)), content)


def structure_key(spec: Structure) -> Any:
    """Return the structure of arguments for a key, as JSON. ``NotCached`` where it has no text."""
    return json.loads(json.dumps(_structure(spec)))
