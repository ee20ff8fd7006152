"""Levels: write collectives over several hosts level by level, where slow links then carry less."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autopar.costs.machine import Machine
from autopar.ir import transfers
from autopar.ir.edit import Value
from autopar.ir.hosts import Hosts
from autopar.ir.nodes import operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.passes.manager import Pass
from autopar.report.hosts import about_hosts, bytes_between_hosts
from autopar.transitions.by_levels import cheapest_way
from autopar.transitions.chain import TransferStep


@dataclass(frozen=True)
class Levels(Pass):
    """Reduce within a host, then between hosts, then gather within the host, where that takes fewer nanoseconds.

        g_dp : f32[64 32] = all_reduce(g, dp)      →      g_dp_within4 : f32[64/dp.within4 32] +dp.across4 = …
                                                          g_dp_across4 : f32[64/dp.within4 32] = …
                                                          g_dp_1 : f32[64 32] = …

    Gathers and reduce-scatters go level by level, too. All ranks see the same prices, and so the same program.

    Attributes:
        machine: the machine whose nanoseconds are compared, and whose levels are those of the ranks.
        hosts: those of the job, which the report names; ``None`` for a machine that need not be there.
    """

    name: ClassVar[str] = "levels"
    takes: ClassVar[str] = "explicit"
    gives: ClassVar[str] = "explicit"

    machine: Machine
    hosts: Hosts | None = None

    def run(self, program: Program) -> list[str]:
        count, before = 0, bytes_between_hosts(program, self.machine, self.hosts)
        with program.edit() as edit:
            for node in program.nodes:
                if node.target not in transfers.BY_FUNCTION:
                    continue
                operand = operands(node)[0]
                source, result = record_of(operand).type, record_of(node).type
                if not isinstance(source, TensorType) or not isinstance(result, TensorType):
                    continue
                arguments = transfers.arguments(node.target, node.args, node.kwargs)
                step = TransferStep(node.target, tuple(arguments.items()), result, 0)
                _, steps = cheapest_way(step, source, self.machine)
                if len(steps) == 1:
                    continue
                count += 1
                moved: Value = operand
                for k, one in enumerate(steps):
                    given = dict(one.arguments)
                    (_, *args), kwargs = transfers.call(one.function, None, given)
                    name = f"{operand.name}_{transfers.suffix(given)}" if k < len(steps) - 1 else node.name
                    moved = edit.insert(one.function, (moved, *args), kwargs, before=node, type=one.type,
                                        phase=record_of(node).phase, name=name, about=node)  # fmt: skip
                edit.replace_all_uses(node, moved)
                edit.erase(node)
        assert program.mesh is not None
        after = bytes_between_hosts(program, self.machine, self.hosts) if count else before
        told = f"{after:,} bytes of a rank's collectives are between hosts"
        if count:
            how = f"{count} collective{'s go' if count > 1 else ' goes'} level by level, within hosts first"
            told = f"{how}: {told}, in the place of {before:,}"
        return [*about_hosts(program.mesh, self.machine, self.hosts), *([told] if before else [])]
