"""Rules and decompositions on the calls that torch's own samples make; and what no sample can show: accelerators'
kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from op_samples import Samples, sampled
from rule_calls import TABLE

from autopar.errors import ProofError, RuleError
from autopar.ir.record import TensorType
from autopar.rules import RULES, Rule, find_rule
from autopar.rules.binding import bind
from autopar.rules.by_schema import BY_SCHEMA
from autopar.rules.registry import overload
from autopar.rules.strategies import Strategy
from autopar.runtime.discovery import proof
from autopar.runtime.discovery.proof import MESHES, SPLIT, Proof, prove
from autopar.torch_private import FakeTensorMode, OpOverload

pytestmark = pytest.mark.long  # importing the samples takes ten seconds

# calls that a rule does not bind, and why
UNBOUND = {
    "index.Tensor": "a mask as an index: the shape of the result depends on values",
    "index_add": "a tensor without dims has nothing to split",
}


def ours() -> dict[OpOverload, Rule]:
    # other tests may register ops of their own
    return {op: rule for op, rule in RULES.items() if op.namespace == "aten"}


@pytest.fixture(scope="module")
def samples() -> Samples:
    return sampled()


@pytest.mark.parametrize(
    ("most", "claims"),
    [(3, 5_000), pytest.param(None, 9_000, marks=pytest.mark.sweep("three calls of each op show what its rule says"))],
)
def test_every_rule_holds_on_torchs_samples(
    samples: Samples, monkeypatch: pytest.MonkeyPatch, most: int | None, claims: int
) -> None:
    """What must stay whole is not split here: some kernels would write past an end."""
    monkeypatch.setattr(proof._Call, "tests_whole", lambda self, factor: False)
    shown: dict[str, int] = {}
    unbound: list[str] = []
    failed: list[str] = []
    for op, rule in ours().items():
        for args, kwargs in samples.of(op)[:most]:
            try:
                shown[rule.op] = shown.get(rule.op, 0) + len(prove(op, args, kwargs).claims)
            except RuleError as error:
                (unbound if rule.op in UNBOUND else failed).append(str(error))
            except ProofError as error:
                failed.append(str(error))
    assert not failed, "\n".join(failed)
    assert len(unbound) <= 5
    assert len([op for op, count in shown.items() if count]) >= 429  # overloads that samples reach; 430 from 2.12 on
    assert sum(shown.values()) >= claims, sum(shown.values())


def test_every_rule_is_shown_somewhere(samples: Samples) -> None:
    """By hand, by torch's samples, or, of kernels that do not run here, by the schema."""
    rules = {rule.op for rule in ours().values()}
    reached = {rule.op for op, rule in ours().items() if samples.of(op)}
    assert TABLE.keys() <= rules
    assert not BY_SCHEMA & (reached | TABLE.keys())
    assert rules == TABLE.keys() | (reached & rules) | BY_SCHEMA


def test_whole_factors_of_sampled_ops_are_needed(samples: Samples) -> None:
    """Of ops that have no calls by hand, each ``!`` is needed by a sample."""
    for op, rule in ours().items():
        # it would read past an end
        if rule.op in TABLE or rule.op in BY_SCHEMA or rule.op == "_embedding_bag_per_sample_weights_backward":
            continue
        proofs: list[Proof] = [prove(op, *call) for call in samples.of(op)]
        idle = frozenset[str]().union(*(one.idle for one in proofs)) - frozenset[str]().union(
            *(one.needed for one in proofs)
        )
        assert not idle, f"{rule.op}: no sample goes wrong when {', '.join(sorted(idle))} is split"


def test_what_is_taken_apart_gives_the_ops_results(samples: Samples) -> None:
    assert not samples.wrong, "\n".join(samples.wrong)
    assert len(samples.apart) >= 95


# -- kernels that do not run here: the shapes of their results on pieces -----------------------------------------------

B, H, S, D = 4, 6, 10, 8
KEYS = (B, 3, S, D)  # of half as many heads
ROWS, PADDED, COLUMN = (B, H, S), (B, H, 32), (B, H, S, 1)
QKV = ((B, H, S, D),) * 3

KERNELS: list[tuple[str, tuple[Any, ...]]] = [  # tuples are tensors of that shape
    ("_scaled_dot_product_flash_attention", (*QKV, 0.0, False, False)),
    ("_scaled_dot_product_flash_attention", (*QKV, 0.0, True, False)),
    (
        "_scaled_dot_product_flash_attention_backward",
        (QKV[0], *QKV, QKV[0], ROWS, None, None, S, S, 0.0, False, (2,), ()),
    ),
    ("_scaled_dot_product_efficient_attention", (*QKV, None, True, 0.0, False)),
    ("_scaled_dot_product_efficient_attention", (*QKV, (B, H, S, S), True, 0.0, False)),
    ("_scaled_dot_product_efficient_attention", (*QKV, None, False, 0.0, True)),
    (
        "_scaled_dot_product_efficient_attention_backward",
        (QKV[0], *QKV, None, QKV[0], PADDED, (), (), 0.0, [True, True, True, False], False),
    ),
    ("_scaled_dot_product_cudnn_attention", (*QKV, None, True, 0.0, False)),
    ("_scaled_dot_product_cudnn_attention", (*QKV, (1, 1, S, S), True, 0.0, False)),
    (
        "_scaled_dot_product_cudnn_attention_backward",
        (QKV[0], *QKV, QKV[0], COLUMN, (), (), None, None, None, S, S, 0.0, False),
    ),
    ("_scaled_dot_product_fused_attention_overrideable", (*QKV, None, 0.0, False)),
    (
        "_scaled_dot_product_fused_attention_overrideable_backward",
        (QKV[0], *QKV, (B, H, S, S), [True] * 4, QKV[0], ROWS, None, None, S, S, 0.0, False, (), ()),
    ),
    ("_fused_rms_norm_backward", ((B, S, D), (B, S, D), [D], (B, S, 1), (D,), [True, True])),
    ("_fused_rms_norm_backward", ((B, S, D), (B, S, D), [D], (B, S, 1), None, [True, False])),
    ("_thnn_fused_lstm_cell", ((B, 4 * H), (B, 4 * H), (B, H), (4 * H,), (4 * H,))),
    ("_thnn_fused_lstm_cell_backward_impl", ((B, H), (B, H), (B, H), (B, H), (B, 4 * H), True)),
]


def _run(op: OpOverload, args: Sequence[Any]) -> list[TensorType | None]:
    """The types of the results, by the op's fake kernel.

    Of one that has none, they are those of q, k, v and the mask.
    """
    if op.name().endswith("overrideable_backward"):
        return [TensorType(shape, torch.float32) for shape in args[1:5]]
    with FakeTensorMode():
        given = [torch.empty(a, device="cuda") if isinstance(a, tuple) else a for a in args]
        return [TensorType(tuple(r.shape), r.dtype) if isinstance(r, torch.Tensor) else None for r in op(*given)]


@pytest.mark.parametrize("name,args", KERNELS)
def test_kernels_of_accelerators_give_these_shapes_on_pieces(name: str, args: tuple[Any, ...]) -> None:
    op = overload(name)
    results = _run(op, args)
    types = [TensorType(a, torch.float32) if isinstance(a, tuple) else a for a in args]
    bound = bind(op, types, {}, results)
    dims = [*bound.operands, *(dims for dims in bound.results if dims is not None)]
    factors = {factor for value in dims for dim in value for factor in dim} - bound.whole
    assert factors
    for factor in factors:
        for mesh in MESHES:
            needs, gives = bound.place(Strategy(split=((factor, SPLIT),)), mesh)
            assert any(attr.axes for attr in needs)
            for rank in mesh.ranks:
                at = mesh.coordinates(rank)
                pieces = iter(needs)
                local = [next(pieces).local_shape(a, mesh, at) if isinstance(a, tuple) else a for a in args]
                if any(0 in piece for piece in local if isinstance(piece, tuple)):
                    continue
                have = [None if r is None else r.shape for r in _run(op, local)]
                want = [
                    None if r is None or attr is None else attr.local_shape(r.shape, mesh, at)
                    for r, attr in zip(results, gives, strict=True)
                ]
                assert have == want, (factor, rank)


def test_every_rule_by_the_schema_has_calls() -> None:
    assert {name for name, _ in KERNELS} == BY_SCHEMA


def test_what_is_no_data_is_each_ranks_own() -> None:
    """The state of a generator is whole and never pending, whatever is split; the backward takes it so."""
    for name, args in KERNELS:
        types = [TensorType(a, torch.float32) if isinstance(a, tuple) else a for a in args]
        results = _run(overload(name), args)
        bound = bind(overload(name), types, {}, results)
        for factor in bound.sizes.keys() - bound.whole:
            needs, gives = bound.place(Strategy(split=((factor, SPLIT),)), MESHES[0])
            own = [needs[k] for k in bound.own[0]] + [gives[k] for k in bound.own[1]]
            assert all(attr is None or attr.is_replicated for attr in own), (name, factor)
        backward, attention = name.endswith("backward"), "attention" in name
        # behind values and row sums: a seed, an offset, of some kernels and versions a mask for debugging
        kept = [k for k, result in enumerate(results) if k > 1 and result is not None and attention and not backward]
        assert [k for k in bound.own[1] if gives[k] is not None] == kept, name
        assert len(kept) in ((2, 3) if attention and not backward else (0,)), name
        assert len(bound.own[0]) == 2 * (attention and backward), name


def test_heads_may_share_keys() -> None:
    rule = find_rule(overload("_scaled_dot_product_flash_attention"))
    assert callable(rule.pattern)
    q, k = TensorType((B, H, S, D), torch.float32), TensorType(KEYS, torch.float32)
    assert rule.pattern(q, k, k).startswith("b (h r) s d!, b h t! d!, b h t! e! -> b (h r) s e!, b (h r) s")
