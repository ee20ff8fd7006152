"""Rules of one effect make the same lines, so that ``longest-tail`` tries only one of them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.scheduling import Op
from autopar.scheduling.bounds import bound
from autopar.scheduling.graph import Graph
from autopar.scheduling.list_scheduling import Rule, arrange, layer_keys
from autopar.scheduling.longest_tail import LongestTail, bytes_of_kinds
from autopar.scheduling.simulation import times


def drawn(seed: int, count: int) -> Graph:
    r, ops = random.Random(seed), list[Op]()
    for k in range(count):
        after = tuple(r.sample([op.name for op in ops], min(len(ops), r.randint(0, 2))))
        stream = r.choice(["compute", "dp", "dp", "tp"])
        size = 0 if stream == "compute" else r.choice([0, 1, 64, 4096, 10_000])
        ops.append(Op(f"o{k}", stream, r.randint(0, 8) / 2, after, size, kind=r.choice("ab")))
    return Graph(ops, 0.5)


def made(graph: Graph, rule: Rule) -> tuple[Any, ...]:
    drafts = [arrange(graph, keys, rule) for keys in (layer_keys(graph), [-tail for tail in bound(graph).tails])]
    return tuple((tuple(draft.lines), tuple(map(tuple, draft.messages))) for draft in drafts)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 16))
def test_rules_of_one_effect_make_the_same_lines(seed: int, count: int) -> None:
    graph = drawn(seed, count)
    sizes = bytes_of_kinds(graph)
    seen: dict[Any, Any] = {}
    for rule in LongestTail(graph, bound(graph), lambda draft: (draft, times(draft, "enqueue"))).rules():
        for other in (
            rule,
            replace(rule, piece=rule.piece + 16),
            replace(rule, credit=5000),
            replace(rule, chunk=9000),
        ):
            found = made(graph, other)
            assert seen.setdefault(other.effect(*sizes), found) == found


def test_sizes_above_those_of_the_collectives_have_no_effect() -> None:
    ops = [Op(f"sum{k}", "dp", 1.0, bytes=100 * k) for k in (1, 2)]
    sizes = bytes_of_kinds(Graph(ops))
    assert sizes == ({0: 200}, {0: 300})
    assert Rule(chunk=200, window=300, piece=7).effect(*sizes) == Rule(chunk=1e9, window=301).effect(*sizes)
    assert Rule(chunk=199, window=300).effect(*sizes) != Rule(chunk=200, window=300).effect(*sizes)
    assert Rule(window=299).effect(*sizes) != Rule(window=300).effect(*sizes)
    assert Rule(window=299, piece=7).effect(*sizes) != Rule(window=299).effect(*sizes)
    assert Rule(patience=0.2).effect(*sizes) != Rule().effect(*sizes) != Rule(cut=1.0).effect(*sizes)
