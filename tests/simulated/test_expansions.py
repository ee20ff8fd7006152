"""Ops that are expanded where the dim they need whole is split: the same numbers, and the dim is never gathered."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equality import check_equal
from operands import Call, call, made
from operands import F as floats
from operands import I as integers
from rule_calls import TABLE
from shared_captures import shared_captures  # noqa: F401
from torch import nn

import autopar
from autopar import Mesh
from autopar.capture.arguments import bind_arguments
from autopar.capture.decompose.expansions import EXPANSIONS
from autopar.ir.ops import sharded_lookup
from autopar.ir.record import TensorType
from autopar.rules.binding import bind
from autopar.rules.registry import op_name
from autopar.runtime.discovery.proof import difference, prove
from autopar.torch_private import pytree

NAMES = {op_name(op): op for op in EXPANSIONS}


def long(spec: Call) -> bool:
    return any(getattr(leaf, "shape", None) and max(leaf.shape) >= 4 for leaf in pytree.tree_leaves(spec))


def calls_of(name: str) -> list[Any]:
    """The calls on which the op's rule is proven, as far as they can be expanded, and some with longer dims."""
    more = {
        "_softmax": [call(floats(3, 9), 1, False), call(floats(16, 2), 0, False), call(floats(2, 11, 3), -2, False)],
        "_softmax_backward_data": [call(floats(3, 9), floats(3, 9), 1, torch.float64),
                                   call(floats(2, 11, 3), floats(2, 11, 3), 1, torch.float64)],
        "gather": [call(floats(4, 9), 1, integers(4, 3, below=9)), call(floats(10, 3), 0, integers(2, 3, below=10))],
        "scatter_add": [call(floats(4, 9), 1, integers(4, 3, below=9), floats(4, 3)),
                        call(floats(11,), 0, integers(5, below=11), floats(5))],
    }  # fmt: skip
    more["_log_softmax"], more["_log_softmax_backward_data"] = more["_softmax"], more["_softmax_backward_data"]
    found = [made(spec, name) for spec in [*TABLE[name], *more.get(name, [])]]
    return [(args, kwargs) for args, kwargs in found if EXPANSIONS[NAMES[name]].applies(*args, **kwargs)]


def results(value: Any) -> list[torch.Tensor]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def counted(name: str, args: Any) -> int:
    """How many results mean something: the total weight of a loss that is not reduced does not."""
    return 1 if name in ("nll_loss_forward", "nll_loss2d_forward") and args[3] == 0 else 3


@pytest.mark.parametrize("name", NAMES)
def test_expansion_is_the_op(name: str) -> None:
    rows = calls_of(name)
    assert rows
    for args, kwargs in rows:
        wanted, found = (
            results(NAMES[name](*args, **kwargs)),
            results(EXPANSIONS[NAMES[name]].function(*args, **kwargs)),
        )
        assert len(wanted) == len(found)
        for a, b in list(zip(found, wanted, strict=True))[: counted(name, args)]:
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            assert difference(a, b) <= 1e-11


class Once(nn.Module):
    """One call of an op, of which all results that mean something are returned."""

    def __init__(self, name: str, args: Any, kwargs: Any) -> None:
        super().__init__()
        self.name, self.given = name, (args, kwargs)

    def forward(self, *tensors: torch.Tensor) -> Any:
        rest = iter(tensors)
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda _: next(rest), self.given)
        return tuple(results(NAMES[self.name](*args, **kwargs))[: counted(self.name, args)])


@functools.cache
def once(name: str) -> list[tuple[nn.Module, Any, Any]]:
    """A model of each call of an op, with its arguments."""
    return [(Once(name, args, kwargs), args, kwargs) for args, kwargs in calls_of(name)]


@pytest.mark.long
@pytest.mark.usefixtures("shared_captures")
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        *((name, 3) for name in NAMES),
        *(pytest.param(name, 2, marks=pytest.mark.sweep("it runs with 3 ranks, which need more")) for name in NAMES),
    ],
)
def test_split_dim_is_not_gathered(name: str, ranks: int) -> None:
    """Operands that have the factor are split along it."""
    seen = 0
    for model, args, kwargs in once(name):
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        types = pytree.tree_map_only(torch.Tensor, lambda t: TensorType(tuple(t.shape), t.dtype), (args, kwargs))
        outs = [TensorType(tuple(t.shape), t.dtype) for t in results(NAMES[name](*args, **kwargs))]
        bound = bind(NAMES[name], *types, outs)
        ((factor, least),) = EXPANSIONS[NAMES[name]].opened(bound, *types) or (("", 0),)
        if bound.sizes.get(factor, 0) < max(least, ranks):
            continue
        names = bind_arguments(model, tensors, {}).names
        plan = {
            arg: tuple("tp" if dim == (factor,) and len(dims) > 1 else None for dim in dims)
            for arg, dims in zip(names, bound.operands, strict=True)
        }
        if not any("tp" in spec for spec in plan.values()):  # the rows of an embedding's gradient: no operand has them
            continue
        parallel = autopar.parallelize(model, Mesh(tp=ranks), plan, example=tuple(tensors))
        with torch.no_grad():
            found = parallel.simulate(*tensors)
        for a, b in zip(results(found), results(model(*tensors)), strict=True):
            assert difference(a, b) <= 1e-11
        moved = {row.transfer for row in parallel.transfers} & {"all_gather", "redistribute", "all_to_all"}
        assert not moved or "attention" in name, f"{name}: {moved}\n{parallel.program}"
        seen += 1
    assert seen or name == "embedding_dense_backward"


HELD = [
    (sharded_lookup.look_up, call(floats(6, 5), integers(3, 4, below=6), torch.arange(6), 6)),
    (sharded_lookup.look_up, call(floats(6, 1), integers(below=6), torch.arange(6), 6)),
    (sharded_lookup.look_up_backward, call(floats(3, 4, 5), integers(3, 4, below=7), torch.arange(7), 7)),
    (sharded_lookup.gather_held, call(floats(4, 6), 1, integers(4, 3, below=6), torch.arange(6), 6)),
    (sharded_lookup.gather_held, call(floats(2, 6, 3), -2, integers(2, 1, 3, below=6), torch.arange(6), 6)),
    (sharded_lookup.scatter_held, call(floats(4, 3), 1, integers(4, 3, below=6), torch.arange(6), 6)),
    (sharded_lookup.within, call(integers(3, 4, below=7), 7)),
    (sharded_lookup.causal_attention,
     call(floats(4, 4, 6, 4), floats(4, 2, 6, 4), floats(4, 2, 6, 4), torch.arange(6), None)),
    (sharded_lookup.causal_attention_backward,
     call(*[floats(4, 4, 6, 4)] * 2, *[floats(4, 2, 6, 4)] * 2, floats(4, 4, 6, 4), floats(4, 4, 6), torch.arange(6),
          None)),
]  # fmt: skip


@pytest.mark.parametrize(("op", "spec"), HELD)
def test_rules_of_what_is_held(op: Any, spec: Call) -> None:
    proof = prove(op, *made(spec, op_name(op)))
    assert any("splits over 3 ranks" in claim for claim in proof.claims)


@pytest.mark.parametrize("index", [-1, 6])
def test_an_index_out_of_range_is_an_error(index: int) -> None:
    """Also where no rank holds it, which would look like a zero."""
    for rows in (torch.arange(3), torch.arange(3, 6)):
        with pytest.raises(IndexError, match="index out of range: a dim of size 6 is looked up"):
            sharded_lookup.look_up(torch.ones(3, 2), torch.tensor([index]), rows, 6)


class Head(nn.Module):
    """Tied embeddings, padding, class weights, label smoothing: everything that a cross-entropy may be told."""

    def __init__(self, vocabulary: int, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 4, padding_idx=1)
        self.options = options

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = F.linear(torch.tanh(self.embed(ids)), self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **self.options)


OPTIONS: list[dict[str, Any]] = [
    {}, {"reduction": "sum"}, {"reduction": "none"}, {"ignore_index": 2}, {"label_smoothing": 0.1},
    {"weight": torch.linspace(0.5, 2, 11, dtype=torch.float64)},
    {"weight": torch.linspace(0.5, 2, 11, dtype=torch.float64), "ignore_index": 0},
]  # fmt: skip


HEADS = {options.get("reduction") or "-".join(options) or "mean": options for options in OPTIONS}
assert len(HEADS) == len(OPTIONS)


@functools.cache
def head(name: str) -> nn.Module:
    return Head(11, **HEADS[name]).double()


@pytest.mark.usefixtures("shared_captures")
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *((name, Mesh(dp=2, tp=3)) for name in HEADS),
        *(("mean", mesh) for mesh in (Mesh(tp=2), Mesh(tp=4), Mesh(tp=2, dp=2))),
        *(
            pytest.param(name, mesh, marks=pytest.mark.sweep("the mean is on this mesh, and the option on another"))
            for mesh in (Mesh(tp=2), Mesh(tp=4), Mesh(tp=2, dp=2))
            for name in HEADS
            if name != "mean"
        ),
    ],
    ids=str,
)
def test_cross_entropy_over_split_classes(name: str, mesh: Mesh) -> None:
    model, options = head(name), HEADS[name]
    model.zero_grad()
    ids, labels = torch.randint(11, (4, 6)), torch.randint(11, (4, 6))
    ids[0, :2] = 1
    labels[0] = options.get("ignore_index", -100)
    parallel = check_equal(model, mesh, {"embed.weight": ("tp", None)}, (ids, labels))
    moved = {row.transfer for row in parallel.transfers if "tp" in row.axis}
    assert moved <= {"all_reduce", "slice", "pend"}, str(parallel.transfers)


def test_targets_that_are_all_ignored() -> None:
    """The mean of none is no number, but the gradients are zero, as in eager."""
    model, ids = Head(11).double(), torch.randint(11, (2, 3))
    parallel = autopar.parallelize(model, Mesh(tp=2), {"embed.weight": ("tp", None)})
    loss = parallel.simulate(ids, torch.full((2, 3), -100))
    loss.backward()
    assert loss.isnan() and not model.embed.weight.grad.any()


def test_a_vocabulary_smaller_than_its_axis() -> None:
    """Some ranks hold no row at all."""
    ids, labels = torch.randint(3, (4, 6)), torch.randint(3, (4, 6))
    check_equal(Head(3).double(), Mesh(tp=4), {"embed.weight": ("tp", None)}, (ids, labels))


def test_rows_over_two_axes_and_in_strided_pieces() -> None:
    ids, labels = torch.randint(12, (4, 6)), torch.randint(12, (4, 6))
    for spec in ((("cp", "tp"), None), (("tp", "cp"), None), ("(3 -1/tp)", None)):
        check_equal(Head(12).double(), Mesh(dp=2, cp=2, tp=2), {"embed.weight": spec}, (ids, labels))


class Causal(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize("length", [8, 7])
@pytest.mark.parametrize("mesh", [Mesh(cp=2), Mesh(cp=3), Mesh(dp=2, cp=2)], ids=str)
def test_causal_attention_over_a_split_sequence(mesh: Mesh, length: int) -> None:
    """Keys and values are gathered; queries, and what comes out, stay split."""
    q, k, v = (torch.randn(2, h, length, 4, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
    axes = ("dp" if "dp" in mesh.names else None, None, "cp", None)
    parallel = check_equal(Causal(), mesh, {"q": axes, "k": axes, "v": axes}, (q, k, v))
    gathered = [row for row in parallel.transfers if row.transfer == "all_gather"]
    assert len(gathered) == 2 and "q_cp" not in str(parallel.program)  # in each phase once, of keys and of values
    assert "autopar::causal_attention(q," in str(parallel.program)


def test_expanded_programs_give_the_same_dump_on_all_ranks() -> None:
    ids, labels = torch.randint(11, (4, 6)), torch.randint(11, (4, 6))
    texts = {
        str(autopar.parallelize(Head(11), Mesh(tp=2), {"embed.weight": ("tp", None)}, example=(ids, labels)).program)
        for _ in range(2)
    }
    assert len(texts) == 1
