"""Capture the programs of a training step, keep them by call, and drop those that are not used any more."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopar.cache.codec import Check
from autopar.capture.guards import GuardedCall
from autopar.capture.model_state import ModelState
from autopar.costs.on_hosts import on_hosts
from autopar.errors import AutoparError, add_note
from autopar.gc_pause import gc_paused
from autopar.ir.program import Program
from autopar.model.calls import Calls
from autopar.model.captures import Captures, about_recapture, said_if_late
from autopar.model.compiled import Compiler
from autopar.model.inputs import CallInputs, CallKey
from autopar.plan.plan import SEARCH
from autopar.runtime.processes.agreement import Agreement
from autopar.scheduling.programs.overlap import check_priorities, overlap_of
from autopar.search.transfer_prices.chains import Tables
from autopar.step.batches.batches import MicroBatches
from autopar.step.compiling.compile import compile_micro
from autopar.step.compiling.compile_update import compile_update
from autopar.step.compiling.compiled_step import MicroBatch, StepUpdate
from autopar.step.compiling.ending import Updating
from autopar.step.compiling.memory_limit import trained_of, within_memory
from autopar.step.compiling.trainable import refuse_untrainable
from autopar.step.compiling.update import Trained
from autopar.step.kept_steps import codec_of_micro, codec_of_update
from autopar.step.options import StepOptions
from autopar.step.states.average import Averages
from autopar.step.states.optimizer_state import OptimizerState
from autopar.torch_private import without_function_modes

# the key of the call, the names of the trained parameters, the names of the inputs that are cut
StepKey = tuple[CallKey, tuple[str, ...], tuple[str, ...]]

# for one micro-batch; without a limit, a constant of the optimizer that changes at each step would add an update each
# time
UPDATES_KEPT = 8


class StepCaptures:
    """The programs of a training step, by call.

    Attributes:
        micros: call → the programs of one micro-batch.
        updates: call, and how the optimizer updates each parameter → the programs of the update.
        made: how many micro-batches and updates were compiled.
        latest: the programs of the latest call; ``None`` before the first.
        trained: the parameters of the latest update.

    Args:
        forget: a function that is called with each program that is dropped.
    """

    def __init__(self, calls: Calls, optimizer_state: OptimizerState, averages: Averages | None, batches: MicroBatches,
                 options: StepOptions, forget: Callable[[Program], None]) -> None:  # fmt: skip
        self._calls, self._optimizer_state, self._averages, self._batches, self._options, self._forget = (
            calls,
            optimizer_state,
            averages,
            batches,
            options,
            forget,
        )
        self.made = 0
        self.clear()

    def clear(self) -> None:
        """Drop all captures."""
        self.micros: Captures[MicroBatch] = Captures()
        self.updates: dict[Any, StepUpdate] = {}
        self.latest: tuple[MicroBatch, StepUpdate] | None = None
        self.trained: tuple[Trained, ...] = ()

    def call(self, inputs: CallInputs, state: ModelState) -> GuardedCall:
        """Return the call of a micro-batch, with the values that forward would read now.

        Raises:
            ValueError: a parameter of the optimizer cannot be trained as eager does.
        """
        groups = self._optimizer_state.groups()
        refuse_untrainable(state, groups)
        key: StepKey = self._calls.key(inputs, state), tuple(groups), self._batches.cut
        return self.micros.call(key, state.modules)

    def compiled(self, inputs: CallInputs, call: GuardedCall) -> tuple[MicroBatch, StepUpdate]:
        """Return the programs of a call; capture them if it is new.

        Then the parameters and the optimizer's state move to their layouts.
        """
        compiler = self._calls.compiler
        with said_if_late(compiler.context, self.micros, call, compiler.sizes):
            if not call.known:
                self._capture(inputs, call)
            micro = self.micros[call]
            with gc_paused(), without_function_modes():  # the user's modes are for the model alone
                self._move(micro)
                return self._with_update(call.identity, micro)

    def _move(self, micro: MicroBatch) -> None:
        """Move the parameters to their layouts."""
        self._calls.captures.move({name: type.attr for name, type in micro.parameters.items()})

    def _capture(self, inputs: CallInputs, call: GuardedCall) -> None:
        self.keep(call, self._compiled(inputs, call, self.compiler()))

    def keep(self, call: GuardedCall, micro: MicroBatch) -> None:
        """Keep the programs of a micro-batch."""
        for dropped, captured in self.micros.add(call, micro.captured.guards, micro, micro.found):
            self._drop(dropped, captured)
        self.made += 1

    def tried(
        self,
        inputs: CallInputs,
        call: GuardedCall,
        below: float,
        time_limit: float,
        tables: Tables,
        ranks: Agreement | None,
        check: Check | None,
        *,
        same_numbers: bool,
    ) -> tuple[MicroBatch, StepUpdate]:
        """Return the programs of a call, which are not kept; nothing moves.

        Args:
            below: only plans whose search finds less nanoseconds are wanted.
            time_limit: seconds of the search.
            tables: prices of transfers that several searches share.
            ranks: those that agree on the plan; ``None``: this process plans alone.
            check: looks at the capture.
            same_numbers: whether several micro-batches must have the numbers of the whole batch.

        Raises:
            NotCheaper: no plan costs less than ``below``.
            OtherNumbers: the micro-batches would have other numbers than the whole batch.
        """
        compiler, updates = self.compiler().planned_by(ranks, check), self.optimizer_updates()
        compiler = replace(
            compiler, cache=None, planner=replace(compiler.planner, below=below, time_limit=time_limit, tables=tables)
        )
        micro = self._compiled(inputs, call, compiler, same_numbers)
        trained = trained_of(micro, updates)
        return micro, compile_update(compiler, trained, micro, self._options)

    def _compiled(
        self, inputs: CallInputs, call: GuardedCall, compiler: Compiler, same_numbers: bool = False
    ) -> MicroBatch:
        key, *_ = call.key
        calls = self._calls
        compiler = compiler.like(self.micros.plan(call.key), call.numbers)
        known = [known for known, *_ in self.micros.keys]
        notes = [] if compiler.serves(inputs) else about_recapture(key, known, call.changes, calls.captures.recapture)
        with self._with_note():
            return self._compile(inputs, call, compiler, notes, same_numbers)

    def _compile(
        self, inputs: CallInputs, call: GuardedCall, compiler: Compiler, notes: Sequence[str], same_numbers: bool
    ) -> MicroBatch:
        _, trained, cut = call.key
        updates, options = self.optimizer_updates(), self._options

        def make(compiler: Compiler) -> MicroBatch:
            return within_memory(
                lambda compiler: compile_micro(
                    compiler, inputs, options, trained, updates, cut, notes, same_numbers=same_numbers
                ),
                compiler,
                updates,
                options,
                self._calls.device.type == "cpu",
            )

        micro, digest = compiler.once(make, lambda: codec_of_micro(
            "micro", MicroBatch, compiler, inputs, options, call.key, updates, notes))  # fmt: skip
        return replace(micro, digest=digest)

    def optimizer_updates(self) -> Mapping[str, Updating]:
        """Return how the optimizer updates each parameter."""
        return self._optimizer_state.updates()

    def compiler(self) -> Compiler:
        """Return the compiler of the calls, with the options of the step that override its own."""
        compiler, options = self._calls.compiler, self._options
        planner = compiler.planner
        machine = None if options.machine is None else on_hosts(options.machine, planner.hosts)
        planner = replace(
            planner,
            machine=machine or planner.machine,
            time_limit=planner.time_limit if options.time_limit is None else options.time_limit,
            memory=planner.memory if options.memory is None else options.memory,
        )
        plan = SEARCH if compiler.plan is None else compiler.plan
        overlap = compiler.overlap
        if options.overlap is not None:
            overlap = overlap_of(options.overlap, overlap.issue)
        return replace(compiler, planner=planner, machine=machine or compiler.machine, plan=plan,
                       overlap=overlap, figures=options.profile)  # fmt: skip

    @contextlib.contextmanager
    def _with_note(self) -> Iterator[None]:
        """Add a note to errors of the model that says how the batch was cut."""
        try:
            yield
        except Exception as error:
            if self._options.count > 1 and not isinstance(error, (AutoparError, Warning)):
                add_note(error, self._batches.note())
            raise

    def _with_update(self, key: Any, micro: MicroBatch) -> tuple[MicroBatch, StepUpdate]:
        trained = self._optimizer_state.trained(micro.parameters, micro.gradients, micro.states)
        if self._averages is not None:
            self._averages.place(trained)
        if self.latest is not None and self.latest[0] is micro and self.trained is trained:
            return self.latest
        facts = tuple(
            (
                t.group,
                t.steps,
                t.update.function,
                t.update.states,
                tuple(t.update.scheduled),
                tuple(t.update.constants.items()),
                tuple(t.types.items()),
            )
            for t in trained
        )
        update = self.updates.pop((key, facts), None)
        if update is None:
            compiler = self.compiler()
            update = self._compile_update(compiler, trained, micro)
            check_priorities(compiler.overlap, [*self._programs(micro), *self._programs_of(update)])
            self.made += 1
            self._drop_an_update([other for other in self.updates if other[0] == key])
        self.updates[key, facts] = update
        self.latest, self.trained = (micro, update), trained
        return self.latest

    def _compile_update(self, compiler: Compiler, trained: Sequence[Trained], micro: MicroBatch) -> StepUpdate:
        update, _ = compiler.once(
            lambda compiler: compile_update(compiler, trained, micro, self._options),
            lambda: codec_of_update("update", StepUpdate, compiler, micro.digest, trained, self._options),
        )
        return update

    def _drop(self, call: GuardedCall, micro: MicroBatch) -> None:
        """Drop a capture and its updates."""
        programs = self._programs(micro)
        for key in [key for key in self.updates if key[0] == call.identity]:
            programs += self._programs_of(self.updates.pop(key))
        for program in programs:
            self._forget(program)

    def _drop_an_update(self, keys: Sequence[Any]) -> None:
        """Drop the update that was used longest ago, if there are too many with these keys."""
        if len(keys) >= UPDATES_KEPT:
            for program in self._programs_of(self.updates.pop(keys[0])):
                self._forget(program)

    @staticmethod
    def _programs(micro: MicroBatch) -> list[Program]:
        """Return the explicit programs of a micro-batch."""
        return [micro.program, *(placed[0] for placed in (micro.count, micro.copy, micro.first) if placed is not None)]

    @staticmethod
    def _programs_of(update: StepUpdate) -> list[Program]:
        """Return the explicit programs of an update."""
        return [update.last[0], update.program]
