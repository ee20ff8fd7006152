"""Operations of an edit drawn at random, which can be carried out again in another mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from edited_program import base
from hypothesis import strategies as st

from autopar.errors import EditError
from autopar.ir import transfers
from autopar.ir.edit import Edit, Staged
from autopar.ir.nodes import operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import Requirement, TensorType

aten = torch.ops.aten

Call = tuple[str, tuple[Any, ...], dict[str, Any]]  # operands are ("value", number)


class Script:
    """Operations drawn at random while they are carried out one by one; can be carried out again in another mode."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def play(self, program: Program, edit: Edit, after: Callable[[], None] = lambda: None) -> None:
        values: list[Any] = list(program.nodes)
        for call in self.calls:
            self.one(edit, values, call)
            after()

    @staticmethod
    def one(edit: Edit, values: list[Any], call: Call) -> None:
        def load(value: Any) -> Any:
            if isinstance(value, tuple) and value[:1] == ("value",):
                return values[value[1]]
            return [load(v) for v in value] if isinstance(value, list) else value

        name, args, kwargs = call
        result = getattr(edit, name)(*map(load, args), **{key: load(v) for key, v in kwargs.items()})
        if isinstance(result, Staged):
            values.append(result)


def draw_script(data: st.DataObject, count: int) -> tuple[Script, bool]:
    """A script, and whether all of it went well when each operation was committed at once."""
    program, script = base(), Script()
    edit = Edit(program, sync=True).__enter__()
    values: list[Any] = list(program.nodes)
    size = len(values)
    places = [float(k) for k in range(size)]

    def draw(options: Any) -> Any:
        return data.draw(st.sampled_from(list(options)))

    def type_of(number: int) -> Any:
        value = values[number]
        return record_of(value.node if isinstance(value, Staged) else value).type

    def a_transfer() -> Call:
        x = draw(k for k in range(len(values)) if isinstance(type_of(k), TensorType))
        type = type_of(x)
        axis, dim = draw(["dp", "tp"]), draw(range(2))
        options: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
            ("slice", (dim, axis), {}), ("all_gather", (dim, axis), {}), ("all_reduce", (axis,), {}),
            ("pend", (axis,), {}), ("reduce_scatter", (dim, axis), {}), ("all_to_all", (dim, 1 - dim, axis), {}),
            ("send", ("s1",), {}), ("cast", (torch.bfloat16,), {}),
        ]  # fmt: skip
        fits = []
        for name, args, kwargs in options:
            row = transfers.TRANSFERS[name]
            try:
                row.infer(type, transfers.arguments(row.function, (None, *args), kwargs), program.stages)
                fits.append((name, args, kwargs))
            except ValueError:
                pass
        name, args, kwargs = draw(fits)
        return name, (("value", x), *args), {**kwargs, "before": ("value", place(x)), "phase": draw([None, "update"])}

    where: list[float] = []  # between which nodes the newest value stands

    def place(number: int) -> int:
        """What to insert before: something behind the operand, staged or not."""
        spot = draw(k for k in range(3, len(values)) if places[k] > places[number])
        where.append(spot - 0.5 if spot < size else places[spot])
        return spot

    def an_op() -> Call:
        x = draw(k for k in range(len(values)) if isinstance(type_of(k), TensorType))
        about = {
            "type": type_of(x),
            "uses": [Requirement(type_of(x).layout, type_of(x).dtype)],
            "name": draw([None, "mine", "mine_1"]),
        }
        return (
            "insert",
            (draw([aten.relu.default, aten.sum.default]), [("value", x)]),
            {"before": ("value", place(x)), **about},
        )

    def a_concat() -> Call:
        x = draw([0, 2, 3, 6])  # no transfer: what is known of those at once may change with the commit
        return "concat", ([("value", x), ("value", x)], 1), {"before": ("value", place(x))}

    def a_use() -> Call:
        user = draw(k for k in range(3, size) if operands(values[k]))
        index = draw(range(len(operands(values[user]))))
        old = operands(values[user])[index]
        number = next((k for k, v in enumerate(values) if v is old or (isinstance(v, Staged) and v.node is old)), None)
        new = draw(k for k in range(len(values)) if places[k] < user and isinstance(type_of(k), TensorType))
        return (
            "replace_use",
            (("value", user), ("value", number), ("value", new)),
            {"index": draw([index, index, None])},
        )

    def all_uses() -> Call:
        old = draw(range(len(values)))
        new = draw(k for k in range(len(values) - 1) if k != size - 1 and isinstance(type_of(k), TensorType))
        return "replace_all_uses", (("value", old), ("value", new)), {}

    def a_note() -> Call:
        number = draw(range(size - 1))
        type = draw([record_of(values[k]).type for k in (0, 1, 2, 5)])
        changes = draw(
            [{"phase": "update"}, {"phase": "forward"}, {"source": "another.py:1"}, {"type": type}, {"type": type}]
        )
        return "annotate", (("value", number),), changes

    def an_erasure() -> Call:
        unused = [
            k for k, v in enumerate(values[:-1]) if k != size - 1 and not (v.node if isinstance(v, Staged) else v).users
        ]
        return ("erase", (("value", draw(unused)),), {}) if unused else a_note()

    try:
        for _ in range(count):
            call = draw(
                [a_transfer, a_transfer, a_transfer, an_op, a_concat, a_use, a_use, all_uses, a_note, an_erasure]
            )()
            script.calls.append(call)
            Script.one(edit, values, call)
            places += where[-1:] if len(values) > len(places) else []
        edit.__exit__(None, None, None)
    except EditError:
        return script, False
    return script, True
