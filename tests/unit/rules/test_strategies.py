"""What strategies require and give is in normal form, one object for equal attributes, and kept within limits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from autopar import Mesh
from autopar.ir.layout import WHOLE, DistAttr
from autopar.ir.record import TensorType
from autopar.rules import Bound, Strategy, bind, binding, strategies

aten = torch.ops.aten
split = DistAttr.split
MESHES = [Mesh(dp=2, tp=4), Mesh(dp=1, tp=3)]


def tensor(*shape: int) -> TensorType:
    return TensorType(shape, torch.float32)


def mm(m: int = 10) -> Bound:
    return bind(aten.mm.default, (tensor(m, 6), tensor(6, 8)), {}, (tensor(m, 8),))


CALLS: dict[str, tuple[Any, ...]] = {
    "mm": (aten.mm.default, (tensor(10, 6), tensor(6, 8)), (tensor(10, 8),)),
    "addmm": (aten.addmm.default, (tensor(8), tensor(10, 6), tensor(6, 8)), (tensor(10, 8),)),
    "view": (aten.view.default, (tensor(5, 4, 6), [20, 6]), (tensor(20, 6),)),
    "no elements": (aten.view.default, (tensor(0, 4), [0, 2, 2]), (tensor(0, 2, 2),)),
    "amax": (aten.amax.default, (tensor(4, 5), [1]), (tensor(4),)),
}


def all_strategies(bound: Bound, mesh: Mesh) -> Iterator[Strategy]:
    """Each axis splits a factor, passes a sum or does nothing."""
    options = [*bound.sizes.keys() - bound.whole, *range(len(bound.linear)), None]
    for chosen in itertools.product(options, repeat=len(mesh.names)):
        split: dict[str, tuple[str, ...]] = {}
        for axis, option in zip(mesh.names, chosen, strict=True):
            if isinstance(option, str):
                split[option] = (*split.get(option, ()), axis)
        passing = [(axis, k) for axis, k in zip(mesh.names, chosen, strict=True) if isinstance(k, int)]
        yield Strategy(tuple(sorted((f, ((None, axes),)) for f, axes in split.items())), tuple(passing))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_attributes_are_in_normal_form_and_sound(name: str, mesh: Mesh) -> None:
    op, args, results = CALLS[name]
    bound = bind(op, args, {}, results)
    for strategy in all_strategies(bound, mesh):
        needs, gives = bound.place(strategy, mesh)
        shapes = (*bound.operand_shapes, *bound.result_shapes)
        for attr, shape in zip((*needs, *gives), shapes, strict=True):
            assert attr is not None and shape is not None and attr == attr.normalize(shape, mesh)
        assert bound.check(mesh, needs, gives, [str(k) for k in range(len(needs))]) is None


def test_the_parts_of_a_factor() -> None:
    """A flattened batch and sequence: ``m`` has parts, which are joined where that is the same."""
    mesh = Mesh(dp=2, tp=2)
    (need, _), (give,) = mm(12).place(Strategy((("m", ((4, ("dp",)), (3, ("tp",)))),)), mesh)
    assert need == give == DistAttr((((4, ("dp",)), (3, ("tp",))), WHOLE))
    (need, _), (give,) = mm(12).place(Strategy((("m", ((4, ("dp",)), (3, ()))),)), mesh)
    assert need == give == split("dp", None)


def test_equal_attributes_of_all_shapes_are_one_object() -> None:
    mesh, strategy = Mesh(dp=2, tp=4), Strategy((("k", ((None, ("tp",)),)), ("m", ((None, ("dp",)),))))
    first, second = (mm(m).place(strategy, mesh) for m in (10, 16))
    assert first == ((split("dp", "tp"), split("tp", None)), (split("dp", None, pending=("tp",)),))
    assert all(a is b for a, b in zip(first[0] + first[1], second[0] + second[1], strict=True))


def test_an_op_that_takes_no_empty_pieces() -> None:
    op, args, results = CALLS["amax"]
    bound, dim = bind(op, args, {}, results), ((None, ("tp",)),)
    assert [bound.takes("d1", dim, Mesh(tp=count)) for count in (2, 3, 4)] == [True, True, False]
    assert mm(5).takes("m", dim, Mesh(tp=4))


def test_an_error_names_the_operands_of_each_call() -> None:
    """Calls share a bound rule, but not the names of their values."""
    needs, gives, mesh = (split(None, "tp"), split(None, None)), (split(None, None),), Mesh(tp=2)
    said = [mm().check(mesh, needs, gives, names) for names in (("x", "w"), ("y", "v"))]
    assert [text is not None and f"in {name}" in text for text, name in zip(said, ("w", "v"), strict=True)] == [
        True
    ] * 2


def test_calls_of_equal_shapes_share_a_rule() -> None:
    assert mm() is mm() and mm() is not mm(16)


def test_caches_have_limits() -> None:
    caches = [
        getattr(strategies, name) for name in vars(strategies) if hasattr(getattr(strategies, name), "cache_info")
    ]
    own = [cache for cache in caches if cache.__module__ == strategies.__name__]
    assert len(own) >= 4 and {cache.cache_info().maxsize for cache in own} == {strategies.CACHED}
    assert binding._bind.cache_info().maxsize == binding.CACHED
