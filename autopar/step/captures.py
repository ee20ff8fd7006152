"""Capture the programs of a training step, keep them by call, and drop those that are not used any more."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace

from autopar.cache.codec import Check, Codec
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
from autopar.step.compiled import AnyStep
from autopar.step.compiling.compiled_step import CompiledMicro
from autopar.step.compiling.ending import Updating
from autopar.step.compiling.memory_limit import trained_of
from autopar.step.compiling.request import MicroRequest
from autopar.step.compiling.trainable import refuse_untrainable
from autopar.step.compiling.update import Trained
from autopar.step.options import StepOptions
from autopar.step.states.average import Averages
from autopar.step.states.optimizer_state import OptimizerState
from autopar.step.step_compiler import StepCompiler
from autopar.torch_private import without_function_modes

# the key of the call, the names of the trained parameters, the names of the inputs that are cut
StepKey = tuple[CallKey, tuple[str, ...], tuple[str, ...]]

UpdateKey = tuple[Hashable, Hashable]  # the call, and how the optimizer updates each parameter

# for one micro-batch; without a limit, a constant of the optimizer that changes at each step would add an update each
# time
UPDATES_KEPT = 8


class StepCaptures:
    """The programs of a training step, by call.

    Attributes:
        how: how they are compiled.
        micros: call → the programs of one micro-batch.
        updates: call, and how the optimizer updates each parameter → the programs of the step.
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
        self.how = StepCompiler.of(calls, options)
        self.made = 0
        self.clear()

    def clear(self) -> None:
        """Drop all captures."""
        self.micros: Captures[CompiledMicro] = Captures()
        self.updates: dict[UpdateKey, AnyStep] = {}
        self.latest: AnyStep | None = None
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

    def compiled(self, inputs: CallInputs, call: GuardedCall) -> AnyStep:
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

    def _move(self, micro: CompiledMicro) -> None:
        """Move the parameters to their layouts, or to their stages."""
        if micro.stage_homes is None:
            self._calls.captures.move({name: type.attr for name, type in micro.parameters.items()})
        else:
            self._calls.captures.move_to_stages(micro.stage_homes)

    def _capture(self, inputs: CallInputs, call: GuardedCall) -> None:
        self.keep(call, self._compiled(inputs, call, self.compiler()))

    def keep(self, call: GuardedCall, micro: CompiledMicro) -> None:
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
    ) -> AnyStep:
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
        return self.how.step(compiler, trained_of(micro, updates), micro, self._options, self._calls)

    def _compiled(
        self, inputs: CallInputs, call: GuardedCall, compiler: Compiler, same_numbers: bool = False
    ) -> CompiledMicro:
        key, *_ = call.key
        calls = self._calls
        compiler = compiler.like(self.micros.plan(call.key), call.numbers)
        known = [known for known, *_ in self.micros.keys]
        notes = [] if compiler.serves(inputs) else about_recapture(key, known, call.changes, calls.captures.recapture)
        with self._with_note():
            return self.how.micro(compiler, self._request(inputs, call, self._options, notes, same_numbers))

    def _request(
        self, inputs: CallInputs, call: GuardedCall, options: StepOptions, notes: Sequence[str] = (),
        same_numbers: bool = False,
    ) -> MicroRequest:  # fmt: skip
        _, trained, cut = call.key
        return MicroRequest(inputs, options, trained, self.optimizer_updates(), cut, notes, same_numbers)

    def codec_of_choice(
        self, compiler: Compiler, inputs: CallInputs, call: GuardedCall, options: StepOptions
    ) -> Codec[CompiledMicro]:
        """Return how the programs of a micro-batch are kept that were chosen. ``options``: with open ones."""
        return self.how.codec(compiler, self._request(inputs, call, options), "choice")

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

    def _with_update(self, key: Hashable, micro: CompiledMicro) -> AnyStep:
        trained = self._optimizer_state.trained(micro.parameters, micro.gradients, micro.states)
        if self._averages is not None:
            self._averages.place(trained)
        if self.latest is not None and self.latest.micro is micro and self.trained is trained:
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
        made = self.updates.pop((key, facts), None)
        if made is None:
            compiler = self.compiler()
            made = self.how.step(compiler, trained, micro, self._options, self._calls)
            made.check_memory()
            check_priorities(compiler.overlap, [*micro.explicit, *made.update.explicit])
            self.made += 1
            self._drop_an_update([other for other in self.updates if other[0] == key])
        self.updates[key, facts] = made
        self.latest, self.trained = made, trained
        return self.latest

    def _drop(self, call: GuardedCall, micro: CompiledMicro) -> None:
        """Drop a capture and its updates."""
        programs = micro.explicit
        for key in [key for key in self.updates if key[0] == call.identity]:
            programs += self.updates.pop(key).update.explicit
        for program in programs:
            self._forget(program)

    def _drop_an_update(self, keys: Sequence[UpdateKey]) -> None:
        """Drop the update that was used longest ago, if there are too many with these keys."""
        if len(keys) >= UPDATES_KEPT:
            for program in self.updates.pop(keys[0]).update.explicit:
                self._forget(program)
