"""From a captured call to the programs of a step, for each rank."""

from __future__ import annotations

import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.capture import Captured
from autopar.capture.specialize import specialize
from autopar.compiled import Compiler
from autopar.errors import at_line
from autopar.gc_pause import gc_paused
from autopar.ir.layout import DistAttr, layout_of
from autopar.ir.nodes import name_of, operands, record_of, set_record
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.passes import Amp, Recompute, run_passes
from autopar.passes.amp import low_precision
from autopar.report.passes import PassReport, Reports
from autopar.report.progress import doing
from autopar.runtime.localize import LocalPrograms
from autopar.step.copies import copy_program
from autopar.step.counts import count_program
from autopar.step.joined import joined
from autopar.step.micro import COUNT, LOSS, Micro, gradient_name, micro_of
from autopar.step.options import Options
from autopar.step.outputs import Output, about_outputs, loss_of, names_of
from autopar.step.program import Step
from autopar.step.update import Norm, Trained, Untrained, update_of
from autopar.step.zero import STAGES, data_axis, split_over
from autopar.verify.levels import verify

Placed = tuple[Program, LocalPrograms]


@dataclass(frozen=True)
class MicroBatch:
    """The step of one micro-batch on the mesh, and the counts that it takes.

    Attributes:
        program, local: ``micro``, with its transfers, and of each rank.
        count: the same of ``count``; ``None`` where it has none. And of ``copy``.
        first: ``count`` and the first of several micro-batches, joined.
        parameters, gradients: of those that are trained, by the user's name: their types, between steps, and those of their sums.
        states: how the optimizer's state of each lies.
        untrained: the other parameters whose gradients are measured.
        loss: the type of the state that losses add up in.
        outputs: what ``micro`` returns.
    """

    captured: Captured
    program: Program
    local: LocalPrograms
    count: Placed | None
    copy: Placed | None
    first: Placed | None
    parameters: dict[str, TensorType]
    gradients: dict[str, TensorType]
    states: dict[str, DistAttr]
    untrained: tuple[Untrained, ...]
    loss: TensorType
    outputs: tuple[Output, ...]
    reports: tuple[PassReport, ...]


@dataclass(frozen=True)
class StepUpdate:
    """The end of the step on the mesh; ``returns`` names what it returns.

    Attributes:
        last: the last micro-batch and the update, joined.
        states: the names of those that it replaces.
    """

    program: Program
    local: LocalPrograms
    last: Placed
    states: frozenset[str]
    returns: tuple[str, ...]
    reports: tuple[PassReport, ...]


@doing("train_step")
def compile_micro(compiler: Compiler, args: Sequence[Any], kwargs: Mapping[str, Any], laid: Mapping[str, DistAttr], options: Options,
                  trained: Sequence[str], cut: Collection[str], notes: Sequence[str] = ()) -> MicroBatch:  # fmt: skip
    """Capture the call of one micro-batch, and put it on the mesh.

    Args:
        laid: how some inputs lie, whatever the plan says.
        trained: the names of the optimizer's parameters.
        cut: the inputs of which it has its rows, by name.

    Raises:
        CaptureError: the model returns no loss.
        ValueError: ``zero`` without an axis that splits the batch.
    """
    mesh = compiler.mesh
    captured, attrs, report = replace(compiler, homes={}).capture(args, kwargs, laid, notes)  # where parameters lie is decided here
    traced = specialize(captured.program, frozenset({loss_of(captured)}), captured.device)
    verify(traced, "specialize")
    otherwise = _tell_apart(traced)
    cut = {otherwise.get(name, name) for name in cut}
    reported = [report, *run_passes(traced, [Amp(options.amp, options.keep, device=captured.device)] if options.amp else [])]
    start = time.perf_counter()
    with gc_paused():
        wanted = {*trained, *_measured(traced, options)}
        told = {"returns": options.joins, "names": names_of(captured)}
        found = micro_of(traced, options.microbatches, captured.device, wanted, cut, scaled=options.scaled, **told)
    ms = (time.perf_counter() - start) * 1e3
    verify(found.program, "micro")
    reported.append(PassReport("micro", ms, notes=_about_the_mean(found)))
    for note in reported[-1].notes:
        warnings.warn(note, stacklevel=2)  # the numbers are not those of the whole batch
    reported[-1] = replace(reported[-1], notes=(*reported[-1].notes, *about_outputs(found.outputs, options.microbatches)))
    placeholders = {name_of(node): node for node in found.program.placeholders}
    inputs = {name: attrs[node.name] for name, node in placeholders.items() if record_of(node).role == "input" and node.name in attrs}
    split = STAGES[options.zero]
    axis = data_axis(mesh, inputs) if split else ""
    targets = [name for name in trained if name in placeholders] if "parameter" in split else []
    targets += [gradient_name(name) for name in found.gradients] if "gradient" in split else []
    for name in targets:  # a sum of gradients lies as its parameter, and is split further
        own, shape = placeholders[name.removesuffix(gradient_name(""))].name, record_of(placeholders[name]).type.shape  # type: ignore[union-attr]
        attrs[placeholders[name].name] = split_over(attrs.get(own, DistAttr.replicated(len(shape))), shape, mesh, axis)
    counts = None
    if found.terms.counts:
        counting = count_program(traced, found.terms, options.microbatches, captured.device)
        verify(counting, "count")
        laid_alike = {node.name: inputs[name] for node in counting.placeholders if (name := record_of(node).name.rpartition(".")[0]) in inputs}
        counted, reports = compiler.place(counting, laid_alike, captured.device)
        counts = counting, counted
        reported += _of("count", reports)
    if options.recompute is not None:
        reported += run_passes(found.program, [Recompute(options.recompute, mesh, attrs)])
    local, reports = compiler.place(found.program, attrs, captured.device, widen=options.reduce_dtype is not None)
    types: dict[str, TensorType] = {name_of(node): record_of(node).type for node in found.program.placeholders}  # type: ignore[misc]
    taken = {name: types[name] for name in found.gradients if name in trained}
    states = {n: split_over(t.attr, t.shape, mesh, axis) if "state" in split else t.attr for n, t in taken.items()}
    copies = {name: types[name] for name in low_precision(found.program)} if options.amp else {}
    masters = {n: TensorType(t.shape, torch.float32, layout_of(mesh, states.get(n, t.attr))) for n, t in copies.items()}
    parameters = taken | {n: type for n, type in masters.items() if n in taken}
    gradients = {name: types[gradient_name(name)] for name in found.gradients}
    others = {name: types[name] for name in found.gradients if name not in taken}
    reduced = {n: split_over(t.attr, t.shape, mesh, axis) if "state" in split else t.attr for n, t in others.items()}
    untrained = tuple(Untrained(name, gradients.pop(name), attr) for name, attr in reduced.items())
    copying = None
    if copies:
        program, laid_so = copy_program(masters, copies, captured.device)
        verify(program, "copy")
        copied, more = compiler.place(program, laid_so, captured.device)
        copying = program, copied
        reports = [*reports, *_of("copy", more)]
    first = None
    if counts and options.microbatches > 1:
        first, more = _joined(compiler, counts[0], found.program, [f"{COUNT}.{k}" for k in range(len(found.terms.counts))])
        reports = [*reports, *_of("count", more)]
    return MicroBatch(captured, found.program, local, counts, copying, first, parameters, gradients, states, untrained, types[LOSS], found.outputs, (*reported, *reports))


def _measured(traced: Program, options: Options) -> list[str]:
    """The parameters whose gradients are measured beside the optimizer's."""
    if not options.measured or options.clip_parameters == "optimizer":
        return []
    return [name_of(node) for node in traced.placeholders if record_of(node).role == "param"]


def _joined(compiler: Compiler, first: Program, second: Program, handed: Sequence[str] = ()) -> tuple[Placed, list[PassReport]]:
    start = time.perf_counter()
    with gc_paused():
        made = joined(first, second, handed)
    ms = (time.perf_counter() - start) * 1e3
    verify(made, "join")
    local, report = compiler.localize(made)
    return (made, local), [PassReport("join", ms), replace(report, name="join localize")]


def _tell_apart(traced: Program) -> dict[str, str]:
    """An argument that is called as a parameter or a buffer is called otherwise, by its old name: values go by names from program to program."""
    otherwise = {}
    known = {name_of(node) for node in traced.placeholders if record_of(node).role != "input"}
    for node in traced.placeholders:
        if record_of(node).role == "input" and (name := name_of(node)) in known:
            old = name
            while name in known:
                name += "_"
            set_record(node, record_of(node)._replace(name=name))
            known.add(name)
            otherwise[old] = name
    return otherwise


def _about_the_mean(micro: Micro) -> tuple[str, ...]:
    """What a person should know of the loss of several micro-batches."""
    kinds = (
        (micro.terms.others, "a term of it is no sum over the batch that is divided by a count"),
        (micro.terms.meetings, "rows of the batch meet in it, and those of another micro-batch are not there, as in a loop that accumulates gradients"),
    )
    told = [(why, record_of(nodes[0])) for nodes, why in kinds if nodes]
    return tuple(
        f"the loss is the mean of those of the micro-batches, in which each has the same say, and not that of the whole batch: {why}\n"
        f"{at_line(record.source, record.module)}\n  write it as a mean of terms of one row each, or use microbatches=1"
        for why, record in told[:1]
    )


@doing("update")
def compile_update(compiler: Compiler, trained: Sequence[Trained], micro: MicroBatch, options: Options) -> StepUpdate:
    """The optimizer's step on the mesh, behind such micro-batches."""
    device = micro.captured.device
    norm = Norm(options.clip_norm, micro.untrained) if options.measured else None
    found = update_of(trained, micro.loss, device, norm=norm, scaling=options.loss_scale if options.scaled else None, ema=options.ema)
    _say_where_the_loss_is_from(found.program, micro.program)
    verify(found.program, "update")
    local, reports = compiler.place(found.program, found.constraints, device)
    last, more = _joined(compiler, micro.program, found.program)
    reports += more
    states = frozenset(name_of(node) for node in found.program.placeholders if record_of(node).role == "state")
    return StepUpdate(found.program, local, last, states, found.returns, tuple(reports))


def _say_where_the_loss_is_from(update: Program, micro: Program) -> None:
    """The update's sum of losses has the user's line of the loss: its reduction is what ranks are most often seen in."""
    rows = zip(operands(micro.output), record_of(micro.output).results, strict=True)
    made = {result.of: record_of(node) for node, result in rows if result.kind == "state"}
    here, there = (next(node for node in program.placeholders if name_of(node) == LOSS) for program in (update, micro))
    set_record(here, record_of(here)._replace(source=made[there.name].source, module=made[there.name].module))


def step_of(micro: MicroBatch, update: StepUpdate, microbatches: int) -> Step:
    """Both, as one step."""
    return Step(microbatches, micro.program, update.program, micro.count and micro.count[0], micro.copy and micro.copy[0])


def reports_of(micro: MicroBatch, update: StepUpdate) -> Reports:
    """What each pass did: to ``micro`` under the pass's own name, to the others as ``update reshard``."""
    return Reports((*micro.reports, *_of("update", update.reports)))


def _of(program: str, reports: Sequence[PassReport]) -> list[PassReport]:
    return [replace(report, name=f"{program} {report.name}") for report in reports]
