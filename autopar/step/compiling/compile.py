"""Compile the programs of a micro-batch from a captured call, for each rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import fx

from autopar.capture import Captured
from autopar.capture.provenance import warn_user
from autopar.capture.specialize import specialize
from autopar.errors import AutoparError, at_line
from autopar.gc_pause import gc_paused
from autopar.ir.layout import WHOLE, DistAttr, layout_of
from autopar.ir.nodes import name_of, record_of, set_record, tensor_type
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.ir.value_names import LOSS, count_name, gradient_name, input_of_batch
from autopar.model.compiled import Compiler
from autopar.passes import Amp, pipeline, run_passes
from autopar.passes.amp import low_precision
from autopar.plan.batch import split_over
from autopar.plan.boundary import OPEN
from autopar.plan.constraints import layouts_without_search
from autopar.plan.plan import sharding_axis
from autopar.report.passes import PassReport
from autopar.report.progress import doing
from autopar.runtime.localize import LocalPrograms
from autopar.scheduling.programs.order import OF_STAGES, OF_STEPS, Execution
from autopar.search.problem.ending import Ending
from autopar.search.solutions.applied import layouts_of_states
from autopar.step.batches.counts import count_program
from autopar.step.batches.more_rows import MoreRows
from autopar.step.compiling.compiled_step import MicroBatch, Placed, about, merged
from autopar.step.compiling.copies import Copy, copy_program
from autopar.step.compiling.ending import ending_of
from autopar.step.compiling.micro import Micro, micro_of
from autopar.step.compiling.outputs import about_outputs, loss_of, names_of
from autopar.step.compiling.request import MicroRequest
from autopar.step.compiling.update import Untrained
from autopar.step.compiling.zero import Zero, about_whole, zero_of
from autopar.step.options import StepOptions
from autopar.verify.levels import verify


@doing("train_step")
def compile_micro(compiler: Compiler, request: MicroRequest) -> MicroBatch:
    """Capture the call of one micro-batch, and place it on the mesh.

    Raises:
        OtherNumbers: several micro-batches must have the numbers of the whole batch, and have others.
        CaptureError: the model returns no loss.
        ValueError: ``zero`` without an axis that shards the batch.
    """
    # the layouts of parameters are decided here
    captured, attrs, report = replace(compiler, homes={}).capture(request.call, request.notes)
    return MicroCompiler(compiler, request, captured, attrs, [report]).run()


class OtherNumbers(AutoparError):
    """The micro-batches would have another loss than the whole batch, or other statistics."""


class MicroCompiler:
    """Makes the programs of a micro-batch of a captured call: of all of it, or of one stage of a pipeline.

    Attributes:
        attrs: node → its layout, of the nodes that have one before layouts are propagated.
        reports: of all passes so far.
        renamed: input → its name in the program, where it is another one.
        copied: parameter → its type between steps and that of its copy, where ``micro`` takes a copy.
    """

    def __init__(
        self, compiler: Compiler, request: MicroRequest, captured: Captured, attrs: dict[str, DistAttr],
        reports: list[PassReport],
    ) -> None:  # fmt: skip
        self.compiler, self.request, self.captured, self.attrs, self.reports = (
            compiler, request, captured, attrs, reports,
        )  # fmt: skip
        self.options, self.trained = request.options, request.trained
        self.renamed: Mapping[str, str] = {}
        self.copied: Mapping[str, tuple[TensorType, TensorType]] = {}

    def run(self) -> MicroBatch:
        return self.placed(*self.traced())

    def traced(self) -> tuple[Program, Micro]:
        """Return the traced program of the loss, and that of a micro-batch."""
        traced, self.renamed = self._loss_alone()
        cut = {self.renamed.get(name, name) for name in self.request.cut}
        return traced, self._micro(traced, cut, self._more_rows())

    def _more_rows(self) -> MoreRows | None:
        """Return how the call is captured again with more rows."""
        if self.options.count == 1:
            return None
        compiler, request = self.compiler, self.request
        whole, random, keep = request.call.whole(), compiler.random, compiler.sizes.keep
        return MoreRows(self.captured, compiler.model, whole, request.cut, random, compiler.numbers, keep)

    def placed(
        self,
        traced: Program,
        micro: Micro,
        *,
        foreign: Collection[str] = (),
        execution: Execution = OF_STEPS,
        split_backward: bool = False,
        gathers_apart: bool = False,
    ) -> MicroBatch:
        """Place a traced micro-batch, or a stage of one, on the mesh.

        Args:
            foreign: the parameters that belong to another stage.
            execution: how the program runs.
            split_backward: whether gradients of weights are computed apart.
            gathers_apart: whether ZeRO's parameters are gathered by the program of the copies, and not in ``micro``.
        """
        compiler, options, device = self.compiler, self.options, self.captured.device
        placeholders = {name_of(node): node for node in micro.program.placeholders}
        wanted = {
            "recompute": options.recompute, "widen": options.reduce_dtype is not None, "split_backward": split_backward,
        }  # fmt: skip
        if compiler.searches and options.zero in (1, 2, 3):
            self.attrs |= self._layouts_of_inputs(micro, foreign, wanted)
        # where the search chooses, nothing is decided before
        stage, preferred = 0 if options.zero == "search" else options.zero, sharding_axis(compiler.plan, compiler.mesh)
        zero = zero_of(stage, compiler.mesh, self._inputs(placeholders), preferred)
        self._split(zero, micro, placeholders, set() if gathers_apart else set(self.trained))
        ending = self._ending(micro, foreign, partial(zero.split, "state"))
        reports, found = compiler.through_passes(
            micro.program, self.attrs, device, captured=self.captured, search=compiler.searches, ending=ending,
            **wanted,
        )  # fmt: skip
        self.reports += reports
        if execution is OF_STAGES:  # the stages are joined before they are scheduled
            local = LocalPrograms(micro.program, lambda made: None)
        else:
            local, reports = compiler.localize(micro.program, execution)
            self.reports += reports
        if found is not None:
            self.attrs |= {n.name: tensor_type(n).attr for n in placeholders.values() if record_of(n).role == "input"}
        count = None if execution is OF_STAGES else self._count(traced, micro, self._inputs(placeholders))
        types: dict[str, TensorType] = {name: record_of(node).type for name, node in placeholders.items()}  # type: ignore[misc]
        states = {name: zero.split("state", types[name].attr, types[name].shape) for name in micro.gradients}
        if found is not None:
            states |= layouts_of_states(found, micro.program)
        if notes := about_whole(zero, states):
            self.reports.append(PassReport("zero", 0.0, notes=notes))
        own = [name for name in micro.gradients if name not in foreign]
        trained = {name: types[name] for name in own if name in self.trained}
        apart = trained if gathers_apart and "parameter" in zero.parts else {}
        copy, masters = self._copy(micro, types, {name: states[name] for name in trained}, foreign, apart, execution)
        first = self._first(count, micro)
        return MicroBatch(
            self.captured,
            micro.program,
            local,
            count,
            copy,
            first,
            parameters={name: masters.get(name, type) for name, type in trained.items()},
            gradients={name: types[gradient_name(name)] for name in trained},
            states={name: states[name] for name in trained},
            untrained=tuple(
                Untrained(name, types[gradient_name(name)], states[name]) for name in own if name not in trained
            ),
            loss=types.get(LOSS),
            outputs=micro.outputs,
            reports=tuple(self.reports),
            found=found,
        )

    def _inputs(self, placeholders: Mapping[str, fx.Node]) -> dict[str, DistAttr]:
        """The layouts of the inputs that have one."""
        return {
            n: self.attrs[node.name]
            for n, node in placeholders.items()
            if record_of(node).role == "input" and node.name in self.attrs
        }

    def _layouts_of_inputs(
        self, micro: Micro, foreign: Collection[str], wanted: Mapping[str, object]
    ) -> dict[str, DistAttr]:
        """Search the layouts of inputs without ZeRO, which needs to know the axes that split the batch.

        If no axis splits it, the batch is split as without a search.
        """
        ending = self._ending(micro, foreign, lambda home, shape: home)
        assert ending is not None
        found = self.compiler.found(micro.program, self.attrs, self.captured.device, ending, **wanted)
        if any(attr.dims and attr.dims[0] != WHOLE for attr in found.values()):
            return found
        nodes = {name_of(n): n for n in micro.program.placeholders if n.name in found}
        shapes = {name: tensor_type(node).shape for name, node in nodes.items()}
        compiler = self.compiler
        usual = layouts_without_search(compiler.plan, compiler.model, compiler.mesh, shapes)
        return {
            node.name: usual[name] for name, node in nodes.items() if name in usual and OPEN not in usual[name].dims
        }

    def _ending(
        self, micro: Micro, foreign: Collection[str], state_of: Callable[[DistAttr, Sequence[int]], DistAttr]
    ) -> Ending | None:
        """Describe what ends the step, if the plan is searched. Other stages end it for ``foreign`` parameters."""
        if not self.compiler.searches:
            return None
        types = {name_of(node): tensor_type(node) for node in micro.program.placeholders}
        sums = {name: types[gradient_name(name)] for name in micro.gradients if name not in foreign}
        kept = dict.fromkeys(low_precision(micro.program), torch.float32) if self.options.amp else {}
        return ending_of(self.request.updates, types, sums, kept, self.options, state_of)

    def _loss_alone(self) -> tuple[Program, dict[str, str]]:
        """The traced program with the gradients of the loss alone, in mixed precision; and the inputs that were
        renamed: old name → new name."""
        device, options = self.captured.device, self.options
        traced = specialize(self.captured.program, frozenset({loss_of(self.captured)}), device)
        verify(traced, "specialize")
        renamed = _rename_inputs(traced)
        self.reports += run_passes(traced, pipeline(last=Amp, amp=options.amp, keep=options.keep, device=device))
        return traced, renamed

    def _micro(self, traced: Program, cut: Collection[str], more_rows: MoreRows | None) -> Micro:
        """``micro`` without layouts. Warns if its loss is not the loss of the whole batch."""
        options = self.options
        start = time.perf_counter()
        with gc_paused():
            wanted, names = {*self.trained, *_measured(traced, options)}, names_of(self.captured)
            micro = micro_of(
                traced,
                options.count,
                self.captured.device,
                wanted,
                cut,
                scaled=options.scaled,
                returns=options.joins,
                names=names,
                more_rows=more_rows,
            )
        ms = (time.perf_counter() - start) * 1e3
        verify(micro.program, "micro")
        mean_notes = _about_the_mean(micro)
        if self.request.same_numbers and options.count > 1 and (mean_notes or _has_statistics(traced)):
            raise OtherNumbers(mean_notes[0] if mean_notes else "each micro-batch updates the buffers of the model")
        for note in mean_notes:
            warn_user(note)
        self.reports.append(PassReport("micro", ms, notes=(*mean_notes, *about_outputs(micro.outputs, options.count))))
        return micro

    def _split(
        self, zero: Zero, micro: Micro, placeholders: Mapping[str, fx.Node], parameters: Collection[str]
    ) -> None:
        """Shard ``parameters`` and the sums of gradients as the stage of ZeRO requires. A sum has the layout of its
        parameter, and is sharded further."""
        targets = [(name, name) for name in parameters if name in placeholders and "parameter" in zero.parts]
        targets += [(gradient_name(name), name) for name in micro.gradients if "gradient" in zero.parts]
        for target, parameter in targets:
            shape = record_of(placeholders[target]).type.shape  # type: ignore[union-attr]
            attr = self.attrs.get(placeholders[parameter].name, DistAttr.replicated(len(shape)))
            if target != parameter and zero.axis in attr.axes:
                continue  # it is as sharded as its parameter, and may stay pending over other axes, as with HSDP
            self.attrs[placeholders[target].name] = split_over(attr, shape, zero.mesh, zero.axis)

    def _count(self, traced: Program, micro: Micro, inputs: Mapping[str, DistAttr]) -> Placed | None:
        """Place the program of the counts that ``micro`` takes; ``None`` if it takes none. ``inputs``: the layouts of
        the inputs of a micro-batch."""
        if not micro.terms.counts:
            return None
        program = count_program(traced, micro.terms, self.options.count, self.captured.device)
        verify(program, "count")
        attrs = {
            node.name: inputs[name]
            for node in program.placeholders
            if (name := input_of_batch(record_of(node).name)) in inputs
        }
        local, reports = self.compiler.place(program, attrs, self.captured.device, execution=OF_STEPS)
        self.reports += about("count", reports)
        return program, local

    def _copy(
        self,
        micro: Micro,
        types: Mapping[str, TensorType],
        states: Mapping[str, DistAttr],
        foreign: Collection[str],
        apart: Collection[str],
        execution: Execution,
    ) -> tuple[Placed | None, dict[str, TensorType]]:
        """Place the program of the low-precision copies of parameters; ``None`` if there are none. Also the types of
        the float32 parameters.

        Args:
            types: the types of the placeholders of ``micro``, by the user's names.
            states: the layout of the optimizer's state of each trained parameter; the float32 parameter has the same
                layout.
            foreign: the parameters that belong to another stage.
            apart: those that it gathers.
            execution: how ``micro`` runs.
        """
        low = low_precision(micro.program) if self.options.amp else {}
        copies = {name: types[name] for name in dict.fromkeys((*low, *apart)) if name not in foreign}
        if not copies:
            return None, {}
        mesh = self.compiler.mesh
        masters = {
            n: TensorType(
                type.shape, torch.float32 if n in low else type.dtype, layout_of(mesh, states.get(n, type.attr))
            )
            for n, type in copies.items()
        }
        self.copied = {name: (masters[name], type) for name, type in copies.items()}
        if execution is OF_STAGES and not apart:  # the copies of all stages are one program
            return None, masters
        rows = [Copy(name, type) for name, type in copies.items()]
        program, attrs, _ = copy_program(masters, rows, self.captured.device)
        verify(program, "copy")
        local, reports = self.compiler.place(program, attrs, self.captured.device, execution=OF_STEPS)
        self.reports += about("copy", reports)
        return (program, local), masters

    def _first(self, count: Placed | None, micro: Micro) -> Placed | None:
        """Merge ``count`` with the first of several micro-batches."""
        if count is None or self.options.count == 1:
            return None
        first, reports = merged(
            self.compiler,
            count[0],
            micro.program,
            [*map(count_name, range(len(micro.terms.counts)))],
            execution=Execution(whole=True, from_zero=True),
        )
        self.reports += about("count", reports)
        return first


def _measured(traced: Program, options: StepOptions) -> list[str]:
    """The names of the parameters whose gradients are measured beside those of the optimizer."""
    if not options.measured or options.clip_parameters == "optimizer":
        return []
    return [name_of(node) for node in traced.placeholders if record_of(node).role == "param"]


def _has_statistics(traced: Program) -> bool:
    """Return whether the forward replaces buffers of the model, as batch norm does."""
    return any(result.kind == "state" for result in record_of(traced.output).results)


def _rename_inputs(traced: Program) -> dict[str, str]:
    """Rename each input that has the name of a parameter or a buffer: programs hand values to each other by name. Old
    names → new names."""
    renamed = {}
    known = {name_of(node) for node in traced.placeholders if record_of(node).role != "input"}
    for node in traced.placeholders:
        if record_of(node).role == "input" and (name := name_of(node)) in known:
            old = name
            while name in known:
                name += "_"
            set_record(node, record_of(node)._replace(name=name))
            known.add(name)
            renamed[old] = name
    return renamed


MEANS = "write it as a mean of terms of one row each"
NUMBERS = "divide a sum by the number of rows itself, as in loss.sum() / len(x), pass the number to forward"
SUMS = "divide the sum by a count that forward takes as a tensor, or by the number of its rows"


def _about_the_mean(micro: Micro) -> tuple[str, ...]:
    """Say where the mean of the losses of micro-batches is not the loss of the whole batch."""
    kinds = (
        (micro.terms.others, "one of its terms is not a sum over the batch that is divided by a count", MEANS),
        (micro.terms.sums, "one of its terms is a sum over the batch, beside others that are not", SUMS),
        (
            micro.terms.mixings,
            "the forward mixes rows of the batch, and each micro-batch has only some of them, as in a loop that "
            "accumulates gradients",
            MEANS,
        ),
        (
            micro.terms.numbers,
            "one of its numbers follows from the number of rows, or may do so: with twice the rows the forward has "
            "another one, or fails",
            NUMBERS,
        ),
    )
    reasons = [(why, remedy, record_of(nodes[0])) for nodes, why, remedy in kinds if nodes]
    return tuple(
        f"the loss is the unweighted mean of the losses of the micro-batches, and not the loss of the whole batch: "
        f"{why}\n"
        f"{at_line(record.source, record.module)}\n  {remedy}, or use microbatches=1"
        for why, remedy, record in reasons[:1]
    )
