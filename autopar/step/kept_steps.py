"""Keep the programs of training steps for other processes: those of a micro-batch, and those that end the step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from autopar.cache.cache import Codec
from autopar.cache.described import described_options
from autopar.cache.placed_rows import placed_of, placed_to_json, reports_of, reports_to_json
from autopar.cache.program_rows import Types, attr_of, attr_row, op_name, program_of, rows_of
from autopar.cache.refused import NotCached
from autopar.capture import Captured
from autopar.capture.guards import Guards
from autopar.ir.program import Program
from autopar.model.compiled import RUNS, Compiler
from autopar.model.inputs import CallInputs
from autopar.model.kept_calls import call_to_json, captured_here, found_of, found_to_json
from autopar.model.kept_facts import facts_of_call
from autopar.optimizers.update import Update
from autopar.runtime.localize import LocalPrograms
from autopar.step.compiling.compiled_step import MicroBatch, Placed, StepUpdate
from autopar.step.compiling.ending import Updating
from autopar.step.compiling.outputs import Output, loss_of
from autopar.step.compiling.update import Trained, Untrained
from autopar.step.options import StepOptions

T = TypeVar("T")
M = TypeVar("M", bound="HasCapture")


class HasCapture(Protocol):
    """The programs of a micro-batch, of one stage or of several."""

    @property
    def captured(self) -> Captured: ...


@dataclass(frozen=True)
class Form(Generic[T]):
    """The form in which something is kept.

    Attributes:
        kind: what it is, in a few words.
        write: returns it as JSON.
        read: makes it of JSON, and of the guards if it has any.
    """

    kind: str
    write: Callable[[T], Any]
    read: Callable[..., T]


def through_cache(compiler: Compiler, make: Callable[[Compiler], T], codec: Callable[[], Codec[T]]) -> tuple[T, str]:
    """Return what ``make`` makes, or what the cache has of it; its reports say which. Also the digest of its text."""
    if compiler.cache is None:
        return make(compiler), ""
    made, report, digest = compiler.cache.through(codec(), compiler.planner.agreement)
    compiler.sizes.share()
    reported: Any = made
    return replace(reported, reports=(*reported.reports, report)), digest


# -- micro-batches -----------------------------------------------------------------------------------------------------


def facts_of_micro(
    compiler: Compiler, inputs: CallInputs, options: StepOptions, trained: Sequence[str],
    updates: Mapping[str, Updating], cut: Collection[str], notes: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    """Return what decides the programs of a micro-batch, as JSON by name.

    Raises:
        NotCached: something that decides it has no text.
    """
    return {
        **facts_of_call(compiler, inputs, notes),
        "step": described_options(options),
        "trained": list(trained),
        "cut": sorted(cut),
        "updates": [[name, _update(update), described_options(dict(types))] for name, (update, types) in
                    updates.items()],
    }  # fmt: skip


def _update(update: Update) -> Any:
    if update.op is None:
        raise NotCached("the optimizer's step is Python code")
    return [op_name(update.op), list(update.states), described_options(dict(update.constants)), list(update.counted),
            update.elementwise, sorted(update.scheduled)]  # fmt: skip


def micro_to_json(micro: MicroBatch) -> Any:
    """Return the programs of a micro-batch as JSON. ``NotCached`` if a part of it has no form."""
    types = Types()
    written = {
        "captured": step_capture_to_json(micro.captured),
        **batch_to_json(micro, types),
        "found": found_to_json(micro.found),
    }
    return {**written, "types": types.to_json()}


def micro_of(compiler: Compiler, inputs: CallInputs, content: Any, guards: Guards) -> MicroBatch:
    """Return the programs of a micro-batch. What is malformed raises an error of any kind."""
    types = Types.of(content["types"])

    def captured(program: Program) -> Captured:
        return step_capture_of(compiler, inputs, content["captured"], program, guards)

    return replace(batch_of(content, types, captured), found=found_of(content["found"], compiler))


def step_capture_to_json(captured: Captured) -> Any:
    """Return the capture of a micro-batch as JSON. ``NotCached`` if a part of it has no form."""
    return {**call_to_json(captured), "loss": loss_of(captured)}


def step_capture_of(compiler: Compiler, inputs: CallInputs, content: Any, program: Program, guards: Guards) -> Captured:
    """Return the capture of a micro-batch. ``program``: one in the place of the traced one, which is not kept."""
    return replace(captured_here(compiler, inputs, content, program, guards), loss=content["loss"])


def batch_to_json(micro: MicroBatch, types: Types) -> dict[str, Any]:
    """Return the programs of a micro-batch as JSON, without its capture."""
    alone = micro.local.order is not None  # else it is of one stage, and its program is joined with others
    written = placed_to_json((micro.program, micro.local), types) if alone else None
    return {
        "micro": written if alone else rows_of(micro.program, types),
        "count": placed_to_json(micro.count, types),
        "copy": placed_to_json(micro.copy, types),
        "first": placed_to_json(micro.first, types),
        "parameters": [[name, types.number(type)] for name, type in micro.parameters.items()],
        "gradients": [[name, types.number(type)] for name, type in micro.gradients.items()],
        "states": [[name, attr_row(attr)] for name, attr in micro.states.items()],
        "untrained": [[each.name, types.number(each.gradient), attr_row(each.state)] for each in micro.untrained],
        "loss": None if micro.loss is None else types.number(micro.loss),
        "outputs": outputs_to_json(micro.outputs),
        "reports": reports_to_json(micro.reports),
    }


def batch_of(content: Any, types: Types, captured: Callable[[Program], Captured]) -> MicroBatch:
    """Return the programs of a micro-batch. ``captured``: explicit program → the capture."""
    placed = batch_program_of(content["micro"], types)
    return MicroBatch(
        captured(placed[0]),
        *placed,
        placed_of(content["count"], types, RUNS),
        placed_of(content["copy"], types, RUNS),
        placed_of(content["first"], types, RUNS),
        parameters={name: types.at(number) for name, number in content["parameters"]},
        gradients={name: types.at(number) for name, number in content["gradients"]},
        states={name: attr_of(row) for name, row in content["states"]},
        untrained=tuple(Untrained(name, types.at(number), attr_of(row)) for name, number, row in content["untrained"]),
        loss=None if content["loss"] is None else types.at(content["loss"]),
        outputs=outputs_of(content["outputs"]),
        reports=reports_of(content["reports"]),
    )


def batch_program_of(content: Any, types: Types) -> Placed:
    """Return the program of a micro-batch, or of one stage of it, which is joined with others."""
    if "order" in content:
        placed = placed_of(content, types, RUNS)
        assert placed is not None
        return placed
    program = program_of(content, types)
    return program, LocalPrograms(program, lambda local: None)


def outputs_to_json(outputs: Sequence[Output]) -> Any:
    return [[each.name, each.how, each.dim, each.known] for each in outputs]


def outputs_of(content: Any) -> tuple[Output, ...]:
    return tuple(Output(*row) for row in content)


def codec_of_micro(
    compiler: Compiler, inputs: CallInputs, options: StepOptions, key: tuple[Any, ...], updates: Mapping[str, Updating],
    notes: Sequence[str], make: Callable[[Compiler], M], form: Form[M],
) -> Codec[M]:  # fmt: skip
    """Return how the programs of a micro-batch are kept. ``key``: that of the call."""
    _, trained, cut = key
    return Codec(
        kind=form.kind,
        model=compiler.model,
        facts=lambda: facts_of_micro(compiler, inputs, options, trained, updates, cut, notes),
        make=lambda ranks, check: make(compiler.planned_by(ranks, check)),
        guards=lambda micro: micro.captured.guards,
        write=form.write,
        read=form.read,
    )


# -- updates -----------------------------------------------------------------------------------------------------------


def codec_of_update(
    compiler: Compiler, digest: str, trained: Sequence[Trained], options: StepOptions, make: Callable[[Compiler], T],
    form: Form[T],
) -> Codec[T]:  # fmt: skip
    """Return how the programs that end a step are kept. ``digest``: that of the micro-batch."""
    return Codec(
        kind=form.kind,
        model=None,
        facts=lambda: facts_of_update(compiler, digest, trained, options),
        make=lambda ranks, check: make(compiler.planned_by(ranks, check)),
        guards=lambda update: None,
        write=form.write,
        read=lambda content, guards: form.read(content),
    )


def facts_of_update(
    compiler: Compiler, digest: str, trained: Sequence[Trained], options: StepOptions
) -> dict[str, Any]:
    """Return what decides the programs that end a step. ``digest``: that of the micro-batch, with all that it has."""
    if not digest:
        raise NotCached("the programs of a micro-batch are not kept")
    types = Types()
    planner = compiler.planner
    job = None if compiler.context is None else compiler.context.job
    return {
        "micro": digest,
        "step": described_options(options),
        "options": described_options({
            "mesh": compiler.mesh, "plan": compiler.plan, "strict": compiler.strict, "whole": compiler.whole,
            "machine": compiler.machine, "overlap": compiler.overlap, "figures": compiler.figures,
            "planner": [planner.machine, planner.memory, planner.reserve],
            "hosts": None if job is None else job.hosts.of_rank,
        }),
        "trained": [
            [t.name, types.number(t.type), types.number(t.gradient), attr_row(t.state), _update(t.update),
             [[name, types.number(type)] for name, type in t.types.items()], t.group, t.steps, t.by]
            for t in trained
        ],
        "types": types.to_json(),
    }  # fmt: skip


def update_to_json(update: StepUpdate) -> Any:
    """Return the programs that end a step as JSON. ``NotCached`` if a part of it has no form."""
    types = Types()
    written = {
        "update": placed_to_json((update.program, update.local), types),
        "last": placed_to_json(update.last, types),
        "states": sorted(update.states),
        "returns": list(update.returns),
        "reports": reports_to_json(update.reports),
        "crossing": list(update.crossing),
        "note": update.note,
        "sums": dict(update.sums),
    }
    return {**written, "types": types.to_json()}


def update_of(content: Any) -> StepUpdate:
    """Return the programs that end a step. What is malformed raises an error of any kind."""
    types = Types.of(content["types"])
    placed, last = (placed_of(content[name], types, RUNS) for name in ("update", "last"))
    assert placed is not None and last is not None
    return StepUpdate(
        *placed, last, frozenset(content["states"]), tuple(content["returns"]), reports_of(content["reports"]),
        tuple(content["crossing"]), content["note"], content["sums"],
    )  # fmt: skip


UPDATE = Form("update", update_to_json, update_of)
