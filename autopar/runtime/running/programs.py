"""Say what the values of a program on one rank are: which are handed on, which stay between steps, what is returned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, cast

import torch
from torch import fx

from autopar.ir.mesh import stage_number
from autopar.ir.nodes import name_of, operands, record_of, tensor_type
from autopar.ir.program import Program
from autopar.ir.record import PHASES, TensorType
from autopar.ir.value_names import ValueRole, copy_name, sums_in, total_name
from autopar.runtime.running.functions import Functions
from autopar.scheduling.programs.run_parts import PIECES, RunPart, handed_over, roles_on_rank, selected, taken_by_finish

# the role of a value of a step → the word of a timetable for it
GROUP_OF = {
    ValueRole.GRADIENT: "sums", ValueRole.LOSS: "sums", ValueRole.COPY: "copies",
    ValueRole.COUNT: "counts", ValueRole.OUTPUTS: "outputs",
}  # fmt: skip
HELD, INPUT = "held", "inputs"
SENT = ""  # the label of a returned value that only another stage reads


class PartResults(NamedTuple):
    """The results of a part.

    Attributes:
        states: placeholder of a state → its next value.
        returned: what a returned value is called → the value.
        gradients: placeholder → its gradient.
    """

    states: Mapping[str, str]
    returned: Mapping[str, str]
    gradients: Mapping[str, str]


@dataclass(eq=False)
class RankProgram:
    """A program of a step or a call, as one rank runs it. ``functions``: its functions."""

    functions: Functions
    _results: dict[str, PartResults] = field(default_factory=dict)

    @property
    def local(self) -> Program:
        return self.functions.local

    @property
    def explicit(self) -> Program:
        return self.functions.placed.program

    @cached_property
    def constants(self) -> dict[str, torch.Tensor]:
        return {name: c.tensor for name, c in self.explicit.constants.items() if c.tensor is not None}

    @cached_property
    def _placeholders(self) -> list[fx.Node]:
        stages, stage = self.functions.stages, self.functions.placed.stage
        return [node for node in self.local.placeholders if stages.get(node.name, "") == stage]

    @cached_property
    def names(self) -> dict[str, str]:
        """Placeholder → the user's name."""
        return {node.name: name_of(node) for node in self._placeholders}

    @cached_property
    def stages(self) -> dict[str, int]:
        """Placeholder → the number of its stage, in a program that has several."""
        on = (
            {node.name: tensor_type(node).mesh.name for node in self.explicit.placeholders}
            if self.explicit.stages
            else {}
        )
        return {of: stage_number(name) for of, name in on.items() if name is not None}

    @cached_property
    def types(self) -> dict[str, TensorType]:
        """Placeholder → the type of its piece."""
        return {node.name: cast(TensorType, record_of(node).type) for node in self._placeholders}

    @cached_property
    def groups(self) -> dict[str, str]:
        """Placeholder → the word of a timetable for what it takes: ``held`` for what stays between steps."""
        roles = roles_on_rank(self.local, self.explicit)
        started, finished = handed_over(self.local, self.explicit), self.finished
        totals = {total_name(k) for k in range(len(self.names))}
        found = {}
        for node in self._placeholders:
            name, role = name_of(node), record_of(node).role
            if node.name in started or name in finished:
                found[node.name] = "started"
            elif name in totals:
                found[node.name] = "totals"
            elif name in roles and roles[name][0] in GROUP_OF:
                found[node.name] = GROUP_OF[roles[name][0]]
            else:
                found[node.name] = INPUT if role in ("input", "seed", "tangent") else HELD
        return found

    @cached_property
    def direct(self) -> dict[str, str]:
        """Placeholder of what stays between steps → the user's name, in a run that takes no copies."""
        return {of: self.names[of] for of, group in self.groups.items() if group == HELD}

    @cached_property
    def finished(self) -> frozenset[str]:
        """The user's names of the numbers that complete the step before."""
        return taken_by_finish(self.local)

    @cached_property
    def copies(self) -> dict[str, str]:
        """Placeholder of a parameter → the name of its copy, which it takes in a run that takes copies."""
        own = {*self.names.values()}
        return {of: copy for of, name in self.names.items() if (copy := copy_name(name)) not in own}

    @cached_property
    def copied(self) -> list[str]:
        """The copies that it makes, by name."""
        return [self.names[of] for of in self.results("whole").states if self.groups[of] == "copies"]

    @cached_property
    def sums(self) -> frozenset[str]:
        """The placeholders in which gradients and losses add up."""
        names = sums_in(self.explicit if self.explicit.stages else self.local)
        return frozenset(of for of, name in self.names.items() if name in names)

    def zeros(self, placeholder: str, device: torch.device) -> torch.Tensor:
        """Return the zeros that a sum begins with."""
        type = self.types[placeholder]
        return torch.zeros(type.shape, dtype=type.dtype, device=device)

    @cached_property
    def _labels(self) -> dict[str, list[str]]:
        """Value → what it is called, where the program returns it to the step; a value may be returned twice."""
        rows = zip(operands(self.explicit.output), record_of(self.explicit.output).results, strict=True)
        values = [value.name for value, result in rows if result.kind == "return"]
        returns = self.functions.placed.returns
        labels = [output_name(k) for k in range(len(values))] if returns is None else returns
        found: dict[str, list[str]] = {}
        for value, label in zip(values, labels, strict=True):
            if label != SENT:
                found.setdefault(value, []).append(label)
        return found

    def results(self, part: str) -> PartResults:
        """Return the results of a part; of a phase, those of all phases."""
        if part not in self._results:
            rows = tuple(zip(operands(self.local.output), record_of(self.local.output).results, strict=True))
            sums: dict[str, str] = {}
            if part in PIECES:
                chosen = selected(self.local, cast(RunPart, part), self.functions.placed.handed_sums, self.explicit)
                rows, sums = chosen.results, {of.name: value.name for of, value in chosen.sums.items()}
            kinds: dict[str, list[tuple[str, str]]] = {"state": [], "grad": [], "return": []}
            for value, result in rows:
                kinds[result.kind].append((result.of, value.name))
            labels = {label: value for _, value in kinds["return"] for label in self._labels.get(value, ())}
            states = {of: value for of, value in kinds["state"] if not self.functions.placed.stage or of in self.names}
            self._results[part] = PartResults(states | sums, labels, dict(kinds["grad"]))
        return self._results[part]

    @cached_property
    def later(self) -> Mapping[str, frozenset[str]]:
        """For each phase, what later phases take, or what is sent behind them. Linear in the graph."""
        takes = {phase: function.takes for phase, function in self.functions.phases.items()}
        found: dict[str, frozenset[str]] = {}
        taken: frozenset[str] = frozenset()
        for phase in reversed(PHASES):
            found[phase] = taken
            taken |= frozenset(node.name for node in takes.get(phase, ()))
            if phase == "backward":
                taken |= frozenset(self.functions.placed.sent_back)
        return found


def output_name(number: int | str) -> str:
    """Return what the values of a program are called that it returns without names: ``output.0``."""
    return f"output.{number}"


class CallProgram(RankProgram):
    """The program of a call, as one rank runs it: nothing is handed on by name, so placeholders have their own names.

    Parameters, buffers, inputs and tangents are all given, by placeholder.
    """

    @cached_property
    def names(self) -> dict[str, str]:
        return {node.name: node.name for node in self.local.placeholders}

    @cached_property
    def groups(self) -> dict[str, str]:
        return dict.fromkeys(self.names, INPUT)

    @cached_property
    def direct(self) -> dict[str, str]:
        return self.names

    @cached_property
    def copies(self) -> dict[str, str]:
        return {}

    @cached_property
    def sums(self) -> frozenset[str]:
        return frozenset()
