"""The workload of ``profiling/bench_reshard.py``: how much is inserted, and what each mode of reshard counts."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from autopar.examples.workloads import LLAMA_TRANSFERS, placed_llama
from autopar.ir import transfers
from autopar.ir.program import Program
from autopar.ir.program_data import Counts
from autopar.passes import Reshard, run_passes
from autopar.passes.reshard import MODES, disagreements

GOLDEN = {  # layers → what is inserted
    1: {"all_gather": 23, "reduce_scatter": 12, "all_reduce": 8},
    2: {"all_gather": 41, "reduce_scatter": 21, "all_reduce": 14},
}

placed = cache(placed_llama)


@cache
def resharded(layers: int, mode: str) -> Program:
    program = placed(layers).copy()
    run_passes(program, [Reshard(mode)])
    return program


@pytest.mark.long
@pytest.mark.parametrize("layers", GOLDEN)
def test_as_many_transfers_of_each_kind(layers: int) -> None:
    program = resharded(layers, "batched")
    kinds = Counter(node.target.__name__ for node in program.nodes if node.target in transfers.BY_FUNCTION)
    assert kinds == GOLDEN[layers] == {kind: whole + each * layers for kind, (whole, each) in LLAMA_TRANSFERS.items()}
    assert program.counts.inserted == kinds.total() == len(program.graph.nodes) - len(placed(layers).graph.nodes)


@pytest.mark.simulated
def test_the_modes_print_the_same_bytes() -> None:
    texts = {resharded(2, mode).text(comments=True) for mode in MODES}
    assert len(texts) == 1
    assert len({node.name for node in resharded(2, "sync").nodes}) == len(resharded(2, "sync").graph.nodes)


@pytest.mark.parametrize("mode", MODES)
def test_what_each_mode_counts(mode: str) -> None:
    """One commit, or one a reshard, or one an insertion and one a replaced use; each visits every node once."""
    start = nodes = len(placed(2).graph.nodes)
    visits = commits = 0
    for _, _, _, steps, _, _ in disagreements(placed(2)):
        if mode == "sync":
            commits += len(steps) + 1
            visits += sum(range(nodes + 1, nodes + len(steps) + 1)) + nodes + len(steps)
        nodes += len(steps)
        if mode == "per-reshard":
            commits += 1
            visits += nodes
    if mode == "batched":
        commits, visits = 1, nodes
    assert resharded(2, mode).counts == Counts(commits, nodes - start, 0, 0, visits)
