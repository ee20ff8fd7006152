"""Run a model's whole training step on a mesh."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn

import torch

from autopar.capture.arguments import Arguments
from autopar.capture.guards import GuardedCall
from autopar.capture.model_state import ModelState, model_state
from autopar.capture.model_swap import ONE_AT_A_TIME
from autopar.costs.machine import Machine
from autopar.ir.program import Program
from autopar.ir.value_names import GROWTH, SCALE
from autopar.model.calls import Calls
from autopar.model.inputs import CallInputs, Inputs, describe
from autopar.model.wrappers import never_traced
from autopar.page.paged import Paged
from autopar.page.subject import Subject
from autopar.report.passes import PRICE, PassReport, Reports
from autopar.runtime.running.carriers import SimulatedCarrier
from autopar.runtime.running.rank import Tensors
from autopar.runtime.spans import span
from autopar.scheduling.programs.communication import Communication
from autopar.search.solutions.solution import Solution
from autopar.search.solutions.step_choice import StepChoice
from autopar.step.across.crossing import Crossing
from autopar.step.batches.batches import MicroBatches, as_call
from autopar.step.captures import StepCaptures
from autopar.step.choices import Chosen, StepChoices
from autopar.step.compiled import AnyStep
from autopar.step.compiling.loss import as_loss
from autopar.step.compiling.outputs import returned_like_the_model
from autopar.step.options import StepOptions, describe_options
from autopar.step.pipelined.reports.report import Pipeline
from autopar.step.pipelined.solution import PipelinedSolution
from autopar.step.program import RankStep, Step
from autopar.step.reports.memory import StepMemory
from autopar.step.reports.pace import RankPaces, clock_of
from autopar.step.reports.paged import subject_of_step
from autopar.step.reports.recorded_steps import RecordedSteps
from autopar.step.run import Returned, StepRunner, carrier_here
from autopar.step.shown import Shown
from autopar.step.states.average import Averages
from autopar.step.states.optimizer_state import OptimizerState
from autopar.step.states.state import TrainingState
from autopar.step.step_compiler import StepCompiler
from autopar.timetable import Timetable
from autopar.torch_private import without_function_modes
from autopar.verify.channels.classes import RankClass

CHECK_EVERY = 100  # steps between checks of a scale on an accelerator, because a check waits for the device


class TrainStep(RecordedSteps, Paged):
    """Forward, backward and optimizer of a batch, compiled into static programs. Made by ``parallel.train_step``.

    Attributes:
        parallel: the model on the mesh; its parameters are updated in place.
        optimizer: the user's optimizer. ``optimizer.state`` has its state, and each step reads the numbers that
            schedulers change from its groups.
        options: the options of ``parallel.train_step``.
        optimizer_state: the optimizer's parameters and the pieces of its state.
        steps: the number of steps that were taken, skipped ones included.
        grad_norm: the norm of the gradients of the last step before clipping; ``None`` without ``clip_norm`` and
            ``grad_norm``.
        skipped: 1 if the gradients of the last step overflowed and nothing was changed, else 0; ``None`` without fp16.
        scaler: the scale of the loss, and the number of steps since it was changed; ``None`` without fp16.
        averages: the moving averages of the parameters; ``None`` without ``ema``.
    """

    def __init__(
        self, parallel: torch.nn.Module, calls: Calls, optimizer: torch.optim.Optimizer, options: StepOptions
    ) -> None:
        StepCompiler.of(calls, options)  # a schedule that does not fit is refused before anything runs
        self.parallel, self.optimizer, self.options, self._calls = parallel, optimizer, options, calls
        self.grad_norm: torch.Tensor | None = None
        self.steps = 0
        self.skipped: torch.Tensor | None = None
        self.scaler = list(options.loss_scale.state(calls.device)) if options.scaled else None
        self.optimizer_state = OptimizerState(
            optimizer,
            model_state(calls.module).parameters,
            calls.mesh,
            calls.job,
            options.offload,
            calls.agreement.wait,
        )
        self.averages = None if options.ema is None else Averages(self.optimizer_state, options.ema, calls.device)
        self._choices = StepChoices(calls, options, self._way)
        self._shown = Shown(self._choices.latest)
        self._described_options = describe_options(options)
        self._here = StepRunner(calls, lambda: carrier_here(calls, options.offload))
        self._simulated = StepRunner(calls, lambda: SimulatedCarrier(calls.mesh.ranks, calls.device))
        self._crossing = Crossing(calls, self.optimizer_state) if options.across else None
        self._clock = clock_of(calls)
        self._training_state = TrainingState(
            parallel, calls, self.optimizer_state, self.averages, self.scaler, options.loss_scale
        )

    def __deepcopy__(self, memo: dict[int, object]) -> NoReturn:
        raise TypeError(
            "a training step cannot be copied: its optimizer belongs to one model; copy the model, and call "
            "train_step on the copy"
        )

    def __repr__(self) -> str:
        return (
            f"TrainStep({type(self._calls.module).__name__} on {self._calls.mesh}, "
            f"{type(self.optimizer).__name__}, {self.options})"
        )

    @property
    def inputs(self) -> Inputs:
        """What each process passes to a step: the global batch, or its own rows, as ``parallelize`` was told."""
        return self._calls.binding.passed

    # -- what was captured -----------------------------------------------------------------------------------------

    @property
    def program(self) -> Step:
        """The explicit programs, in which every transfer is an op. ``RuntimeError`` before a capture."""
        program: Step = self._current().program
        return program

    @property
    def reports(self) -> Reports:
        """The report of each pass, for the micro-batch and then for the update. Prints as a table.

        ``RuntimeError`` before a capture.
        """
        found = self.solution
        cost = () if found is None else (PassReport(PRICE, 0.0, notes=(found.certificate,)),)
        return self.ranks.after(Reports((*self._current().reports, *cost, *self._calls.captures.about_cache)))

    @property
    def ranks(self) -> RankPaces:
        """How long each rank computes in a step, and which ranks are slower than the others. Prints as a table.

        The figures are medians of the latest steps on processes, on CPUs; without any it says so.
        """
        return RankPaces() if self._clock is None else self._clock.paces()

    @property
    def captures(self) -> int:
        """The number of captured micro-batches.

        They differ in structure, shapes or dtypes of arguments, mode, guarded Python values or parameter groups. Sizes
        that one capture with symbols serves count once.
        """
        return len({capture for way in self._choices for capture in way.captured.micros.traces})

    @property
    def solution(self) -> Solution | PipelinedSolution | None:
        """The searched plan of the step, with its certificate; ``None`` if it was not searched.

        Prints as a table by module. ``RuntimeError`` before a capture.
        """
        words = f"{type(self.optimizer).__name__}{self._described_options}"
        found: Solution | PipelinedSolution | None = self._current().solution(self.choice, words)
        return found

    @property
    def pipeline(self) -> Pipeline | None:
        """The stages and the schedule, which ``.simulate()`` simulates; ``None`` without stages.

        ``RuntimeError`` before a capture.
        """
        return self._current().pipeline

    def page_subject(self, machine: Machine | str | Path | None = None) -> Subject:
        """Return what the page of the step shows, as data. ``RuntimeError`` before a capture."""
        return subject_of_step(self, self._current(), self._calls, machine)

    @property
    def choice(self) -> StepChoice:
        """How the step runs: micro-batches, recomputation, ZeRO; and what was compared, where they were open.

        Prints as a table. ``RuntimeError`` before a capture.
        """
        return self._current().choice(self._shown.way.candidates)

    @property
    def communication(self) -> Communication:
        """How the communication of the whole step is scheduled, with a bound. Prints as a table.

        ``RuntimeError`` before a capture.
        """
        return self._current().communication

    @property
    def rank_classes(self) -> dict[str, list[RankClass]]:
        """The ranks that share a program, with it, by the name of each program that the step runs."""
        return {name: local.classes for name, local in self._current().running.items()}

    @property
    def timetable(self) -> Timetable:
        """What each rank runs, in which order: the programs, stage by stage and micro-batch by micro-batch.

        It has what they hand on, and prints as text that ``Timetable.parse`` reads. Where anything crosses the end of a
        step, it is that of a step behind another one. ``RuntimeError`` before a capture.
        """
        return self._current().runs.timetable

    def local(self, rank: int) -> RankStep:
        """Return what one rank runs, in the order in which it runs: the first micro-batch, the inner ones, and the last
        one joined with the update."""
        programs: RankStep = self._current().local(rank)
        return programs

    def memory(self, rank: int = 0) -> StepMemory:
        """Return the bytes of one rank at the peak of each phase, by liveness. Prints as tables.

        The tables also have the largest tensors at each peak.
        """
        return self._current().memory(rank)

    @property
    def _captured(self) -> StepCaptures:
        return self._choices.latest.captured

    def _way(self, options: StepOptions) -> Chosen:
        """Return a way to run the step, without open options."""
        batches = MicroBatches(self._calls.mesh, options.count, self._calls.binding.of_the_batch)
        captured = StepCaptures(self._calls, self.optimizer_state, self.averages, batches, options, self._forget)
        return Chosen(options, batches, captured)

    def _current(self) -> AnyStep:
        if self._shown.programs is None:
            raise RuntimeError("nothing has been captured yet; run the step once, or call .capture(batch)")
        return self._shown.programs

    def _ran_last(self) -> Step:
        """Return the explicit programs of the latest call."""
        assert self._captured.latest is not None
        return self._captured.latest.program

    def capture(self, *args: object, **kwargs: object) -> Step:
        """Capture the step for such a batch and choose its layouts, unless that was done before. All ranks call it.

        Nothing is computed.
        """
        self._calls.complete()
        with ONE_AT_A_TIME, torch.inference_mode(False), torch.enable_grad():
            inputs = self._inputs(self._agreed(args, kwargs))[0]
            call = self._captured.call(inputs, model_state(self._calls.module))
            self._shown.captured(self._choices.latest, self._captured.compiled(inputs, call))
        return self.program

    def _inputs(self, arguments: Arguments) -> list[CallInputs]:
        """Return the inputs of each micro-batch."""
        return [self._calls.inputs(piece) for piece in self._choices.latest.batches(arguments)]

    def _refuse_while_averaged(self) -> None:
        if self.averages is not None:
            self.averages.refuse_while_lent()

    # -- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, object]:
        """Return the state that a training continues from, by the user's names.

        Its entries are ``model``, ``optimizer``, ``rng``, ``step``, and ``ema`` if the step has averages. It is for
        ``autopar.checkpoint.save`` and ``load``, or ``torch.distributed.checkpoint``, and what they have loaded goes
        back with ``load_state_dict``. The tensors are those of the step, and not copies, but for those with merged
        dims, which are there in a public layout. On processes they are DTensors. All ranks call it. Before the first
        step the optimizer has no state; ``capture(batch)`` makes it.
        """
        self._refuse_while_averaged()
        self.finish()
        return self._training_state.state_dict(self.steps)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Load a state that was saved on this mesh or another, with any stage of ZeRO. All ranks call it.

        Raises:
            TypeError: a part should be a dict and is not; nothing has been changed.
            ValueError: a part is missing, or belongs to another model or other groups; nothing has been changed.
        """
        self._refuse_while_averaged()
        if self._crossing is not None:
            self._crossing.forget_failure()
        self.steps = self._training_state.load(state)

    @property
    def ema(self) -> dict[str, torch.Tensor] | None:
        """The moving average of each parameter, by name; ``None`` without ``ema=``.

        They are the tensors of the step, DTensors on processes; what was never trained is its own average.
        """
        self.finish()
        return None if self.averages is None else self.averages.all()

    def averaged(self) -> AbstractContextManager[None]:
        """Put the averages of the weights into the model while the ``with`` block runs, to evaluate or save it.

        Then the model gets its weights back, bit for bit.

            with step.averaged():
                out = parallel(x)

        All ranks enter it. Buffers do not change. No step runs inside.

        Raises:
            RuntimeError: the step keeps no averages, or the model has them already.
        """
        if self.averages is None:
            raise RuntimeError(
                "the step keeps no averages of its weights; give train_step their decay, as in ema=0.999"
            )
        self.finish()
        return self.averages.in_model()

    def finish(self) -> None:
        """Complete the last step, if something of it is under way (``across=True``). All ranks call it.

        A second call does nothing, and neither does a call without ``across``.

        Raises:
            RuntimeError: a step has failed, or somebody has written to a parameter whose update was under way.
        """
        if self._crossing is not None:
            self._crossing.finish()

    # -- steps -----------------------------------------------------------------------------------------------------

    def simulate(self, *args: object, **kwargs: object) -> Any:
        """Run one step with all ranks in this process, on full tensors.

        Returns the loss, or with ``returns=`` the model's outputs.
        """
        calls = self._calls
        calls.binding.refuse_to_simulate()
        with ONE_AT_A_TIME, torch.inference_mode(False), torch.enable_grad():
            inputs, state = self._inputs(self._agreed(args, kwargs)), model_state(calls.module)
            inputs[0].refuse_without_values(state)
            call = self._captured.call(inputs[0], state)
            self._prepare(self._simulated, call)
            made = self._captured.compiled(inputs[0], call)
        with torch.inference_mode(False), without_function_modes(), torch.no_grad(), self._anomaly_mode():
            return self._finish(made, *self._run(self._simulated, inputs, state, made))

    @never_traced
    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run one step. Returns the loss of the batch, or with ``returns=`` the model's outputs.

        The loss is a number without a gradient that is the same on every rank. The batch is a dict, a tuple or a list
        of the model's arguments, or these arguments themselves. All ranks call it in the same way.

        Raises:
            RuntimeError: a step on stages has failed on this rank before.
        """
        self._here.refuse_after_failure()
        if self._next_steps is not None:
            return self._next_steps.run(self, args, kwargs)
        calls = self._calls
        calls.context()
        if self._clock is not None:
            self._clock.begin()
        with ONE_AT_A_TIME, torch.inference_mode(False), torch.enable_grad():
            arguments = self._agreed(args, kwargs)
            inputs, state = self._inputs(arguments), model_state(calls.module)
            captured = self._captured
            call = captured.call(inputs[0], state)
            if not call.known:
                inputs[0].refuse_without_values(state)
            words = (
                f"train step {describe(arguments, call.key[0])}{call.where}{call.numbers_now}"
                + f" of {len(inputs)} micro-batches" * (len(inputs) > 1)
            )
            self._prepare(self._here, call)
            made_before = captured.made
            calls.agreement.announce(words, inputs, f" by {self.optimizer_state.describe()}{self._described_options}")
            if not call.known:
                calls.agreement.wait()  # before parameters and states move
            made = captured.compiled(inputs[0], call)
            if captured.made != made_before:
                self._agree_on_programs()
        with torch.inference_mode(False), without_function_modes(), torch.no_grad(), self._anomaly_mode(), \
                span(f"step {self.steps + 1}"):  # fmt: skip
            result = self._finish(made, *self._run(self._here, inputs, state, made))
        if self._clock is not None:
            self._clock.end(is_first=captured.made != made_before)
        return result

    def _prepare(self, runner: StepRunner, call: GuardedCall) -> None:
        """Complete the steps that the next one does not complete itself."""
        if self._crossing is None:
            self._calls.complete()
        else:
            self._crossing.prepare(runner, self._captured, call)

    def _run(self, runner: StepRunner, inputs: Sequence[CallInputs], state: ModelState, made: AnyStep) -> Returned:
        """Run a step, which may leave something under way."""
        if self._crossing is None or made.runs.end is None:
            returned, _ = runner(inputs, state, made.micro, made.runs, self._state())
            return returned
        return self._crossing.run(runner, inputs, state, made.micro, made.runs, self._state())

    def _agreed(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Arguments:
        """Return the bound arguments of a batch; where open options are chosen for it, all ranks bring such a batch."""
        self._refuse_while_averaged()
        calls = self._calls
        arguments = calls.bound(*as_call(calls.module, args, kwargs))
        if self._choices.known(arguments) is None:
            whole = calls.inputs(arguments)
            key = calls.key(whole, model_state(calls.module))
            optimizer = f" by {self.optimizer_state.describe()}{self._described_options}"
            calls.agreement.announce(f"choose how to train {describe(arguments, key)}", [whole], optimizer)
            calls.agreement.wait()
            self._choices.choose(arguments)
        return arguments

    def _agree_on_programs(self) -> None:
        """Check that all ranks have the same programs, so that they run their collectives in one order.

        Otherwise drop all programs, so that the next call compares again.
        """
        try:
            self._calls.agreement.wait()
            assert self._captured.latest is not None
            made = self._captured.latest
            self._calls.agreement.compare_programs(lambda: made.text, made.micro.captured.guards)
        except RuntimeError:
            self._captured.clear()
            self._shown.clear()
            self._here.clear()
            raise

    def _forget(self, program: Program) -> None:
        """Drop a program that does not run again."""
        self._here.forget(program)
        self._simulated.forget(program)

    def _anomaly_mode(self) -> contextlib.AbstractContextManager[object]:
        """Look for NaN after each op in the ``with`` block, if the step has the option ``detect_anomaly``."""
        return torch.autograd.set_detect_anomaly(True) if self.options.detect_anomaly else contextlib.nullcontext()

    def _state(self) -> Tensors:
        """Return the tensors that a step takes besides parameters, buffers and inputs, by name.

        They are the optimizer's state, the numbers that schedulers change, the averages of the weights, and the scale
        of the loss.
        """
        scaler = {} if self.scaler is None else dict(zip((SCALE, GROWTH), self.scaler, strict=True))
        averages = {} if self.averages is None else self.averages.pieces
        return {**self.optimizer_state.pieces, **self.optimizer_state.numbers(self._calls.device), **averages, **scaler}

    def _finish(self, made: AnyStep, values: Tensors, outputs: list[torch.Tensor]) -> Any:
        """Count the step, keep its norm and whether it was skipped, and return the loss or the model's outputs."""
        self.optimizer_state.finish(values.get("found_inf"))
        if self.averages is not None:
            self.averages.finish(values.get("found_inf"))
        if self._crossing is not None:
            self._crossing.watch()
        self._shown.ran(self._choices.latest, made)
        self.steps += 1
        self.grad_norm, self.skipped = values.get("norm"), values.get("found_inf")
        if self.scaler is not None and (self.scaler[0].is_cpu or self.steps % CHECK_EVERY == 0):
            self.options.loss_scale.check(self.scaler[0])
        return (
            as_loss(values["loss"])
            if self.options.joins is None
            else returned_like_the_model(made.micro.captured, values["loss"], outputs)
        )
