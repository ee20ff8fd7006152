"""Encode a state as a checkpoint keeps it: its tensors by name, and everything else as JSON.

    {"model": {"up.weight": tensor}, "step": 7, "betas": (0.9, 0.99)}

is the tensor ``model/up.weight``, and

    {"model": {"up.weight": {"$tensor": "model/up.weight"}}, "step": 7, "betas": {"$tuple": [0.9, 0.99]}}

Names are JSON pointers (RFC 6901) without the first slash: the keys of the path, with ``~1`` for a ``/`` in a key. A
value that JSON does not have is an object with one key: ``$`` and its kind. Decoding runs no code.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from autopar.errors import class_of, shown

Tree = Any  # what json.loads returns
NUMBERS = "biufc"  # kinds of NumPy arrays that consist of plain bytes
DEPTH = 100  # the deepest nesting that a save or a load accepts


def encode_state(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], Tree]:
    """Separate a nested state into its tensors, by name, and a tree of everything else.

    Raises:
        TypeError: a value or a key is no data.
        ValueError: two tensors have the same name; or the state nests too deep.
    """
    if not isinstance(state, Mapping):
        raise TypeError(
            f'the state is {class_of(state)}; pass a dict, such as {{"model": model.state_dict(), "step": 7}}'
        )
    tensors: dict[str, torch.Tensor] = {}
    try:
        tree = _encode(state, "", tensors)
    except RecursionError:
        tree = None
    if tree is None or depth_of(tree) > DEPTH:
        raise ValueError(f"the state nests more than {DEPTH} deep, or holds itself; save a flatter one")
    return tensors, tree


def decode_state(tree: Tree, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Rebuild the nested state; a tensor that is not among ``tensors`` is ``None``."""
    if isinstance(tree, list):
        return [decode_state(member, tensors) for member in tree]
    if not isinstance(tree, dict):
        return tree
    if (kind := next(iter(tree), "")).startswith("$"):
        return (
            tensors.get(tree[kind])
            if kind == "$tensor"
            else DECODED[kind](tree[kind], lambda inner: decode_state(inner, tensors))
        )
    return {key: decode_state(value, tensors) for key, value in tree.items()}


def child(name: str, key: str | int) -> str:
    """Return the name of an entry: ``child("model", "up.weight")`` is ``model/up.weight``.

    An empty key is written ``~2``, because an empty name is that of the whole state.
    """
    escaped = str(key).replace("~", "~0").replace("/", "~1") or "~2"
    return f"{name}/{escaped}" if name else escaped


def leaves(tree: Tree, name: str = "") -> Iterator[tuple[str, Tree]]:
    """Yield name and value of every leaf that is no tensor: numbers and texts.

    A list without tensors or an empty dict is one leaf.
    """
    for inner, value in _inner(tree, name):
        if _inner(value, inner):
            yield from leaves(value, inner)
        elif not is_tensor(value):
            yield inner, value


def names(tree: Tree, name: str = "") -> Iterator[str]:
    """Yield the names of all entries, of dicts too."""
    for inner, value in _inner(tree, name):
        yield inner
        yield from names(value, inner)


def depth_of(tree: Tree) -> int:
    """Return how deep dicts and lists nest."""
    depth, level = 0, [tree]
    while level := [node for node in level if isinstance(node, (dict, list))]:
        depth, level = (
            depth + 1,
            [inner for node in level for inner in (node.values() if isinstance(node, dict) else node)],
        )
    return depth


def tensors_in(tree: Tree) -> Iterator[str]:
    """Yield the names of the tensors of a tree."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if is_tensor(node):
            yield node["$tensor"]
        elif isinstance(node, (dict, list)):
            waiting.extend(node.values() if isinstance(node, dict) else node)


def is_tensor(tree: Tree) -> bool:
    return isinstance(tree, dict) and "$tensor" in tree


def _inner(tree: Tree, name: str) -> list[tuple[str, Tree]]:
    """Return name and value of each entry of a dict, and of each entry of a list that holds tensors."""
    if isinstance(tree, dict) and set(tree) == {"$items"}:
        return [(child(name, key), value) for key, value in tree["$items"]]
    if isinstance(tree, dict) and set(tree) == {"$tuple"}:
        return _inner(tree["$tuple"], name)
    if isinstance(tree, list):
        return [(child(name, k), value) for k, value in enumerate(tree)] if _holds_tensors(tree) else []
    if isinstance(tree, dict) and not next(iter(tree), "").startswith("$"):
        return [(child(name, key), value) for key, value in tree.items()]
    return []


def _holds_tensors(tree: Tree) -> bool:
    return is_tensor(tree) or any(
        map(_holds_tensors, tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ())
    )


def _encode(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Tree:
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if isinstance(value, torch.Tensor):
        if name in tensors:
            raise ValueError(f"two tensors of the state are called {name}; give them other keys")
        tensors[name] = value
        return {"$tensor": name}
    if isinstance(value, Mapping):
        return _encoded_keys(value, name, tensors)
    if kind in (list, tuple, torch.Size):
        inner = [_encode(member, child(name, k), tensors) for k, member in enumerate(value)]
        return inner if kind is list else {"$tuple": inner}
    if kind in (float, np.float64):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if kind in (bytes, bytearray):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return _encode(value.item(), name, tensors)
    if kind is np.ndarray and value.dtype.kind in NUMBERS:
        return {"$array": [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]}
    remedy = (
        "pass its state_dict()"
        if hasattr(value, "state_dict")
        else "save tensors, numbers, texts, bytes, lists, tuples, dicts and None"
    )
    raise TypeError(f"{name or 'the state'} is {class_of(value)}, which a checkpoint cannot keep as data; {remedy}")


def _encoded_keys(value: Mapping[Any, Any], name: str, tensors: dict[str, torch.Tensor]) -> Tree:
    for key in value:
        if type(key) not in (str, int):
            raise TypeError(
                f"{name or 'the state'} has the key {shown(key)}; a checkpoint keeps keys that are texts or whole "
                f"numbers"
            )
    inner = [(key, _encode(member, child(name, key), tensors)) for key, member in value.items()]
    if all(type(key) is str and not key.startswith("$") for key in value):
        return dict(inner)
    return {"$items": [list(pair) for pair in inner]}


def _array(fields: list[Any], _: Callable[[Tree], Any]) -> np.ndarray:
    dtype, shape, data = fields
    if np.dtype(dtype).kind not in NUMBERS:
        raise ValueError(f"an array of {dtype} is no array of numbers")
    return np.frombuffer(base64.b64decode(data), dtype=dtype).reshape(shape).copy()


# kind → from its content to the value; the second argument decodes values inside of the content
DECODED: dict[str, Callable[[Any, Callable[[Tree], Any]], Any]] = {
    "$tuple": lambda inner, decode: tuple(map(decode, inner)),
    "$items": lambda inner, decode: {key: decode(value) for key, value in inner},
    "$float": lambda text, _: float(text),
    "$bytes": lambda text, _: base64.b64decode(text),
    "$array": _array,
}
