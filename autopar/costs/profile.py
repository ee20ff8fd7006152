"""Hold a profile, the measured times of the distinct calls of a training step, and look up those of a program.

``autopar profile step --save FILE`` and ``step.measure()`` make profiles. A profile belongs to the programs whose calls
were measured. It is plain data, so all ranks that load one file have the same durations.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import fx

from autopar.costs.calls import call_text, calls_of
from autopar.costs.machine import Machine
from autopar.costs.profile_file import read, written
from autopar.costs.profile_row import ProfileRow
from autopar.costs.profile_table import table_of
from autopar.errors import ProfileError
from autopar.ir import transfers
from autopar.ir.mesh import PIPELINE
from autopar.ir.ops.over_stages import OVER_STAGES
from autopar.ir.program import Program, program_digest
from autopar.notebook import InNotebook

REMEDY = "make one of this step with autopar profile step --save FILE, or step.measure().save(FILE)"
SHOWN = 3  # calls that an error lists


@dataclass(frozen=True)
class Profile(InNotebook):
    """Measured times of the calls of a training step. Prints as a table of the dearest calls.

    Attributes:
        machine: the machine whose prices stand beside the times, and replace those that were not measured.
        device: the device that was measured: ``cpu``, ``NVIDIA H100 80GB HBM3``.
        backend: that of the process group, such as ``gloo``; "" if one process has measured, without exchanges.
        ranks: the number of processes that measured together.
        threads: the number of torch's threads in each of them.
        torch: the version of torch.
        mesh: the mesh of the step, as programs print it.
        programs: name → digest of the explicit programs.
        launch: the seconds of launching one call: those of an op on one number.
        interference: how much slower ops compute while a collective runs: 0.5 means 1.5 times as long.
        rows: call → its time.
        source: the file that it was read from, or "".
    """

    machine: Machine
    device: str
    backend: str
    ranks: int
    threads: int
    torch: str
    mesh: str
    programs: Mapping[str, str]
    launch: float
    interference: float
    rows: Mapping[str, ProfileRow] = field(repr=False)
    source: str = field(default="", compare=False)

    def __str__(self) -> str:
        notes = [f"{len(calls)} distinct calls have their prices: {why}" for why, calls in self._unmeasured().items()]
        if self.interference:
            notes.append(f"a product of matrices takes {1 + self.interference:.2f} times as long beside an all-reduce")
        table = table_of(list(self.rows.values()), self.by_phase, self.machine.name)
        return table + "".join(f"{line}\n" for line in (f"measured on {self.measured_on}", *notes))

    @property
    def measured_on(self) -> str:
        """The device and the processes that were measured, in words."""
        processes = f"{self.ranks} {self.backend + ' ' if self.backend else ''}process{'es' * (self.ranks > 1)}"
        threads = f" of {self.threads} thread{'s' * (self.threads > 1)}" if self.device == "cpu" else ""
        return f"{self.device}, {processes}{threads}, torch {self.torch}"

    @property
    def by_phase(self) -> dict[str, float]:
        """Phase → seconds of a step: the sum over its calls, one after the other."""
        total: dict[str, float] = {}
        for row in self.rows.values():
            for phase, times in row.times.items():
                total[phase] = total.get(phase, 0.0) + times * row.seconds
        return total

    @property
    def total(self) -> float:
        """The seconds of a step: the sum over its calls, one after the other."""
        return sum(self.by_phase.values())

    # -- times of a program ------------------------------------------------------------------------------------------

    def seconds(self, node: fx.Node) -> float:
        """Return the seconds of an op or a transfer of an explicit program.

        Raises:
            ProfileError: the profile has no time of such a call.
        """
        return self._row(call_text(node)).seconds

    def durations(self, program: Program, *, strict: bool = True) -> dict[str, float]:
        """Return value → seconds of the op or the transfer that computes it. Linear in the graph.

        Args:
            program: an explicit program of the step that was measured.
            strict: whether to refuse programs of other steps; else only calls without a time are refused.

        Raises:
            ProfileError: the profile belongs to another program, or it has no time of a call.
            ValueError: the program is not explicit.
        """
        return {node.name: row.seconds for node, row in self.rows_of(program, strict=strict)}

    def rows_of(self, program: Program, *, strict: bool = True) -> list[tuple[fx.Node, ProfileRow]]:
        """Return each op and transfer of a program with its row; arguments and errors are those of ``durations``."""
        if program.level != "explicit":
            raise ValueError(
                f"a profile has the times of explicit programs, and this one is {program.level}; pass the explicit "
                f"program that it was made from"
            )
        calls = [(node, text) for node, text in calls_of(program) if not (program.stages and _between(node))]
        if strict and program_digest(program) not in self.programs.values():
            raise ProfileError(self._differs(program, [text for _, text in calls]))
        return [(node, self._row(text)) for node, text in calls]

    def startup(self, transfer: str, axes: str) -> float:
        """Return the start-up seconds θ of a collective along axes: ``startup("all_reduce", "dp tp")``.

        Raises:
            ProfileError: the step has no such collective.
        """
        groups = {row.group: row.startup for row in sorted(self.rows.values(), key=lambda row: row.startup)}
        wanted = f"{transfer} over {axes}"
        if wanted not in groups:
            there = ", ".join(sorted(filter(None, groups))) or "none"
            raise ProfileError(f"{self.name} has no {wanted}; there are {there}")
        return groups[wanted]

    @property
    def name(self) -> str:
        """The profile in errors and reports, with its file if it has one."""
        return f"the profile {self.source}" if self.source else "the profile"

    def _row(self, text: str) -> ProfileRow:
        if text not in self.rows:
            raise ProfileError(f"{self.name} has no time of a call; {REMEDY}\n    {text}")
        return self.rows[text]

    def _differs(self, program: Program, texts: Sequence[str]) -> str:
        """Return how a program differs from those of the profile, and the remedy."""
        head = f"{self.name} was made of another program: "
        if self.mesh != str(program.mesh):
            return f"{head}that is on the mesh ({self.mesh}), and this one on ({program.mesh}); {REMEDY}"
        missing = list(dict.fromkeys(text for text in texts if text not in self.rows))
        if not missing:
            return (
                f"{head}it has the times of all calls, but the order or the names of values differ; {REMEDY}; or take "
                f"the times of equal calls, with strict=False"
            )
        listed = "".join(f"\n    {text}" for text in missing[:SHOWN])
        more = f"\n    and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        return f"{head}{len(missing)} of {len(set(texts))} distinct calls have no time; {REMEDY}{listed}{more}"

    def _unmeasured(self) -> dict[str, list[str]]:
        """Return why calls were not measured → these calls."""
        reasons: dict[str, list[str]] = {}
        for row in self.rows.values():
            if row.why:
                reasons.setdefault(row.why, []).append(row.call)
        return reasons

    # -- as a file ---------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the profile to a JSON file, which ``load`` reads. Each call has a line.

        Raises:
            FileNotFoundError: there is no such folder.
        """
        file = Path(path)
        if not file.parent.is_dir():
            raise FileNotFoundError(f"there is no folder {file.parent} for the profile {file}; make it first")
        file.write_text(self._text(), encoding="utf-8")

    def to_json(self) -> dict[str, Any]:
        """Return the profile as JSON, as its file has it."""
        found: dict[str, Any] = json.loads(self._text())
        return found

    def _text(self) -> str:
        names = ("device", "backend", "ranks", "threads", "torch", "mesh", "programs", "launch", "interference")
        return written({name: getattr(self, name) for name in names}, self.machine, list(self.rows.values()))

    @staticmethod
    def load(path: str | Path) -> Profile:
        """Read a profile that ``save`` wrote.

        Raises:
            ProfileError: the file is no profile, or is malformed; the error names the field.
            FileNotFoundError: there is no such file.
            OSError: the file cannot be read.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise FileNotFoundError(
                f"there is no profile {path}; autopar profile step --save FILE writes one"
            ) from None
        except (ValueError, RecursionError) as error:  # of characters, nesting, or numbers with thousands of digits
            raise ProfileError(f"{path}: the file is not JSON: {error}") from None
        return Profile(**read(content, path), source=str(path))


def _between(node: fx.Node) -> bool:
    """Return whether a node is a message between stages, which has a row of its own, or adds up numbers of all."""
    if node.target in (transfers.send, transfers.recv, OVER_STAGES):
        return True
    if node.target not in transfers.BY_FUNCTION:
        return False
    arguments = transfers.arguments(node.target, node.args, node.kwargs)
    return PIPELINE in transfers.axes_of(arguments.get("axis") or ())
