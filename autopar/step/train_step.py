"""``TrainStep``: a model's whole training step on a mesh. Made by ``parallel.train_step``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from autopar.arguments import bind_arguments
from autopar.borrow import ONE_AT_A_TIME
from autopar.inputs import Given
from autopar.inventory import inventory
from autopar.program import Program
from autopar.report.passes import Reports
from autopar.runtime.pieces import cut, join
from autopar.runtime.whole import Pieces, ProcessRun, Results, SimulatedRun
from autopar.step.batches import Call, as_call, micro_batches
from autopar.step.compile import MicroBatch, StepUpdate, compile_micro, compile_update, reports_of, step_of
from autopar.step.micro import COUNT, LOSS, gradient_name
from autopar.step.options import Options
from autopar.step.owned import Owned
from autopar.step.program import Step
from autopar.step.update import LEARNING_RATE, Trained
from autopar.step.zero import STAGES
from autopar.torch_private import without_function_modes

if TYPE_CHECKING:
    from autopar.parallel import Parallel


class TrainStep:
    """Forward, backward and optimizer of a batch, as one static program.

    Attributes:
        parallel: the model on the mesh; its parameters are updated in place.
        optimizer: whose state lies, as ever, in ``optimizer.state``; learning rates are read from its groups at each step.
        options: those of ``parallel.train_step``.
        grad_norm: of the last step, before it was clipped; ``None`` without ``clip_norm``.
    """

    def __init__(self, parallel: Parallel, optimizer: torch.optim.Optimizer, options: Options) -> None:
        self.parallel, self.optimizer, self.options = parallel, optimizer, options
        self.grad_norm: torch.Tensor | None = None
        self._owned = Owned(optimizer, inventory(parallel.module).parameters, parallel.mesh, parallel.job)
        self._micros: dict[Any, MicroBatch] = {}
        self._updates: dict[Any, StepUpdate] = {}
        self._runs: dict[int, Any] = {}
        self._latest: tuple[MicroBatch, StepUpdate] | None = None

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
        count = None if micro.count is None else micro.count[1][rank]
        return Step(self.options.microbatches, micro.local[rank], update.local[rank], count)

    def _current(self) -> tuple[MicroBatch, StepUpdate]:
        if self._latest is None:
            raise RuntimeError("nothing has been captured yet; run the step once, or call .capture(batch)")
        return self._latest

    def capture(self, *args: Any, **kwargs: Any) -> Step:
        """Capture the step of such a batch and place it, unless that was done before; nothing is computed."""
        with ONE_AT_A_TIME:
            self._compiled(self._calls(args, kwargs))
        return self.program

    def _calls(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Call]:
        model = self.parallel.module
        return micro_batches(model, as_call(model, args, kwargs), self.options.microbatches)

    def _compiled(self, calls: list[Call]) -> tuple[MicroBatch, StepUpdate, tuple[Trained, ...]]:
        given = self.parallel.given(*calls[0])
        groups = self._owned.groups()
        key = self.parallel.key(given), tuple(groups)
        if key not in self._micros:
            args, kwargs = given.whole()
            self._micros[key] = compile_micro(self.parallel.compiler, args, kwargs, given.laid, self.options, list(groups))
        micro = self._micros[key]
        if "parameter" in STAGES[self.options.zero]:
            self.parallel.move({name: type.attr for name, type in micro.parameters.items()})
        with without_function_modes():  # those are for the model
            return self._ended(key, micro)

    def _ended(self, key: Any, micro: MicroBatch) -> tuple[MicroBatch, StepUpdate, tuple[Trained, ...]]:
        trained = self._owned.trained(micro.parameters, micro.gradients, micro.states)
        facts = tuple((t.group, t.steps, t.update.function, t.update.states, tuple(t.update.constants.items()), tuple(t.types.items())) for t in trained)
        if (key, facts) not in self._updates:
            self._updates[key, facts] = compile_update(self.parallel.compiler, trained, micro.loss, micro.captured.device, self.options)
        self._latest = micro, self._updates[key, facts]
        return *self._latest, trained

    # -- steps -----------------------------------------------------------------------------------------------------

    def simulate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """One step with all ranks in this process: the loss. Parameters and the optimizer's state are the full tensors."""
        if self.parallel.job is not None:
            raise RuntimeError("the parameters of this model lie on processes; to simulate, call parallelize in a process that is alone")
        with ONE_AT_A_TIME:
            calls = self._calls(args, kwargs)
            micro, update, _ = self._compiled(calls)
        with without_function_modes(), torch.no_grad():
            return self._simulate(calls, micro, update)

    def _simulate(self, calls: list[Call], micro: MicroBatch, update: StepUpdate) -> torch.Tensor:
        run, end = self._simulated(micro.program, micro.local), self._simulated(update.program, update.local)
        own = inventory(self.parallel.module)
        full = {name: tensor.detach() for name, tensor in (*own.parameters, *own.buffers)}
        ranks = self.parallel.mesh.ranks
        held = {rank: {**_cut(run, full, rank), **_zeros(run, rank)} for rank in ranks}
        inputs = [dict(zip((a := bind_arguments(self.parallel.module, *call)).names, a.tensors, strict=True)) for call in calls]
        counts = self._simulated_counts(micro, inputs, full)
        for given in inputs:
            seed = self.parallel.seed(micro.captured)
            values = {}
            for rank in ranks:
                values[rank] = {**held[rank], **_cut(run, given, rank), **counts[rank]}
                if seed:
                    values[rank][run.named["seed"]] = seed[0]
            for rank, (_, states) in run(values).items():
                held[rank] |= states
        for name, of in run.named.items():
            if of in run.states and name in full:
                full[name].copy_(_join(run, held, of))
        pieces = {**full, **self._owned.pieces, **self._rates(update.program, torch.device("cpu"))}
        results = {}
        for rank in ranks:
            handed = {end.named[name]: held[rank][of] for name, of in run.named.items() if name in end.named and name not in pieces}
            results[rank] = {**_cut(end, pieces, rank), **handed}
        made = end(results)
        for name, of in end.named.items():
            if of in end.states:
                pieces[name].copy_(_join(end, {rank: states for rank, (_, states) in made.items()}, of))
        self._owned.finish()
        returned = [join({rank: own[k] for rank, (own, _) in made.items()}, type, name) for k, (name, type) in enumerate(end.interface.returned)]
        return self._told(update, returned)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """One step: the loss of the batch, the same on every rank, without a gradient. All ranks call it alike.

        A batch is a dict, a tuple or a list of the model's arguments, or these themselves.
        """
        parallel = self.parallel
        seat = parallel.compiler.seat
        if seat is None:
            raise RuntimeError(
                f"the mesh ({parallel.mesh}) needs {parallel.mesh.size} processes, and this one is alone; start them with "
                f"torchrun --nproc-per-node {parallel.mesh.size}, or call .simulate(...) to run all ranks in this process"
            )
        with ONE_AT_A_TIME:
            calls = self._calls(args, kwargs)
            given = [parallel.given(*call) for call in calls]
            parallel.agree_on("train step", given)
            micro, update, _ = self._compiled(calls)
        with without_function_modes(), torch.no_grad():
            return self._run(given, micro, update)

    def _run(self, given: list[Given], micro: MicroBatch, update: StepUpdate) -> torch.Tensor:
        parallel = self.parallel
        rank = parallel.compiler.seat.rank  # type: ignore[union-attr]
        run, end = self._lowered(micro.program, micro.local), self._lowered(update.program, update.local)
        own = inventory(parallel.module)
        pieces = [parallel.pieces(one, own, run.interface, rank)[0] for one in given]
        of_model = dict(zip(run.interface.given, pieces[0], strict=False))
        state = {name: of_model[name] for name in list(run.interface.given)[: len(own.parameters) + len(own.buffers)]}
        inputs = [dict(list(zip(run.interface.given, some, strict=False))[len(state) :]) for some in pieces]
        counts = self._counts(micro, run, inputs, state)
        sums = _zeros(run, rank)
        for values in inputs:
            seed = dict(zip(["seed"], parallel.seed(micro.captured), strict=False))
            _, made = run({**state, **values, **counts, **sums, **{run.named[name]: tensor for name, tensor in seed.items()}})
            for of, tensor in made.items():
                if of in sums:
                    sums[of] = tensor
                else:
                    state[of].copy_(tensor)
        named = {name: state[of] for name, of in run.named.items() if of in state}
        named |= self._owned.pieces | self._rates(update.program, micro.captured.device) | {name: sums[of] for name, of in run.named.items() if of in sums}
        returned, made = end({of: named[name] for name, of in end.named.items()})
        for name, of in end.named.items():
            if of in made:
                named[name].copy_(made[of])
        self._owned.finish()
        return self._told(update, returned)

    def _counts(self, micro: MicroBatch, to: ProcessRun, inputs: list[Pieces], state: Pieces) -> Pieces:
        """What the micro-batches divide by, if they are told."""
        if micro.count is None:
            return {}
        run = self._lowered(*micro.count)
        given = {f"{of}_{k}": tensor for k, values in enumerate(inputs) for of, tensor in values.items()}
        returned, _ = run({of: (state | given)[of] for of in run.interface.given})
        return {to.named[f"{COUNT}.{k}"]: count for k, count in enumerate(returned)}

    def _lowered(self, program: Program, local: Any) -> ProcessRun:
        if id(program) not in self._runs:
            seat, device = self.parallel.compiler.seat, torch.device("cpu") if self.parallel.job is None else self.parallel.job.device
            assert seat is not None
            gate = None if seat.agreement is None else seat.agreement.finish
            self._runs[id(program)] = ProcessRun(program, local[seat.rank], seat.groups, gate, device)
        return self._runs[id(program)]

    def _simulated_counts(self, micro: MicroBatch, inputs: list[dict[str, torch.Tensor]], full: dict[str, torch.Tensor]) -> dict[int, Pieces]:
        ranks = self.parallel.mesh.ranks
        if micro.count is None:
            return {rank: {} for rank in ranks}
        run, to = self._simulated(*micro.count), self._simulated(micro.program, micro.local)
        given = {f"{name}.{k}": tensor for k, tensors in enumerate(inputs) for name, tensor in tensors.items()}
        made = run({rank: _cut(run, {**full, **given}, rank) for rank in ranks})
        return {rank: {to.named[f"{COUNT}.{k}"]: count for k, count in enumerate(returned)} for rank, (returned, _) in made.items()}

    def _simulated(self, program: Program, local: Any) -> SimulatedRun:
        if id(program) not in self._runs:
            self._runs[id(program)] = SimulatedRun(program, local)
        return self._runs[id(program)]

    def _rates(self, update: Program, device: torch.device) -> Pieces:
        return {f"{LEARNING_RATE}.{k}": torch.tensor(rate, dtype=torch.float64, device=device) for k, rate in enumerate(self._owned.rates())}

    def _told(self, update: StepUpdate, returned: list[torch.Tensor]) -> torch.Tensor:
        """The loss; the rest is kept."""
        found = dict(zip(update.returns, returned, strict=True))
        self.grad_norm = found.get("norm")
        return found["loss"]


def _cut(run: SimulatedRun, tensors: Mapping[str, torch.Tensor], rank: int) -> Pieces:
    """The pieces of those tensors that a program takes, on one rank."""
    at = run.interface.mesh.coordinates(rank)
    return {of: cut(tensors[name].detach(), run.interface.types[of], at).clone() for name, of in run.named.items() if name in tensors}


def _zeros(run: Results, rank: int) -> Pieces:
    """What the sums of gradients and losses begin with, on one rank."""
    mesh = run.interface.mesh
    found = {}
    for name, of in run.named.items():
        if of in run.states and (name == LOSS or name.endswith(gradient_name(""))):
            type = run.interface.types[of]
            found[of] = torch.zeros(type.attr.local_shape(type.shape, mesh, mesh.coordinates(rank)), dtype=type.dtype)
    return found


def _join(run: SimulatedRun, held: Mapping[int, Pieces], of: str) -> torch.Tensor:
    return join({rank: own[of] for rank, own in held.items()}, run.interface.types[of], of)
