"""Hold the programs of a whole training step; print, parse and verify them."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import TextError, VerifyError
from autopar.ir.nodes import name_of, record_of
from autopar.ir.program import Program
from autopar.ir.text.printer import print_type
from autopar.ir.value_names import copy_name
from autopar.notebook import ProgramInNotebook


@dataclass(eq=False)
class Step(ProgramInNotebook):
    """A training step: ``micro`` runs once for each micro-batch, ``update`` once.

    The programs hand values to each other by name (``ir.value_names``): the sums of gradients and losses are states of
    ``micro`` that begin as zeros, and the parameters are states of ``update``.

    Attributes:
        microbatches: how often ``micro`` runs.
        micro: forward and backward of one micro-batch.
        update: the optimizer's step.
        count: computes the counts that ``micro`` divides by, from the inputs of all micro-batches; ``None`` if
            ``micro`` takes no counts.
        copy: makes the low-precision copies of parameters that ``micro`` takes in their place; ``None`` if ``micro``
            takes the parameters.
    """

    microbatches: int
    micro: Program
    update: Program
    count: Program | None = None
    copy: Program | None = None

    @property
    def programs(self) -> dict[str, Program]:
        """The programs by name, in the order in which they run."""
        programs = {"count": self.count, "copy": self.copy, "micro": self.micro, "update": self.update}
        return {name: program for name, program in programs.items() if program is not None}

    @property
    def runs(self) -> dict[str, tuple[Program, int]]:
        """The programs by name, and how often a step runs each."""
        return {name: (made, self.microbatches if name == "micro" else 1) for name, made in self.programs.items()}

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return (
            f"<Step of {self.microbatches} micro-batches: "
            f"{', '.join(f'{name} {program!r}' for name, program in self.programs.items())}>"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Step):
            return NotImplemented
        return (self.microbatches, self.programs) == (other.microbatches, other.programs)

    __hash__ = None  # type: ignore[assignment]  # its programs are mutable

    def text(self, *, comments: bool = False) -> str:
        """Return a header, and the text of each program after its name.

        ``comments=True`` adds module paths and source lines.
        """
        parts = [f"{name} {program.text(comments=comments)}" for name, program in self.programs.items()]
        return "\n".join([f"step of {self.microbatches} micro-batches", *parts])

    @staticmethod
    def parse(text: str) -> Step:
        """Return the step that prints as ``text``; ``TextError`` names the line and what is wrong with it."""
        head, *lines = text.splitlines() or [""]
        words = head.split()
        if len(words) != 4 or words[:2] != ["step", "of"] or not words[2].isdecimal() or words[3] != "micro-batches":
            raise TextError(f"line 1: the header of a step is 'step of 2 micro-batches'\n    {head}")
        sections: dict[str, tuple[int, list[str]]] = {}
        name = ""
        for number, line in enumerate(lines, 2):
            first, _, header = line.partition(" ")
            if first in ("count", "copy", "micro", "update") and header.startswith("program "):
                if first in sections:
                    raise TextError(f"line {number}: the step has {first} twice\n    {line}")
                name, line = first, header
                sections[name] = number - 1, []
            if not name:
                raise TextError(
                    f"line {number}: a step begins with 'micro program …', or with 'count program …' or 'copy program "
                    f"…' before it\n    {line}"
                )
            sections[name][1].append(line)
        if missing := [name for name in ("micro", "update") if name not in sections]:
            raise TextError(f"line {len(lines) + 1}: the step ends without its {missing[0]} program")
        programs = {name: Program.parse("\n" * before + "\n".join(part)) for name, (before, part) in sections.items()}
        return Step(int(words[2]), programs["micro"], programs["update"], programs.get("count"), programs.get("copy"))

    def verify(self) -> None:
        """Check each program, and that they agree on the types of the values that they share; else ``VerifyError``."""
        for program in self.programs.values():
            program.verify()
        types = {
            key: {name_of(node): record_of(node).type for node in program.placeholders}
            for key, program in self.programs.items()
        }
        copies = types.pop("copy", {})
        for name, type in types["micro"].items():
            key, other = (
                ("copy", copies[copy_name(name)])
                if copy_name(name) in copies
                else ("update", types["update"].get(name, type))
            )
            if other != type:
                raise VerifyError(
                    f"micro and {key} disagree on {name}: {print_type(type)} in micro, {print_type(other)} in {key}"
                )
