"""Run a model on a mesh through a module that is used like the model itself."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from autopar.cache.cache import Cache, on_all_ranks
from autopar.capture.guards import FirstValues, Original
from autopar.capture.model_state import model_state
from autopar.capture.model_swap import ONE_AT_A_TIME
from autopar.costs.machine import Machine, machine_of
from autopar.costs.on_hosts import on_hosts
from autopar.ir.dtensor import edge_of
from autopar.ir.layout import DistAttr
from autopar.ir.mesh import PIPELINE, Mesh, mesh_of_stage
from autopar.ir.ops.seeded_random import Random
from autopar.ir.program import Program
from autopar.ir.structure import part_at, take_over
from autopar.model.calls import Calls, device_of
from autopar.model.captures import Dynamic, SizedCaptures
from autopar.model.compiled import Compiled, Compiler
from autopar.model.dtensor_parameters import sharded
from autopar.model.first_step import FirstStep
from autopar.model.generation import GeneratingModel, Generation
from autopar.model.inputs import Inputs, describe
from autopar.model.paged import STAGED, subject_of_call
from autopar.model.planner import Planner
from autopar.model.pretrained_model import SignatureOfModule
from autopar.model.proxy import ModelProxy
from autopar.model.rank_context import RankContext
from autopar.model.state_dicts import give_public_state_dicts
from autopar.model.wrappers import never_traced
from autopar.page.paged import Paged
from autopar.page.subject import Subject
from autopar.plan.batch import split_over
from autopar.plan.boundary import OPEN
from autopar.plan.constraints import layouts_of
from autopar.plan.plan import Plan, searches
from autopar.report.guards import GuardReport, GuardRow
from autopar.report.passes import PassReport, Reports
from autopar.report.transfers import Transfers, transfers_of
from autopar.runtime.lowering.regions import Regions
from autopar.runtime.process_step import timetable_of_call
from autopar.runtime.processes.agreement import Agreement
from autopar.runtime.processes.job import Job
from autopar.runtime.processes.one_rank import alone
from autopar.runtime.spans import span
from autopar.scheduling.programs.communication import Communication
from autopar.scheduling.programs.overlap import Given, overlap_of
from autopar.scheduling.simulation import Issue
from autopar.search.devices.stages import Pipelined
from autopar.search.solutions.solution import Solution
from autopar.timetable import Timetable
from autopar.verify.channels.classes import RankClass

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from autopar.step.options import StepKeywords
    from autopar.step.pipelined.calls.evaluation import StagedCalls
    from autopar.step.train_step import TrainStep

Outputs = Literal["sharded", "global"]  # how tensors come back: as DTensors, or replicated
OUTPUTS: tuple[Outputs, ...] = get_args(Outputs)


class Parallel(Paged, GeneratingModel, ModelProxy):
    """A model on a mesh. Made by ``parallelize``.

    It is a module with the model's own children, attributes and names: ``named_parameters``, ``state_dict``, ``train``,
    ``requires_grad_`` and the like are the model's, and ``parallel.beta = 2.0`` sets the attribute that forward reads.
    On processes its parameters are DTensors, copies of the model's. In a process that is alone they are the model's own
    parameters, and ``simulate`` runs the model.

    Attributes:
        module: the model; on processes, the copy of it whose parameters are DTensors.
        mesh: the mesh.
        job: the processes of the mesh; ``None`` in a process that is alone.
        compiler: captures its calls and places them on the mesh.
    """

    OWN = ModelProxy.OWN | {"compiler"}

    def __init__(self, model: torch.nn.Module, mesh: Mesh, plan: Plan | None = None, *, job: Job | None = None,
                 strict: bool = False, inputs: Inputs = "global", outputs: Outputs = "sharded", recapture: bool = True,
                 random: Random = "parallel", machine: Machine | None = None,
                 time_limit: float = 60.0, memory: float | None = None,
                 given: Solution | None = None, dynamic: Dynamic = None, overlap: Given = "longest-tail",
                 pipelined: Pipelined | None = None, compile: bool = False,
                 cache: Cache | None = None, first_values: FirstValues = "refuse") -> None:  # fmt: skip
        lone = job is None or mesh.size == 1 or alone() is not None  # without others to agree with
        agreement = None if job is None or lone else Agreement(job.control, mesh)
        context = None
        if job is not None or mesh.size == 1:
            rank = mesh.ranks[0] if job is None else job.rank
            context = RankContext(rank, job, agreement, Regions() if compile else None)
        position = 0 if job is None else mesh.coordinates(job.rank).get(PIPELINE, 0)
        # until a training step cuts the model, each stage has all of it
        own = mesh_of_stage(mesh, position) if mesh.sizes.get(PIPELINE, 1) > 1 else mesh
        attrs = layouts_of(plan, model, own)
        if searches(plan):
            attrs |= _until_searched(model, own, attrs)
        module = model if job is None else sharded(model, attrs, mesh, job)
        if job is not None:
            give_public_state_dicts(module)
        original = None if job is None else Original(model, module)
        layouts = {
            name: edge_of(attrs.get(name, DistAttr.replicated(p.dim())), own, p.shape, strided=True)
            for name, p in model.named_parameters()
        }
        hosts = None if job is None else job.hosts
        machine = None if machine is None else on_hosts(machine, hosts)
        planner = Planner(machine or on_hosts(machine_of(device_of(model, job)), hosts), time_limit, agreement, given,
                          memory=memory, hosts=hosts)  # fmt: skip
        issue: Issue = "direct" if device_of(model, job).type == "cpu" else "enqueue"
        cache, off = on_all_ranks(cache, agreement)
        compiler = Compiler(
            module, own, plan, context, strict, outputs == "global", random, machine=machine, planner=planner,
            overlap=overlap_of(overlap, issue), cache=cache,
            sizes=SizedCaptures(module, random, dynamic, first_values == "keep"),
        )  # fmt: skip
        calls = Calls.of(compiler, mesh, job, inputs, recapture, layouts, original)
        calls.captures.pipelined = pipelined
        calls.captures.first_step = FirstStep(model, module, job is None or job.rank == mesh.ranks[0])
        if off:
            calls.captures.notes.append(PassReport("cache", 0.0, notes=(off,)))
        super().__init__(calls)

    @property
    def compiler(self) -> Compiler:
        return self._calls.compiler

    # -- what was captured -----------------------------------------------------------------------------------------

    @property
    def program(self) -> Program:
        """The explicit program, in which every transfer is an op. ``RuntimeError`` before a capture.

        Of a call that was captured with symbols it has them, as in ``s0/dp``; ``program.at_sizes(s0=3)`` is that of
        other sizes.

        On a mesh with the stages of a pipeline it is the traced program of the example, which ``train_step`` cuts.
        """
        if self._calls.captures.latest is None and self._calls.captures.traced is not None:
            return self._calls.captures.traced
        current = self._current()
        return current.program if current.symbolic is None else current.symbolic

    @property
    def reports(self) -> Reports:
        """The report of each pass. Prints as a table. ``RuntimeError`` before a capture.

        Where ``solution.crossovers`` was asked, and the sizes of the last call are beyond one, it says so.
        """
        captures = self._calls.captures
        placed = () if captures.latest is None and captures.traced is not None else self._current().reports_now()
        return Reports([*placed, *captures.notes])

    @property
    def guards(self) -> GuardReport:
        """The guards on sizes, and the guards on values that did not hold, with what was captured for them.

        Prints as a table.
        """
        sizes, captures = self.compiler.sizes, self._calls.captures
        rows = [GuardRow(guard.text, guard.source, guard.failed, guard.recaptures) for guard in sizes.guards]
        for change, count in collections.Counter(map(str, captures.changes)).items():
            place = next(each.place for each in captures.changes if str(each) == change)
            rows.append(GuardRow(change, "" if place is None else place.line, count, count))
        symbols = [f"{each.about}: used for sizes {each.uses} times" for each in sizes.symbolic]
        return GuardReport.of(rows, self.captures, [*symbols, *sizes.refused])

    @property
    def transfers(self) -> Transfers:
        """The transfers: where each was inserted, and the bytes that it moves. Prints as a table.

        ``.lines`` has a line for each transfer. Of a call on the stages of a pipeline, messages between
        stages are among them. ``RuntimeError`` before a capture.
        """
        planner = self.compiler.planner
        device = "cpu" if self.job is None else self.job.device
        staged = self._staged_calls
        latest = None if staged is None else staged.latest
        programs = self._current().program if latest is None else latest.explicit
        return transfers_of(programs, device, planner.machine, planner.hosts)

    @property
    def captures(self) -> int:
        """The number of captured calls.

        There is one for each structure, shapes and dtypes of arguments, mode, and values that forward reads. Sizes that
        one capture with symbols serves count once. Those of ``generate`` count, too.
        """
        generation = self._calls.made(Generation)
        return len(self._calls.captures.traces) + (0 if generation is None else generation.captures)

    @property
    def solution(self) -> Solution | None:
        """The searched plan, with its certificate; ``None`` if the plan was not searched, as on a mesh of one rank.

        Prints as a table by module.
        ``RuntimeError`` before a capture.
        """
        return self._current().solution

    @property
    def communication(self) -> Communication:
        """How the communication of the call is scheduled, with a bound. Prints as a table.

        ``RuntimeError`` before a capture.
        """
        order = self._current().local.order
        assert order is not None
        return Communication.of({"": (order, 1)}, in_order=self.job is None or self.job.in_order)

    @property
    def regions(self) -> Regions | None:
        """What Inductor has compiled of calls and steps: the regions, how many were distinct, and the seconds.

        ``None`` without ``compile=True``, and in a process that only simulates. Prints as a sentence.
        """
        return None if self.compiler.context is None else self.compiler.context.regions

    def page_subject(self, machine: Machine | str | Path | None = None) -> Subject:
        """Return what the page of the call shows, as data. ``RuntimeError`` before a capture, and with stages."""
        if self.mesh.sizes.get(PIPELINE, 1) > 1:
            raise RuntimeError(STAGED)
        compiled, compiler = self._current(), self.compiler
        planned = compiler.machine or compiler.planner.machine if compiled.found is None else compiled.found.machine
        name = type(self.module).__name__
        return subject_of_call(compiled, name, self.mesh, machine or planned, self.communication)

    @property
    def timetable(self) -> Timetable:
        """What each rank runs in a call, in which order. Prints as text. ``RuntimeError`` before a capture."""
        staged = self._staged_calls
        if staged is None or staged.timetable is None:
            return timetable_of_call(self._current().program)
        return staged.timetable

    def local(self, rank: int) -> Program:
        """Return the program of one rank, in the shapes of its pieces and in the order in which it runs.

        Ranks with pieces of equal shapes share one graph.
        """
        return self._current().local[rank]

    @property
    def rank_classes(self) -> dict[str, list[RankClass]]:
        """The ranks that share a program, with it, by the name of what runs: ``call``."""
        return {"call": self._current().local.classes}

    @property
    def _staged_calls(self) -> StagedCalls | None:
        """The calls on the stages of a pipeline, while the parameters are there."""
        from autopar.step.pipelined.calls.evaluation import StagedCalls

        return None if self._calls.homes is None else self._calls.made(StagedCalls)

    def _current(self) -> Compiled:
        if self._calls.captures.latest is None and self._calls.homes is not None:
            raise RuntimeError(
                "the parameters are on the stages of a pipeline, and what was decided is in the step that cut the "
                "model: step.program, step.reports, step.local(rank), step.communication, step.pipeline"
            )
        if self._calls.captures.latest is None:
            call = "call it" if self.compiler.context else "call .simulate(x)"
            if self.mesh.sizes.get(PIPELINE, 1) > 1:
                raise RuntimeError(
                    "nothing has been captured yet: the first training step cuts the model into stages, and calls run "
                    f"through them from then on; capture a step, then {call} once"
                )
            raise RuntimeError(f"nothing has been captured yet; give parallelize an example=(x,), or {call} once")
        return self._calls.captures.latest

    # -- calls -----------------------------------------------------------------------------------------------------

    def capture(self, *args: Any, **kwargs: Any) -> Compiled | None:
        """Capture such a call and place it, unless it was captured before. Nothing is computed. All ranks call it.

        On a mesh with the stages of a pipeline nothing is placed: that is for ``train_step``, which cuts the model.

        Raises:
            RuntimeError: another call was captured before, and ``recapture=False``.
        """
        calls = self._calls
        inputs = calls.inputs(calls.bound(args, kwargs))
        if self.mesh.sizes.get(PIPELINE, 1) > 1:
            captured, *_ = calls.compiler.capture(inputs)
            calls.captures.traced = captured.program
            return None
        return calls.captures.compiled(inputs, calls.call(inputs, model_state(self.module)))

    @SignatureOfModule
    @never_traced
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model with its own signature. Returns its own output structure; the outputs have autograd graphs.

        Numbers come back as plain tensors with their global value, other tensors as DTensors. With ``outputs="global"``
        all come back as plain tensors, replicated on every rank. All ranks call it in the same way.
        """
        calls = self._calls
        calls.complete()
        context, agreement, tensors = calls.context(" and call parallelize in each"), calls.agreement, calls.tensors
        if calls.homes is not None:
            return self._on_stages(args, kwargs)
        with ONE_AT_A_TIME:  # while one thread captures, the model has other tensors in the place of its own
            inputs, state = calls.inputs(calls.bound(args, kwargs)), model_state(self.module)
            call = calls.call(inputs, state)
            words = f"call {describe(inputs.arguments, call.key)}{call.where}"
            if not call.known:
                agreement.all_make(f"{words}, for the first time")
            compiled = calls.captures.compiled(inputs, call)
        step = compiled.here
        pieces, leaves, brought = tensors.pieces(inputs, state, step.interface, context.rank)
        pieces += calls.computed(compiled.captured)[0].values()
        agreement.announce(words, [inputs], call.numbers_now)
        types = step.interface.types
        # a write to a DTensor does not change the version of its piece
        owners = () if self.job is None else [tensor for _, tensor in state.parameters]
        with span(f"call {type(self.module).__name__}"):
            made = step(
                pieces,
                leaves,
                lambda name, piece: piece if name in brought else tensors.gradient(leaves[name], types[name], piece),
                owners,
            )
        outputs = [
            tensors.returned(tensor, type) for tensor, (_, type) in zip(made, step.interface.returned, strict=True)
        ]
        return _returned_like_the_model(compiled, outputs, args, kwargs)

    def simulate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model with all ranks in this process, on full tensors.

        Signature and output structure are the model's own. The outputs have autograd graphs: ``backward()`` fills
        full-size ``.grad`` of the model's parameters.
        """
        calls = self._calls
        calls.binding.refuse_to_simulate()
        calls.complete()
        if calls.homes is not None:
            return self._on_stages(args, kwargs)
        with ONE_AT_A_TIME:
            inputs, state = calls.inputs(calls.bound(args, kwargs)), model_state(self.module)
            compiled = calls.captures.compiled(inputs, calls.call(inputs, state))
        inputs.refuse_without_values(state)
        tensors = [tensor for _, tensor in (*state.parameters, *state.buffers, *inputs.named)]
        return _returned_like_the_model(
            compiled, compiled.simulated([*tensors, *calls.computed(compiled.captured)[0].values()]), args, kwargs
        )

    def leave_stages(self) -> None:
        """Bring the parameters from the stages of a pipeline back to the whole mesh. All ranks call it.

        There each rank has a piece of each parameter, so that ``full_tensor()`` and torch's full state dicts have all
        weights; on a stage, torch gives an empty tensor to the ranks of the others. The next step moves the parameters
        to their stages again. They stay the same objects. Without stages nothing happens.
        """
        self._calls.complete()
        self._calls.captures.leave_stages()

    def _on_stages(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the forward from stage to stage, on this rank or on all simulated ranks."""
        from autopar.step.pipelined.calls.evaluation import StagedCalls

        return self._calls.once(StagedCalls)(args, kwargs)

    def train_step(self, optimizer: torch.optim.Optimizer, **options: Unpack[StepKeywords]) -> TrainStep:
        """Make the whole training step one static program: ``loss = step(batch)`` runs forward, backward and optimizer.

        Without a plan, or with ``"search"``, the first batch searches the cheapest layouts of the whole step, update
        included; parameters may move to other layouts and stay the same objects. ``step.solution`` has the certificate.

            optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
            step = parallel.train_step(optimizer, microbatches=16, zero=1, clip_norm=1.0)
            for batch in batches:
                loss = step(batch)  # a dict, a tuple, or the model's own arguments
                scheduler.step()    # learning rates, betas, momentum and weight decay are read from the groups

        The model returns its loss: the first of its outputs that is one number. Parameters and ``optimizer.state`` are
        updated in place, so that state dicts, schedulers and evaluation with ``parallel(...)`` work beside it.

        Args:
            optimizer: one of ``torch.optim`` or your own, over parameters of this model. ``AdamW``, ``Adam``, ``SGD``
                and ``Adagrad`` run as fused kernels. The ``step()`` of another class runs on the pieces of parameters,
                or on full parameters if pieces give other numbers.
            microbatches: the number of pieces that a batch is cut into (gradient accumulation). Gradients are reduced
                once. The loss and the gradients are those of the whole batch, also if its pieces have different numbers
                of tokens. A tensor is cut if its dim 0 is as long as that of the first tensor. A tensor that the plan
                names is cut if the plan splits its dim 0 over an axis of the batch, so ``{"mask": (None, None)}`` stays
                whole. ``"search"``: the cheapest number that divides the batch and fits into the memory.
            amp: mixed precision. ``"bf16-O1"`` and ``"fp16-O1"``, in short ``"bf16"`` and ``"fp16"``: as under
                ``torch.autocast``. ``"bf16-O2"`` and ``"fp16-O2"``: all ops except norms, losses and similar ones;
                parameters stay in float32, and forward and backward take low-precision copies of them.
            keep: ops that run in another dtype than ``amp`` chooses, ``{"aten::silu": "f32"}``.
            reduce_dtype: ``torch.float32``: sums of low-precision values over ranks are computed in float32.
            loss_scale: with fp16, the first scale of the loss, or a ``LossScaling``. If gradients overflow, the step
                changes nothing on any rank and lowers the scale. ``step.scaler`` has the scale, and ``step.skipped``
                tells whether the last step overflowed.
            recompute: which values are computed again in the backward instead of kept: ``"blocks"``, the model's
                layers; one or several globs over module paths, as ``"*.layers.*"``; or ``"min-cut"``, all but those
                that torch's partitioner would keep. ``"search"``: the cheapest of none, ``"min-cut"`` and ``"blocks"``
                that fits into the memory.
            zero: the stage of ZeRO: 1 shards the optimizer's state over the data axis, 2 the sums of gradients too, 3
                parameters too. ``"search"``, where the plan is searched: the search chooses for each parameter.
            clip_norm: the largest norm of all gradients; larger ones are clipped to it. ``step.grad_norm`` has the norm
                before clipping.
            clip_parameters: ``"all"``: the norm is that of all parameters that require a gradient, as in
                ``clip_grad_norm_(model.parameters(), …)``; ``"optimizer"``: that of the optimizer's parameters.
            grad_norm: measure the norm at each step, also without ``clip_norm``.
            returns: ``"loss"``, or ``"outputs"``: the model's outputs, with the loss of the step, without a graph. A
                dict chooses how outputs of micro-batches are joined if that does not follow from the forward:
                ``{"logits": "cat", "aux": "mean"}``.
            ema: the decay of a moving average of each parameter, as in torch's ``get_ema_multi_avg_fn``. ``step.ema``
                has the averages, and inside of ``with step.averaged():`` the model has them.
            detect_anomaly: look for NaN after each op, as ``torch.autograd.detect_anomaly()`` around a step does, too.
                The first op that makes a NaN raises an ``AnomalyError`` with your line and the ranges of the operands.
                inf is no anomaly; with fp16, neither is a NaN that follows from an overflow of scaled gradients.
                Tensors that were updated before the error keep their new values.
            offload: keep the optimizer's state and averages in host memory, and update each rank's pieces there with
                torch's CPU kernels, as in ZeRO-Offload: gradients go to the host, and the pieces of parameters go there
                and back. ``optimizer.state`` has DTensors whose pieces are on the CPU; torch's own ``optimizer.step()``
                would need them on the device. It is for accelerators; on a CPU it just copies.
                ``simulate`` has one memory, so it offloads nothing.
            across: let communication cross the end of a step: the next step waits for what is under way, and updates
                each parameter before it is first read there, with the numbers of its own step. Until then parameters
                and ``optimizer.state`` are those before the update; ``step.finish()``, state dicts, checkpoints,
                ``parallel(...)``, ``step.averaged()`` and ``close`` complete it. ``step.communication`` says what
                crosses. Of several micro-batches the first one updates the parameters. A tensor that you hold is not
                watched: call ``step.finish()`` on all ranks before you read it, or write to it. A write to a trained
                parameter raises at the next step, but one through ``p.data`` or memory that it shares cannot be seen,
                and may be lost.
            machine, time_limit, memory: of the search of the step's plan; by default those of ``parallelize``. The
                whole step keeps within ``memory``, as ``step.memory()`` reports it.

        Raises:
            TypeError: an option is unknown, or the optimizer's step cannot be part of a graph.
            ValueError: an option does not take the value, or the optimizer has other parameters.
        """
        from autopar.step.options import options_of
        from autopar.step.train_step import TrainStep

        made = options_of(options)
        captures = self._calls.captures
        if captures.first_step is not None:
            captures.first_step.settle()  # the step itself compares the optimizer's parameters with the model's
        chosen = captures.pipelined
        if chosen is not None and made.schedule is None:
            count = made.microbatches if "microbatches" in options else chosen.microbatches
            made = replace(made, schedule=chosen, microbatches=count)
        return TrainStep(self, self._calls, optimizer, made)


def _until_searched(model: torch.nn.Module, mesh: Mesh, attrs: Mapping[str, DistAttr]) -> dict[str, DistAttr]:
    """Return layouts for the parameters that the plan leaves open: split over all axes, as they need the least memory.

    The first capture searches their layouts, and moves them.
    """
    layouts = {}
    for name, parameter in model.named_parameters():
        attr = attrs.get(name)
        if attr is None or OPEN in attr.dims:
            attr = DistAttr.replicated(parameter.dim())
            for axis in mesh.names:
                attr = split_over(attr, parameter.shape, mesh, axis)
            layouts[name] = attr
    return layouts


def _returned_like_the_model(
    compiled: Compiled, tensors: list[torch.Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Return the model's own output structure with these tensors.

    Caches among the arguments that forward extends get the returned tensors, too.
    """
    returned = compiled.captured.with_tensors(tensors)
    for position, way in compiled.captured.extended:
        take_over((*args, *kwargs.values())[position], part_at(returned, way))
    return returned
