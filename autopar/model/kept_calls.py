"""Keep the captures of calls for other processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from autopar.cache.cache import Codec
from autopar.cache.kept_capture import captured_of, captured_to_json
from autopar.cache.kept_symbols import symbols_of, symbols_to_json
from autopar.cache.placed_rows import placed_of, placed_to_json, reports_of, reports_to_json
from autopar.cache.program_rows import Types, program_of, rows_of
from autopar.capture import Captured, capture_call
from autopar.capture.at_sizes import at_sizes
from autopar.capture.guards import Guards
from autopar.ir.program import Program
from autopar.model.compiled import RUNS, Compiled, Compiler
from autopar.model.inputs import CallInputs
from autopar.model.kept_facts import facts_of_call
from autopar.report.passes import Reports
from autopar.search.solutions.artifact import from_json
from autopar.search.solutions.solution import Solution


def codec_of_call(compiler: Compiler, inputs: CallInputs, notes: Sequence[str]) -> Codec[Compiled]:
    """Return how the capture of a call is kept."""
    return Codec(
        kind="call",
        model=compiler.model,
        facts=lambda: facts_of_call(compiler, inputs, notes),
        make=lambda ranks, check: compiler.planned_by(ranks, check).compile(inputs, notes),
        guards=lambda compiled: compiled.captured.guards,
        write=compiled_to_json,
        read=partial(compiled_of, compiler, inputs),
    )


def compiled_by_cache(compiler: Compiler, inputs: CallInputs, notes: Sequence[str]) -> Compiled:
    """Capture a call and place it, or take what another process has made of it. On processes all ranks call it."""
    cache = compiler.cache
    if cache is None:
        return compiler.compile(inputs, notes)
    made, report, _ = cache.through(codec_of_call(compiler, inputs, notes), compiler.planner.agreement)
    compiler.sizes.share()
    return replace(made, reports=Reports((*made.reports, report)))


def compiled_to_json(compiled: Compiled) -> Any:
    """Return a captured call as JSON. ``NotCached`` if a part of it has no form."""
    types = Types()
    placed = placed_to_json((compiled.program, compiled.local), types)
    assert compiled.traced is not None
    return {
        "captured": call_to_json(compiled.captured),
        "placed": placed,
        "traced": rows_of(compiled.traced, types) if len(compiled.captured.differentiable) > 1 else None,
        "with symbols": None if compiled.symbolic is None else rows_of(compiled.symbolic, types),
        "types": types.to_json(),
        "reports": reports_to_json(compiled.reports),
        "found": found_to_json(compiled.found),
    }


def compiled_of(compiler: Compiler, inputs: CallInputs, content: Any, guards: Guards) -> Compiled:
    """Return the captured call. What is malformed raises an error of any kind."""
    types = Types.of(content["types"])
    placed = placed_of(content["placed"], types, RUNS)
    assert placed is not None
    program, local = placed
    captured = captured_here(compiler, inputs, content["captured"], program, guards)

    @cache
    def traced() -> Captured:
        return replace(captured, program=program_of(content["traced"], types))

    @cache
    def part(positions: frozenset[int]) -> Compiled:
        return compiler.part_of(traced(), inputs.layouts, program, positions)

    found, rows = found_of(content["found"], compiler), content["with symbols"]
    symbolic = None if rows is None else program_of(rows, types)
    return Compiled(captured, program, local, Reports(reports_of(content["reports"])), part, compiler.context, found,
                    symbolic)  # fmt: skip


def call_to_json(captured: Captured) -> Any:
    """Return the capture of a call as JSON, with that of its symbols. ``NotCached`` if a part of it has no form."""
    return {**captured_to_json(captured), "symbols": symbols_to_json(captured)}


def captured_here(compiler: Compiler, inputs: CallInputs, content: Any, program: Program, guards: Guards) -> Captured:
    """Return the capture of a call, as if it was made in this process."""
    whole, model, random = inputs.whole(), compiler.model, compiler.random
    captured, symbolic = captured_of(content, program, guards), symbols_of(content["symbols"], guards)
    compiler.sizes.took(model, whole, random, guards, symbolic)
    keep = compiler.sizes.keep
    at = at_sizes(whole, lambda a: capture_call(model, a, random, keep=keep).program)
    values = {} if symbolic is None else symbolic.validity.values
    return replace(captured, at_sizes=at, symbolic=symbolic, values=values)


def found_to_json(found: Solution | None) -> Any:
    return None if found is None else found.to_json()


def found_of(content: Any, compiler: Compiler) -> Solution | None:
    """Return a plan; a given one is the one that was given."""
    if content is None:
        return None
    return replace(from_json(content), source="")
