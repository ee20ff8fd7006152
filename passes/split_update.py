"""Split the update of a pipeline's stage in two: what all stages must know, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autopar.ir.nodes import behind, name_of, operands, record_of
from autopar.ir.program import Program
from autopar.ir.value_names import MEASURED, SQUARES
from autopar.passes.manager import Pass

FIRST = "reduction"


@dataclass(frozen=True)
class SplitUpdate(Pass):
    """Give the ops behind the numbers that a stage hands to the others a phase of their own, which comes first.

        update:                                                reduction:
          squares : f32[] +tp = sum_of_squares(w_grad)           squares : f32[] +tp = sum_of_squares(w_grad)
          squares_tp : f32[] = all_reduce(squares, tp)           squares_tp : f32[] = all_reduce(squares, tp)
          norm : f32[] = sqrt(all_squares)               →     update:
          sgd : f32[8 4] = autopar::sgd(w, w_grad, norm)         norm : f32[] = sqrt(all_squares)
          return (squares_tp, norm)                              sgd : f32[8 4] = autopar::sgd(w, w_grad, norm)
                                                                 return (squares_tp, norm)

    These numbers are the returned values that do not depend on the sums over all stages, which are inputs. Linear in
    the graph.
    """

    name: ClassVar[str] = "split_update"
    takes: ClassVar[str] = "explicit"
    gives: ClassVar[str] = "explicit"

    def run(self, program: Program) -> None:
        rows = zip(operands(program.output), record_of(program.output).results, strict=True)
        over_all_stages = {node for node in program.placeholders if name_of(node) in (SQUARES, MEASURED)}
        after = set(over_all_stages)
        for node in program.nodes:
            if any(value in after for value in operands(node)):
                after.add(node)
        first = behind([value for value, result in rows if result.kind == "return" and value not in after])
        with program.edit() as edit:
            for node in program.nodes:
                if node.op == "call_function" and node in first:
                    edit.annotate(node, phase=FIRST)
