"""One region, of all values that torch's partitioner would not keep.

It keeps the values that are smallest in sum and from which the others come by ops that cost little, a minimum cut between
forward and backward (torch's ``min_cut_rematerialization_partition``). It is asked, on a graph of its own, and not obeyed: it
parts graphs into two, and knows nothing of records.
"""

from __future__ import annotations

from autopar.ir.fake_graph import fake_graph, is_early
from autopar.ir.nodes import operands, record_of
from autopar.ir.program import Program
from autopar.plan.recompute.regions import Regions
from autopar.torch_private import saved_by_min_cut


def min_cut(program: Program) -> Regions:
    """Every value has the one region but those that are to be kept."""
    output = program.output
    early = sum(map(is_early, operands(output), record_of(output).results))
    saved = saved_by_min_cut(fake_graph(program), early)
    return lambda node: None if node.name in saved else ""
