"""Write what a capture leaves behind once its program is placed: the structure of its outputs, and its random draws."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any, cast

import torch

from autopar.cache.addresses import class_address, resolve
from autopar.cache.program_rows import op_name, op_of, plain, written
from autopar.cache.refused import NotCached
from autopar.cache.size_rows import size_of, size_row
from autopar.capture import Captured
from autopar.capture.constrained import Constrained
from autopar.capture.guards import Guards
from autopar.ir.ops.seeded_random import Draw, Like
from autopar.ir.program import Program
from autopar.ir.structure import FIXED, Structure
from autopar.torch_private import OpOverload, pytree

LEAVES = (bool, int, float, str, type(None))  # the outputs that are no tensors


def captured_to_json(captured: Captured) -> dict[str, Any]:
    """Return a capture as JSON, without its program, its guards and its symbols.

    Raises:
        NotCached: a part of it has no form that another process could read.
    """
    if captured.numbers:
        raise NotCached("a float of the model is an input of the program")
    for value in captured.leaves.values():
        if type(value) not in LEAVES:
            raise NotCached(f"the model returns a {type(value).__qualname__}")
    return {
        "spec": _structure(captured.spec),
        "leaves": [[position, written(value)] for position, value in captured.leaves.items()],
        "outputs": captured.outputs,
        "differentiable": list(captured.differentiable),
        "device": str(captured.device),
        "notes": list(captured.notes),
        "modules": [[path, list(names)] for path, names in captured.modules.items()],
        "draws": [[op_name(d.op), _like(d.args), _like(dict(d.kwargs)), d.order] for d in captured.draws],
        "constrained": [[each.value, _like(each.spec), each.source, each.axis] for each in captured.constrained],
        "extended": [[position, list(way)] for position, way in captured.extended],
    }


def captured_of(content: Mapping[str, Any], program: Program, guards: Guards) -> Captured:
    """Return the capture. What is malformed raises an error of any kind.

    Args:
        program: a program in the place of the traced one, which is not kept.
    """
    return Captured(
        program=program,
        spec=_structure_of(content["spec"]),
        leaves={position: plain(value) for position, value in content["leaves"]},
        outputs=content["outputs"],
        differentiable=tuple(content["differentiable"]),
        device=torch.device(content["device"]),
        notes=tuple(content["notes"]),
        modules={path: tuple(names) for path, names in content["modules"]},
        draws=tuple(
            Draw(cast(OpOverload, op_of(op)), _unlike(args), _unlike(kwargs), order)
            for op, args, kwargs, order in content["draws"]
        ),
        constrained=tuple(
            Constrained(value, _unlike(spec), source, axis) for value, spec, source, axis in content["constrained"]
        ),
        extended=tuple((position, tuple(way)) for position, way in content["extended"]),
        guards=guards,
    )  # fmt: skip


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
