"""Keep the captures of calls for other processes, and whatever else is made of the capture of a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

from autopar.cache.cache import Codec
from autopar.cache.kept_capture import captured_of, captured_to_json, symbols_of, symbols_to_json
from autopar.cache.records import Leaf, Records
from autopar.capture import Captured, capture_call
from autopar.capture.arguments import at_sizes
from autopar.capture.guards import Guards
from autopar.ir.program import Program
from autopar.model.captures import HasCapture
from autopar.model.compiled import RUNS, Compiled, Compiler
from autopar.model.inputs import CallInputs
from autopar.model.kept_facts import facts_of_call
from autopar.report.passes import PassReport, Reports
from autopar.runtime.localize import LocalPrograms
from autopar.search.solutions.artifact import from_json
from autopar.search.solutions.solution import Solution

C = TypeVar("C", bound=HasCapture)


class KeptCall(NamedTuple):
    """What is kept of a captured call: fields of ``Compiled``; ``traced`` if there may be parts of the backward."""

    captured: Captured
    program: Program
    local: LocalPrograms
    reports: tuple[PassReport, ...]
    found: Solution | None
    symbolic: Program | None
    traced: Callable[[], Program] | None


def codec_of_captured(
    kind: str,
    record: type[C],
    compiler: Compiler,
    inputs: CallInputs,
    facts: Callable[[], Mapping[str, Any]],
    more: Mapping[Any, Leaf] | None = None,
    loss: Callable[[Captured], int | None] = lambda captured: None,
) -> Codec[C]:
    """Return how a record is kept that was made of the capture of a call.

    Args:
        kind: what it is, in a few words.
        facts: returns what decides it.
        more: class → the form of its values, where records have no own.
        loss: returns the position of the loss of a capture, if it is trained.
    """

    def records(guards: Guards | None = None, content: Any = None) -> Records:
        def write(captured: Captured) -> Any:
            return [captured_to_json(captured), symbols_to_json(captured), loss(captured)]

        def read(row: Any) -> Captured:
            assert guards is not None
            return replace(_captured_here(compiler, inputs, row, made.program(), guards), loss=row[2])

        leaves = {Captured: Leaf(write, read, shared=True), Solution: SOLUTION, **(more or {})}
        made = Records(leaves, content, RUNS)
        return made

    return Codec(
        kind=kind,
        model=compiler.model,
        facts=facts,
        guards=lambda made: made.captured.guards,
        write=lambda made: records().to_json(made, record),
        read=lambda content, guards: records(guards, content).read(content["record"], record),
    )


SOLUTION = Leaf(Solution.to_json, lambda content: replace(from_json(content), source=""))


def codec_of_call(compiler: Compiler, inputs: CallInputs, notes: Sequence[str]) -> Codec[Compiled]:
    """Return how the capture of a call is kept."""
    codec = codec_of_captured("call", KeptCall, compiler, inputs, lambda: facts_of_call(compiler, inputs, notes))
    return codec.around(_kept, partial(_compiled, compiler, inputs))


def _kept(compiled: Compiled) -> KeptCall:
    traced = compiled.traced
    assert traced is not None
    several = len(compiled.captured.differentiable) > 1
    return KeptCall(compiled.captured, compiled.program, compiled.local, compiled.reports, compiled.found,
                    compiled.symbolic, (lambda: traced) if several else None)  # fmt: skip


def _compiled(compiler: Compiler, inputs: CallInputs, kept: KeptCall) -> Compiled:
    @cache
    def traced() -> Captured:
        assert kept.traced is not None
        return replace(kept.captured, program=kept.traced())

    @cache
    def part(positions: frozenset[int]) -> Compiled:
        return compiler.part_of(traced(), inputs.layouts, kept.program, positions)

    return Compiled(kept.captured, kept.program, kept.local, Reports(kept.reports), part, compiler.context, kept.found,
                    kept.symbolic)  # fmt: skip


def _captured_here(compiler: Compiler, inputs: CallInputs, row: Any, program: Program, guards: Guards) -> Captured:
    """Return the capture of a call, as if it was made in this process.

    ``program``: the explicit one, in the place of the traced one, which is not kept.
    """
    whole, model, random = inputs.whole(), compiler.model, compiler.random
    captured, symbolic = captured_of(row[0], program, guards), symbols_of(row[1], guards)
    compiler.sizes.took(model, whole, random, guards, symbolic)
    keep = compiler.sizes.keep
    at = at_sizes(whole, lambda a: capture_call(model, a, random, keep=keep).program)
    values = {} if symbolic is None else symbolic.validity.values
    return replace(captured, at_sizes=at, symbolic=symbolic, values=values)
