"""Make one region of all values that torch's partitioner would not keep.

The partitioner keeps the smallest set of values from which cheap ops compute the others: a minimum cut between
forward and backward (torch's ``min_cut_rematerialization_partition``). Only its choice is used, on a copy of the graph:
it splits graphs into two, and does not keep records.
"""

from __future__ import annotations

from autopar.ir.fake_graph import fake_graph, is_early
from autopar.ir.nodes import operands, record_of
from autopar.ir.program import Program
from autopar.plan.recompute.regions import Regions
from autopar.torch_private import saved_by_min_cut


def min_cut(program: Program) -> Regions:
    """Return one region for all values but those that the partitioner keeps."""
    output = program.output
    early = sum(map(is_early, operands(output), record_of(output).results))
    saved = saved_by_min_cut(fake_graph(program), early)
    return lambda node: None if node.name in saved else ""
