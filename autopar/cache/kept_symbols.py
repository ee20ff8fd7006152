"""Write a capture with symbols for sizes, and read it back: its program, and the sizes that it serves.

An entry of the cache is for the sizes of its key. What it has with symbols serves other sizes, as in the process that
has captured it: those that its patterns of shapes and its conditions allow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.cache.kept_capture import captured_of, captured_to_json
from autopar.cache.program_rows import Types, program_of, rows_of
from autopar.cache.refused import NotCached
from autopar.cache.size_rows import size_of, size_row
from autopar.capture import Captured
from autopar.capture.guards import Guards
from autopar.capture.symbolic.captured import SymbolicCapture
from autopar.capture.symbolic.validity import SIGNS, SizeGuard, Validity, condition_text
from autopar.ir.sizes import Values, expression_of, expression_text, read_size, symbol

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
