"""Name what runs in the words of the model, and show it to torch's profilers as spans by phase and module.

    step 4                                              autopar.runtime.spans.span
      micro-batch 2 of 2
        forward                                         the phase of a line
          layers.3                                      its module, in the modules around it
            mlp
              start all_reduce tp mm_1 (layers.3.mlp.down)
              aten::mm
              wait all_reduce tp mm_1 (layers.3.mlp.down)

A function that runs has a second form with spans, which is compiled when a profiler first meets it. Without a profiler
the first form runs, and no span is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx

from autopar.ir import transfers
from autopar.ir.nodes import node_at, operands, record_of
from autopar.ir.program import Program
from autopar.ir.value_names import started_states
from autopar.torch_private import profiler_is_on

Path = tuple[str, ...]
"""The names of spans that lie in each other, the outermost first."""

_NOTHING = nullcontext()


def span(name: str) -> AbstractContextManager[Any]:
    """Return a block that profilers show under a name. An empty name, or no profiler, makes no span."""
    return torch.profiler.record_function(name) if name and profiler_is_on() else _NOTHING


def module_parts(path: str) -> Path:
    """Split the path of a module at the modules around it: ``layers.3.mlp`` → ``layers.3``, ``mlp``.

    A number belongs to the list before it, because a list of modules runs nothing itself.
    """
    parts: list[str] = []
    for part in path.split(".") if path else ():
        if part.isdecimal() and parts and "." not in parts[-1] and not parts[-1].isdecimal():
            parts[-1] += f".{part}"
        else:
            parts.append(part)
    return tuple(parts)


class Paths:
    """Gives each line of a program its path. A start or a wait lies in the module that is computed around it."""

    def __init__(self, program: Program) -> None:
        self._starts = started_states(program)
        self._messages: dict[str, list[fx.Node]] = {}
        for node in program.nodes:
            if record_of(node).started and record_of(node).message and node not in self._starts:
                self._messages.setdefault(record_of(node).message, []).append(node)

    def of(self, nodes: Iterable[fx.Node]) -> Iterator[Path]:
        """Yield the path of each line, in the order in which they run."""
        inside: Path = ()
        for node in nodes:
            phase = record_of(node).phase
            if title := self.title(node):
                yield (*(inside if inside[:1] == (phase,) else (phase,)), title)
            else:
                # one line may update parameters of several modules
                inside = (phase, *(() if phase == "update" else module_parts(record_of(node).module)))
                yield inside

    def title(self, node: fx.Node) -> str:
        """Return what a line that exchanges data is called; empty for any other line.

        It has the transfer, its axis, the value that is sent, and the module: ``start all_reduce tp mm_1 (mlp.down)``.
        """
        waits = node.target is transfers.wait
        started = node_at(node) if waits else node
        started = self._starts.get(started, started)
        row = transfers.BY_FUNCTION.get(started.target)
        if row is None or not row.collective or started.op != "call_function":
            return ""
        record = record_of(started)
        verb = "wait " if waits else "start " if record.started else ""
        axis = transfers.arguments(started.target, started.args, started.kwargs).get("axis") or ""
        along = axis if isinstance(axis, str) else " ".join(axis)
        value = operands(started)[0].name if operands(started) else started.name
        chunk = "" if record.span is None else f"[{record.span[0]}:{record.span[1]}]"
        others = len(self._messages.get(record.message, ())) - 1
        more = f" and {others} more" if others > 0 else ""
        module = f" ({record.module})" if record.module else ""
        return " ".join(filter(None, (f"{verb}{row.name}", along, f"{value}{chunk}{more}{module}")))


class OpenSpans:
    """The spans that are open in one run of a function, which calls this with the number of the path that begins."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths, self._at = paths, ()
        self._open: list[AbstractContextManager[Any]] = []

    _at: Path

    def __call__(self, number: int) -> None:
        """Leave the spans that a path does not have, and enter the others of the path."""
        path = self._paths[number]
        same = shared(self._at, path)
        while len(self._open) > same:
            self._open.pop().__exit__(None, None, None)
        for name in path[same:]:
            opened = torch.profiler.record_function(name)
            opened.__enter__()
            self._open.append(opened)
        self._at = path

    def close(self) -> None:
        """Leave all spans."""
        self._at = ()
        while self._open:
            self._open.pop().__exit__(None, None, None)


def shared(one: Path, other: Path) -> int:
    """Return how many of their first names two paths share."""
    return next((k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def with_spans(lines: Sequence[str], path_of: Callable[[int], Path | None]) -> tuple[str, list[Path]]:
    """Return the source of a function with spans, line for line, and the paths that it enters by number.

    Args:
        lines: its lines, with their ends.
        path_of: number of a line, from 1 → its path; ``None``: it stays in that of the line before.
    """
    written, paths = [], list[Path]()
    for number, line in enumerate(lines, 1):
        path = path_of(number)
        if path is not None and (not paths or paths[-1] != path):
            body = line.lstrip()
            line = f"{line[: len(line) - len(body)]}self({len(paths)}); {body}"
            paths.append(path)
        written.append(line)
    return "".join(written), paths
