"""``TrainStep``: a model's whole training step on a mesh. Made by ``parallel.train_step``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from autopar.capture.guards import Call, Variants
from autopar.capture.model_state import Inventory, inventory
from autopar.capture.model_swap import ONE_AT_A_TIME
from autopar.errors import AutoparError
from autopar.inputs import Given
from autopar.report.passes import Reports
from autopar.runtime.whole import Pieces
from autopar.step.average import Averages
from autopar.step.batches import MicroBatches
from autopar.step.compile import MicroBatch, StepUpdate, compile_micro, compile_update, reports_of, step_of
from autopar.step.loss import as_loss
from autopar.step.memory import StepMemory, memory_of_step, with_copies
from autopar.step.micro import SCALE
from autopar.step.options import Options, told
from autopar.step.outputs import returned_like_the_model
from autopar.step.owned import Owned
from autopar.step.program import Step
from autopar.step.runs import OnProcess, Simulated, lowered_of
from autopar.step.state import load_into, state_of
from autopar.step.trainable import refuse_untrainable
from autopar.step.update import GROWTH, Trained
from autopar.torch_private import without_function_modes

if TYPE_CHECKING:
    from autopar.parallel import Key, Parallel

    StepKey = tuple[Key, tuple[str, ...], tuple[str, ...]]


UPDATES_KEPT = 8  # of one micro-batch: options of an optimizer that are no inputs, and change at each step, would make ever more of them
LOOKED_AT = 100  # steps after which a scale on an accelerator is looked at: that waits for the device


class TrainStep:
    """Forward, backward and optimizer of a batch, as one static program.

    Attributes:
        parallel: the model on the mesh; its parameters are updated in place.
        optimizer: whose state lies, as ever, in ``optimizer.state``; what schedulers change is read from its groups at each step.
        options: those of ``parallel.train_step``.
        owned: the optimizer's parameters and pieces of its state.
        steps: how many were taken, skipped ones included.
        grad_norm: of the last step, before it was clipped; ``None`` without ``clip_norm`` and ``grad_norm``.
        skipped: 1 where the gradients of the last step overflowed and nothing was changed, else 0; ``None`` without fp16.
        scaler: the scale of the loss, and the steps since it was changed; ``None`` without fp16.
        averages: the moving averages of the parameters; ``None`` without ``ema``.
    """

    def __init__(self, parallel: Parallel, optimizer: torch.optim.Optimizer, options: Options) -> None:
        self.parallel, self.optimizer, self.options = parallel, optimizer, options
        self.grad_norm: torch.Tensor | None = None
        self.steps = 0
        self.skipped: torch.Tensor | None = None
        self.scaler = list(options.loss_scale.state(parallel.device)) if options.scaled else None
        self.owned = Owned(optimizer, inventory(parallel.module).parameters, parallel.mesh, parallel.job, options.offload, parallel.agreed)
        self.averages = None if options.ema is None else Averages(self.owned, parallel.device)
        self._batches = MicroBatches(parallel.module, parallel.mesh, options.microbatches, parallel.of_the_batch, parallel.settled)
        self._micros: dict[Any, MicroBatch] = {}
        self._variants = Variants()
        self._updates: dict[Any, StepUpdate] = {}
        self._made = 0  # how many programs of both kinds
        self._told_options = told(options)
        self._here, self._simulated = OnProcess(parallel, options.offload), Simulated(parallel)
        self._latest: tuple[MicroBatch, StepUpdate] | None = None
        self._trained: tuple[Trained, ...] = ()  # what the latest update is of

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError("a training step is not copied: its optimizer has the parameters of one model; copy that, and make another step of it")

    def __repr__(self) -> str:
        return f"TrainStep({type(self.parallel.module).__name__} on {self.parallel.mesh}, {type(self.optimizer).__name__}, {self.options})"

    # -- what was captured -----------------------------------------------------------------------------------------

    @property
    def program(self) -> Step:
        """The explicit programs: every transfer is an op. ``RuntimeError`` before a capture."""
        return step_of(*self._current(), self.options.microbatches)

    @property
    def reports(self) -> Reports:
        """What each pass did, of the micro-batch and then of the update; prints as a table. ``RuntimeError`` before a capture."""
        return reports_of(*self._current())

    @property
    def captures(self) -> int:
        """How many micro-batches have been captured: one for each structure, shapes and dtypes of arguments, and mode."""
        return len(self._micros)

    def local(self, rank: int) -> Step:
        """The programs of one rank, in the shapes of its pieces."""
        micro, update = self._current()
        count, copy = (None if placed is None else placed[1][rank] for placed in (micro.count, micro.copy))
        return Step(self.options.microbatches, micro.local[rank], update.local[rank], count, copy)

    def memory(self, rank: int = 0) -> StepMemory:
        """What a rank's memory holds at the peak of each phase, by liveness, and what dominates there; prints as tables."""
        (micro, update), options, on_cpu = self._current(), self.options, self.parallel.device.type == "cpu"
        lowered = lowered_of(*update.last, rank, update.states, options.microbatches, options.offload)
        memory = memory_of_step(update.last[1][rank], lowered, options.microbatches, options.offload, on_cpu)
        if micro.copy is None:
            return memory
        program, local = micro.copy
        return with_copies(memory, local[rank], lowered_of(program, local, rank, (), options.microbatches), on_cpu)

    def _current(self) -> tuple[MicroBatch, StepUpdate]:
        if self._latest is None:
            raise RuntimeError("nothing has been captured yet; run the step once, or call .capture(batch)")
        return self._latest

    def capture(self, *args: Any, **kwargs: Any) -> Step:
        """Capture the step of such a batch and place it, unless that was done before; nothing is computed."""
        with ONE_AT_A_TIME, torch.inference_mode(False), torch.enable_grad():
            given = self._given(args, kwargs)[0]
            self._compiled(given, self._call(given, inventory(self.parallel.module)))
        return self.program

    def _given(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Given]:
        """What each micro-batch is called with."""
        self._refuse_while_averaged()
        return [self.parallel.given(one) for one in self._batches(args, kwargs)]

    def _refuse_while_averaged(self) -> None:
        if self.averages is not None:
            self.averages.refuse_while_lent()

    def _call(self, given: Given, own: Inventory) -> Call:
        """The latest call, whose programs are keyed by its own key, the names of the trained parameters, and of the inputs that were cut."""
        groups = self.owned.groups()
        refuse_untrainable(own, groups)
        key: StepKey = self.parallel.key(given, own), tuple(groups), self._batches.cut
        return self._variants.call(key, own.modules)

    def _compiled(self, given: Given, call: Call) -> tuple[MicroBatch, StepUpdate]:
        key = call.identity
        if not call.known:
            notes = self.parallel.about_recapture(call.key[0], [known[0] for known, _ in self._micros], call.changes)
            with self._noted():
                micro = compile_micro(replace(self.parallel.compiler, numbers=call.numbers), *given.whole(), given.laid, self.options, *call.key[1:], notes)
            self._micros[key] = micro
            for forgotten in self._variants.add(call, micro.captured.guards):
                self._forget(forgotten)
            self._made += 1
        micro = self._micros[key]
        self.parallel.move({name: type.attr for name, type in micro.parameters.items()})
        with without_function_modes():  # those are for the model
            return self._ended(key, micro)

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        """An error of the model's own says, from Python 3.11 on, how the batch was cut before it."""
        try:
            yield
        except Exception as error:
            if self.options.microbatches > 1 and hasattr(error, "add_note") and not isinstance(error, (AutoparError, Warning)):
                error.add_note(self._batches.note())
            raise

    def _ended(self, key: Any, micro: MicroBatch) -> tuple[MicroBatch, StepUpdate]:
        trained = self.owned.trained(micro.parameters, micro.gradients, micro.states)
        if self.averages is not None:
            self.averages.lie(trained)
        if self._latest is not None and self._latest[0] is micro and self._trained is trained:
            return self._latest
        facts = tuple(
            (t.group, t.steps, t.update.function, t.update.states, tuple(t.update.scheduled), tuple(t.update.constants.items()), tuple(t.types.items()))
            for t in trained
        )
        update = self._updates.pop((key, facts), None)
        if update is None:
            update = compile_update(self.parallel.compiler, trained, micro, self.options)
            self._made += 1
            self._forget_an_update([other for other in self._updates if other[0] == key])
        self._updates[key, facts] = update
        self._latest, self._trained = (micro, update), trained
        return self._latest

    def _forget(self, call: Call) -> None:
        """A capture that is not used again, and its updates."""
        micro = self._micros.pop(call.identity)
        programs = [micro.program, *(placed[0] for placed in (micro.count, micro.copy, micro.first) if placed is not None)]
        for key in [key for key in self._updates if key[0] == call.identity]:
            update = self._updates.pop(key)
            programs += [update.last[0], update.program]
        for program in programs:
            self._here.forget(program)
            self._simulated.forget(program)

    def _forget_an_update(self, kept: Sequence[Any]) -> None:
        """Of so many, by their keys, the one that was used longest ago."""
        if len(kept) >= UPDATES_KEPT:
            old = self._updates.pop(kept[0])
            self._here.forget(old.last[0])
            self._simulated.forget(old.program)

    # -- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that a training goes on from, by the user's names: ``model``, ``optimizer``, ``rng``, ``step``; ``ema`` where there is one.

        For ``autopar.checkpoint.save`` and ``load``, or ``torch.distributed.checkpoint``: the tensors are the step's own, DTensors on
        processes. All ranks call it. A step that has not run has no state of the optimizer; ``capture(batch)`` gives it one.
        """
        self._refuse_while_averaged()
        return state_of(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state, of this mesh or another, and of any stage of ZeRO. All ranks call it.

        Raises:
            TypeError: a part is no dict where it should be one; nothing has been changed.
            ValueError: a part is missing, or is of another model or other groups; nothing has been changed.
        """
        self._refuse_while_averaged()
        load_into(self, state)

    @property
    def ema(self) -> dict[str, torch.Tensor] | None:
        """The moving average of each parameter that is trained, by its name: the step's own tensors, DTensors on processes. ``None`` without
        ``ema=``; empty before a capture."""
        return None if self.averages is None else dict(self.averages.tensors)

    def averaged(self) -> AbstractContextManager[None]:
        """A block in which the model has the averages of its weights, to evaluate or to save it; then it has its weights again, bit for bit.

            with step.averaged():
                out = parallel(x)

        All ranks enter it. Buffers stay as they are. There are no steps inside.

        Raises:
            RuntimeError: the step keeps no averages, or the model has them already.
        """
        if self.averages is None:
            raise RuntimeError("the step keeps no averages of its weights; give train_step their decay, as in ema=0.999")
        return self.averages.in_model()

    # -- steps -----------------------------------------------------------------------------------------------------

    def simulate(self, *args: Any, **kwargs: Any) -> Any:
        """One step with all ranks in this process: the loss, or with ``returns=`` the model's outputs. Parameters and the optimizer's state are the full tensors."""
        if self.parallel.job is not None:
            raise RuntimeError("the parameters of this model lie on processes; to simulate, call parallelize in a process that is alone")
        with ONE_AT_A_TIME, torch.inference_mode(False), torch.enable_grad():
            given, own = self._given(args, kwargs), inventory(self.parallel.module)
            self.parallel.refuse_without_values(given[0])
            micro, update = self._compiled(given[0], self._call(given[0], own))
        with torch.inference_mode(False), without_function_modes(), torch.no_grad(), self._looking():
            return self._told(micro, update, *self._simulated(given, own, micro, update, self._state()))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step: the loss of the batch, the same on every rank, without a gradient; with ``returns=`` the model's outputs. All ranks call it alike.

        A batch is a dict, a tuple or a list of the model's arguments, or these themselves.
        """
        parallel = self.parallel
        seat = parallel.compiler.seat
        if seat is None:
            raise RuntimeError(
                f"the mesh ({parallel.mesh}) needs {parallel.mesh.size} processes, and this one is alone; start them with "
                f"torchrun --nproc-per-node {parallel.mesh.size}, or call .simulate(...) to run all ranks in this process"
            )
        with ONE_AT_A_TIME, torch.inference_mode(False), torch.enable_grad():
            given, own = self._given(args, kwargs), inventory(self.parallel.module)
            call = self._call(given[0], own)
            if not call.known:
                parallel.refuse_without_values(given[0])
            known = self._made
            parallel.agree_on("train step", given, call.key[0], call.where + call.numbers_now, f"by {self.owned.told()}{self._told_options}")
            if not call.known:
                parallel.agreed()  # before parameters and states move
            micro, update = self._compiled(given[0], call)
            if self._made != known:
                self._agree_on_programs()
        with torch.inference_mode(False), without_function_modes(), torch.no_grad(), self._looking():
            return self._told(micro, update, *self._here(given, own, micro, update, self._state()))

    def _agree_on_programs(self) -> None:
        """One order of collectives on all ranks: their programs are one. Where they are not, none is kept, so that the next call asks again."""
        try:
            self.parallel.agreed()
            self.parallel.agree_on_program(str(self.program), self._current()[0].captured.guards)
        except RuntimeError:
            self._micros, self._variants, self._updates, self._latest = {}, Variants(), {}, None
            self._here = OnProcess(self.parallel, self.options.offload)
            raise

    def _looking(self) -> contextlib.AbstractContextManager[Any]:
        """For NaN, where the step was told to."""
        return torch.autograd.set_detect_anomaly(True) if self.options.detect_anomaly else contextlib.nullcontext()

    def _state(self) -> Pieces:
        """What a step takes beside parameters, buffers and inputs, by the user's names: the optimizer's state, what schedulers change,
        the averages of weights, the scale of the loss."""
        scaler = {} if self.scaler is None else dict(zip((SCALE, GROWTH), self.scaler, strict=True))
        averages = {} if self.averages is None else self.averages.pieces
        return {**self.owned.pieces, **self.owned.numbers(self.parallel.device), **averages, **scaler}

    def _told(self, micro: MicroBatch, update: StepUpdate, returned: list[torch.Tensor], outputs: list[torch.Tensor]) -> Any:
        """What a step returns, after it: the loss, or the model's outputs; the rest is kept."""
        self.owned.finish()
        self.steps += 1
        found = dict(zip(update.returns, returned, strict=True))
        self.grad_norm, self.skipped = found.get("norm"), found.get("found_inf")
        if self.scaler is not None and (self.scaler[0].is_cpu or self.steps % LOOKED_AT == 0):
            self.options.loss_scale.check(self.scaler[0])
        return as_loss(found["loss"]) if self.options.joins is None else returned_like_the_model(micro.captured, found["loss"], outputs)
