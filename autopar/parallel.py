"""``Parallel``: a model on a mesh, to be used as the model itself."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from autopar.capture import Captured
from autopar.capture.arguments import Arguments, Signature, bind_arguments, difference, signature_of
from autopar.capture.guards import AttributesOfModule, Call, Change, Guards, Original, Variants
from autopar.capture.model_state import Inventory, Named, inventory
from autopar.capture.model_swap import ONE_AT_A_TIME
from autopar.compiled import Compiled, Compiler, Seat
from autopar.initialize import Init, initialize
from autopar.inputs import Given, Shapes, given_call, piece_of
from autopar.ir.dtensor import edge_of, placements_of
from autopar.ir.layout import DistAttr
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.ir.structure import part_at, take_over, unflatten
from autopar.plan.constraints import layouts_of
from autopar.plan.plan import Plan, of_the_batch
from autopar.report.passes import Reports
from autopar.report.transfers import Transfers, transfers_of
from autopar.runtime.dtensors import full_tensor
from autopar.runtime.interface import Interface
from autopar.runtime.processes.agreement import Agreement
from autopar.runtime.processes.job import Job
from autopar.runtime.seeds import step_seed
from autopar.shards import for_everyone, for_model, is_dtensor, local_of, relaid, sharded
from autopar.torch_private import dtensor_like, is_transformed
from autopar.uneven import with_like_pieces
from autopar.weights import load_weights
from autopar.wrappers import refuse_compile, refuse_composable, refuse_ddp

if TYPE_CHECKING:
    from autopar.step.train_step import TrainStep

OUTPUTS = ("sharded", "global")
Key = tuple[Signature, tuple[Any, ...]]

ROOT = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")  # what a module's children are kept in


class Parallel(AttributesOfModule):
    """A model on a mesh. Made by ``parallelize``.

    A module with the model's own children, attributes and names: ``named_parameters``, ``state_dict``, ``train``, ``requires_grad_``
    and the like are the model's, and ``parallel.beta = 2.0`` sets the attribute that forward reads. On processes its parameters are DTensors, copies of the model's; without, they are the
    model's own, and ``simulate`` runs it.

    Attributes:
        module: the model; on processes, the copy of it whose parameters are DTensors.
        mesh: the mesh.
        job: the processes of the mesh; ``None`` in a process that is alone.
        compiler: how its calls are captured and placed.
    """

    OWN = frozenset({"module", "mesh", "job", "compiler"})

    def __init__(self, model: torch.nn.Module, mesh: Mesh, plan: Plan | None = None, *, job: Job | None = None,
                 strict: bool = False, inputs: str = "global", outputs: str = "sharded", recapture: bool = True,
                 random: str = "parallel") -> None:  # fmt: skip
        super().__init__()
        self._plan, self.job, self._inputs, self._recapture = plan, job, inputs, recapture
        self.mesh = mesh
        agreement = None if job is None or mesh.size == 1 else Agreement(job.control, mesh)
        seat = None
        if job is not None or mesh.size == 1:
            seat = Seat(mesh.ranks[0], {}) if job is None else Seat(job.rank, job.groups, agreement)
        attrs = layouts_of(plan, model, mesh)
        module = model if job is None else sharded(model, attrs, mesh, job)
        self._original = None if job is None else Original(model, module)
        self._homes = {name: edge_of(attrs.get(name, DistAttr.replicated(p.dim())), mesh, p.shape, strided=True) for name, p in model.named_parameters()}
        self._over(module, Compiler(module, mesh, plan, seat, strict, outputs == "global", random))

    def _over(self, module: torch.nn.Module, compiler: Compiler) -> None:
        """Nothing of it is captured."""
        self.__dict__ |= {"module": module, **{key: vars(module)[key] for key in ROOT}}  # not as a child: names stay
        self.compiler = compiler
        self._compiled: dict[Any, Compiled] = {}
        self._variants = Variants()
        self._latest: Compiled | None = None
        self._layouts: dict[tuple[tuple[str, tuple[int, ...]], ...], Mapping[str, DistAttr]] = {}
        self._of_the_batch: dict[tuple[tuple[str, int], ...], Mapping[str, bool]] = {}
        self._known = dict(module.named_parameters())

    def __deepcopy__(self, memo: dict[int, Any]) -> Parallel:
        """The same of a copy of the module, as for an average of its weights; all ranks copy alike."""
        new = copy.copy(self)
        memo[id(self)] = new
        seat = self.compiler.seat
        if seat is not None and seat.agreement is not None:
            seat = replace(seat, agreement=Agreement(self.job.control, self.mesh))  # type: ignore[union-attr]
        module, new._original = copy.deepcopy(self.module, memo), None
        new._over(module, replace(self.compiler, model=module, seat=seat))
        return new

    def __copy__(self) -> Parallel:
        new = type(self).__new__(type(self))
        new.__dict__ |= vars(self)
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a model on a mesh lies on its processes and is not pickled; save its state_dict()")

    def __getattr__(self, name: str) -> Any:
        refuse_ddp(name)
        return super().__getattr__(name)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The model's own."""
        refuse_composable(self)
        return super().named_parameters(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Parallel({type(self.module).__name__} on {self.mesh})"

    @property
    def training(self) -> bool:  # the model's own flag
        return self.module.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "module" in self.__dict__:
            self.module.training = mode

    @property
    def device(self) -> torch.device:
        """Where this process's pieces lie."""
        if self.job is not None:
            return self.job.device
        return next((p.device for p in self.module.parameters() if not p.is_meta), torch.device("cpu"))

    @property
    def _agreement(self) -> Agreement | None:
        return self.compiler.seat and self.compiler.seat.agreement

    # -- what was captured -----------------------------------------------------------------------------------------

    @property
    def program(self) -> Program:
        """The explicit program: every transfer is an op. ``RuntimeError`` before a capture."""
        return self._current().program

    @property
    def reports(self) -> Reports:
        """What each pass did; prints as a table. ``RuntimeError`` before a capture."""
        return self._current().reports

    @property
    def transfers(self) -> Transfers:
        """What was inserted where, and the bytes it moves; prints as a table, ``.lines`` as one with a line for each.
        ``RuntimeError`` before a capture."""
        return transfers_of(self.program, "cpu" if self.job is None else self.job.device)

    @property
    def captures(self) -> int:
        """How many steps have been captured: one for each structure, shapes and dtypes of arguments, mode, and values that forward reads."""
        return len(self._compiled)

    def local(self, rank: int) -> Program:
        """The program of one rank, in the shapes of its pieces. Ranks with pieces of equal sizes share one graph."""
        return self._current().local[rank]

    def _current(self) -> Compiled:
        if self._latest is None:
            call = "call it" if self.compiler.seat else "call .simulate(x)"
            raise RuntimeError(f"nothing has been captured yet; give parallelize an example=(x,), or {call} once")
        return self._latest

    # -- calls -----------------------------------------------------------------------------------------------------

    def capture(self, *args: Any, **kwargs: Any) -> Compiled:
        """Capture a call of these shapes and place it, unless that was done before.

        Raises:
            RuntimeError: it was not, and ``recapture=False``.
        """
        given = self.given(self.settled(bind_arguments(self.module, args, kwargs)))
        return self._captured(given, self._call(given, inventory(self.module)))

    def given(self, arguments: Arguments) -> Given:
        """The tensors of a call, and how they lie."""
        return given_call(arguments, "global" if arguments.whole else self._inputs, self.mesh, self._layouts_of)

    def settled(self, arguments: Arguments) -> Arguments:
        """The arguments of a call, of the whole batch where the ranks bring pieces of unlike sizes. All ranks call it."""
        if self._inputs == "global" or self._agreement is None:
            return arguments
        return with_like_pieces(arguments, self.mesh, self._agreement, self._layouts_of)

    def _layouts_of(self, shapes: Shapes) -> Mapping[str, DistAttr]:
        """What the plan says of inputs of such shapes."""
        key = tuple(shapes.items())
        if key not in self._layouts:
            self._layouts[key] = layouts_of(self._plan, self.module, self.mesh, shapes)
        return self._layouts[key]

    def of_the_batch(self, inputs: Mapping[str, int]) -> Mapping[str, bool]:
        """Inputs, with their numbers of dims, that the plan names → whether it says that dim 0 is the batch."""
        key = tuple(inputs.items())
        if key not in self._of_the_batch:
            own = inventory(self.module)
            others = {name for name, _ in (*own.parameters, *own.buffers)}  # of which the plan speaks, where an input is called alike
            self._of_the_batch[key] = of_the_batch(self._plan, self.mesh, {name: dims for name, dims in inputs.items() if name not in others})
        return self._of_the_batch[key]

    def key(self, given: Given, own: Inventory) -> Key:
        """What a capture of a call is keyed by, beside the values that forward reads."""
        if self._original is not None:
            self._original.take_over()
        return signature_of(own, given.arguments), given.facts

    def _call(self, given: Given, own: Inventory) -> Call:
        return self._variants.call(self.key(given, own), own.modules)

    def agree_on(self, what: str, given: Sequence[Given], key: Key, where: str, numbers: str = "") -> None:
        """Tell the other ranks that this one makes a call, of such tensors and numbers; they are compared before its first collective."""
        if self._agreement is not None:
            call = f"{what} {_told(given[0], key)}{where}" + f" and {len(given) - 1} more" * (len(given) > 1)
            self._agreement.begin(f"{call} {numbers}".rstrip(), [brought for one in given for brought in one.brought()], call)

    def agreed(self) -> None:
        """The other ranks make the same call; ``RuntimeError`` otherwise."""
        if self._agreement is not None:
            self._agreement.finish()

    def agree_on_program(self, text: str, guards: Guards) -> None:
        """The other ranks have captured the same program, of the same values; ``RuntimeError`` otherwise."""
        if self._agreement is not None:
            digest = hashlib.sha256(text.encode()).hexdigest()[:16]
            self._agreement.compare(digest, {guard.place.words: guard.text for guard in guards.found})
            self._agreement.begin(f"capture a program with the digest {digest}")
            self._agreement.finish()

    def _captured(self, given: Given, call: Call) -> Compiled:
        if not call.known:
            notes = self.about_recapture(call.key, [key for key, _ in self._compiled], call.changes)
            args, kwargs = given.whole()
            compiled = replace(self.compiler, numbers=call.numbers).compile(args, kwargs, given.laid, notes)
            self.agree_on_program(str(compiled.program), compiled.captured.guards)  # one order of collectives on all ranks: their programs are one
            self._compiled[call.identity] = compiled
            for forgotten in self._variants.add(call, compiled.captured.guards):
                del self._compiled[forgotten.identity]
        self._latest = self._compiled[call.identity]
        return self._latest

    def about_recapture(self, key: Key, keys: Sequence[Key], changes: Sequence[Change]) -> list[str]:
        """What differs from the last capture of the same modes, of those with these keys, for the report; refused with ``recapture=False``.

        Args:
            changes: of values that forward reads, where the key is the same.
        """
        alike = [other for other, _ in keys if (other.training, other.modes) == (key[0].training, key[0].modes)]
        if not alike or (key in keys and not changes):  # in a step, with other parameters in the optimizer
            return []
        what = ", ".join(map(str, changes)) or difference(alike[-1], key[0])
        if not self._recapture and changes:
            raise RuntimeError(f"forward was captured with other values, and recapture=False: {what}; set back what was changed, or allow recapture=True")
        if not self._recapture:
            raise RuntimeError(f"the step was captured for other arguments, and recapture=False: {what}; pad to one shape, or allow recapture=True")
        return [f"capture {len(keys) + 1} of this model: {what}"]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model: its own signature, its own output structure; outputs are attached to autograd.

        Scalars come back as plain tensors with their global value, other tensors as DTensors; with ``outputs="global"``
        all as plain tensors, whole on every rank. All ranks call it alike.
        """
        refuse_compile()
        seat = self.compiler.seat
        if seat is None:
            raise RuntimeError(
                f"the mesh ({self.mesh}) needs {self.mesh.size} processes, and this one is alone; start them with "
                f"torchrun --nproc-per-node {self.mesh.size} and call parallelize in each, or call .simulate(...) to run all ranks in this process"
            )
        with ONE_AT_A_TIME:  # while a thread captures, the model's tensors are lent
            given, own = self.given(self.settled(bind_arguments(self.module, args, kwargs))), inventory(self.module)
            call = self._call(given, own)
            words = f"call {_told(given, call.key)}{call.where}"
            if self._agreement is not None and not call.known:
                self._agreement.begin(f"{words}, for the first time")
                self._agreement.finish()
            compiled = self._captured(given, call)
        step = compiled.here
        pieces, leaves, brought = self.pieces(given, own, step.interface, seat.rank)
        pieces += self.computed(compiled.captured).values()
        if self._agreement is not None:
            self._agreement.begin(f"{words}{call.numbers_now}", given.brought(), words)
        types = step.interface.types
        owners = () if self.job is None else [tensor for _, tensor in own.parameters]  # a DTensor that is written does not mark its piece
        made = step(pieces, leaves, lambda name, piece: piece if name in brought else self._gradient(leaves[name], types[name], piece), owners)
        outputs = [self.returned(tensor, type) for tensor, (_, type) in zip(made, step.interface.returned, strict=True)]
        return _returned_like_the_model(compiled, outputs, args, kwargs)

    def pieces(self, given: Given, own: Inventory, interface: Interface, rank: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], set[str]]:
        """This rank's pieces of parameters, buffers and inputs, in the order of the placeholders; the user's tensors that
        receive gradients, by placeholder; and those placeholders whose pieces the ranks bring themselves."""
        self._check_parameters(own.parameters)
        arguments = given.arguments
        _refuse_without_values([*own.parameters, *own.buffers, *zip(arguments.names, arguments.tensors, strict=True)])
        state = [tensor for _, tensor in (*own.parameters, *own.buffers)]
        with torch.no_grad():
            pieces = [local_of(tensor) for tensor in state]
        leaves = {name: tensor for name, tensor in zip(interface.given, state, strict=False) if tensor.requires_grad}
        brought = set()
        names = interface.given[len(state) : len(state) + len(arguments.names)]
        for name, user, tensor in zip(names, arguments.names, arguments.tensors, strict=True):
            pieces.append(piece_of(tensor, user, interface.types[name], rank, given))
            if tensor.requires_grad:
                leaves[name] = tensor
            if user in given.shapes:
                brought.add(name)
        return pieces, leaves, brought

    def _check_parameters(self, named: Named) -> None:
        for name, tensor in named:
            known = self._known.get(name)
            if tensor is known:
                continue
            if known is None or (is_dtensor(known) and getattr(tensor, "placements", None) != known.placements):  # type: ignore[attr-defined]
                raise ValueError(f"the parameter {name} was {'added' if known is None else 'replaced'} after parallelize; change the model first, then parallelize it")
            self._known[name] = tensor  # type: ignore[assignment]

    def returned(self, piece: torch.Tensor, type: TensorType) -> torch.Tensor:
        """A value that the model returns, of this rank's piece: a number is a plain tensor, others are DTensors, or whole with ``outputs="global"``."""
        if self.job is None or not type.shape or self.compiler.whole:
            return piece
        from torch.distributed.tensor import DTensor

        stride = torch.empty(type.shape, device="meta").stride()
        placements = placements_of(type.attr, self.mesh, type.shape)
        return DTensor.from_local(piece.contiguous(), self.job.device_mesh, placements, run_check=False, shape=torch.Size(type.shape), stride=stride)

    def _gradient(self, leaf: torch.Tensor, type: TensorType, piece: torch.Tensor) -> torch.Tensor:
        """What a tensor of the user's receives: a DTensor one that lies as it does, a whole one a whole one."""
        if self.job is None:
            return piece
        if is_dtensor(leaf):
            return dtensor_like(piece, leaf)
        from torch.distributed.tensor import DTensor

        placements = placements_of(type.attr, self.mesh, type.shape)
        return full_tensor(DTensor.from_local(piece, self.job.device_mesh, placements, run_check=False, shape=leaf.shape, stride=leaf.stride()))

    def simulate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model with all ranks in this process: its own signature, its own output structure, full tensors.

        The outputs are attached to autograd: ``backward()`` fills full-size ``.grad`` of the model's parameters.
        """
        if self.job is not None:
            raise RuntimeError("the parameters of this model lie on processes; to simulate, call parallelize in a process that is alone")
        with ONE_AT_A_TIME:
            given, own = self.given(self.settled(bind_arguments(self.module, args, kwargs))), inventory(self.module)
            compiled = self._captured(given, self._call(given, own))
        named = [*own.parameters, *own.buffers, *zip(given.arguments.names, given.arguments.tensors, strict=True)]
        _refuse_without_values(named)
        return _returned_like_the_model(compiled, compiled.simulated([*(tensor for _, tensor in named), *self.computed(compiled.captured).values()]), args, kwargs)

    def refuse_without_values(self, given: Given) -> None:
        """``ValueError`` where a parameter, a buffer or an argument has no values to compute with."""
        own, arguments = inventory(self.module), given.arguments
        _refuse_without_values([*own.parameters, *own.buffers, *zip(arguments.names, arguments.tensors, strict=True)])

    def computed(self, captured: Captured) -> dict[str, torch.Tensor]:
        """What a capture takes that is no argument, in order: numbers that forward reads, and the seed, if it draws."""
        job = self.job
        seed = step_seed(captured.draws, self.compiler.random, captured.device, None if job is None else job.control)
        return {**{number.name: number.tensor(captured.device) for number in captured.numbers}, **({"seed": seed[0]} if seed else {})}

    def move(self, homes: Mapping[str, DistAttr]) -> None:
        """Let parameters lie otherwise, from now on; what was captured for another place is forgotten. All ranks call it."""
        moved = {name: attr for name, attr in homes.items() if self._homes.get(name) != attr}
        if not moved:
            return
        self._homes |= moved
        self.compiler = replace(self.compiler, homes={**self.compiler.homes, **moved})
        self._compiled, self._variants, self._latest = {}, Variants(), None
        if self.job is not None:
            relaid(self.module, moved, self.mesh, self.job)

    def train_step(self, optimizer: torch.optim.Optimizer, **options: Any) -> TrainStep:
        """The whole training step as one static program: ``loss = step(batch)`` runs forward, backward and optimizer.

            step = parallel.train_step(torch.optim.AdamW(parallel.parameters(), lr=1e-3), microbatches=16, zero=1, clip_norm=1.0)
            for batch in batches:
                loss = step(batch)                # a dict, a tuple, or the model's own arguments
                scheduler.step()                  # learning rates, betas, momentum and weight decay are read from the optimizer's groups

        The model returns its loss: the first of its outputs that is one number. Parameters and ``optimizer.state`` are updated in
        place, so that state dicts, schedulers and evaluation with ``parallel(...)`` work beside it.

        Args:
            optimizer: one of ``torch.optim`` or of your own, over parameters of this model. ``AdamW``, ``Adam``, ``SGD`` and ``Adagrad`` are fused
                kernels; the ``step()`` of another class is run on pieces of parameters, or on whole ones where that is not the same.
            microbatches: into how many pieces a batch is cut; their gradients add up, and are reduced once. The loss and the
                gradients are those of the whole batch, also where its pieces have unequal numbers of tokens.
                Cut is what has a dim 0 as long as the first tensor's, but for what the plan names: that is cut where the plan splits
                its dim 0 over an axis of the batch, and so ``{"mask": (None, None)}`` stays whole.
            amp: mixed precision, ``"bf16-O1"``, ``"fp16-O1"``: as under ``torch.autocast``; ``"bf16-O2"``, ``"fp16-O2"``: all but norms, losses and
                their like; parameters stay in float32, and forward and backward take low-precision copies of them.
            keep: ops that run in another dtype than ``amp`` says, ``{"aten::silu": "f32"}``.
            reduce_dtype: ``torch.float32``: sums of low-precision values over ranks are made in float32.
            loss_scale: with fp16, the first scale of the loss, or a ``LossScaling``. A step whose gradients overflow changes nothing, on
                all ranks alike, and lowers the scale; ``step.loss_scale`` has it, and ``step.skipped`` whether the last one did.
            recompute: what is computed again in the backward, and not kept: ``"blocks"``, the model's layers; a glob over module paths,
                as ``"*.layers.*"``, or several; or ``"min-cut"``, all but what torch's partitioner would keep.
            zero: ZeRO's stage: 1 splits the optimizer's state over the data axis, 2 the sums of gradients too, 3 parameters too.
            clip_norm: what the norm of all gradients is clipped to; ``step.grad_norm`` has it.
            clip_parameters: ``"all"``: the norm is of this step's gradients of all parameters that require one, as in
                ``clip_grad_norm_(model.parameters(), …)``; ``"optimizer"``: of those that the optimizer has.
            grad_norm: measure the norm at each step also without ``clip_norm``; nothing is clipped.
            returns: ``"loss"``, or ``"outputs"``: what the model returns, with the loss of the step, without a graph. A dict says how
                outputs of micro-batches are joined where that does not follow from the forward: ``{"logits": "cat", "aux": "mean"}``.
            ema: the decay of a moving average of each parameter, as torch's ``get_ema_multi_avg_fn`` has it: ``step.ema`` has them, and inside of
                ``with step.averaged():`` the model.
            detect_anomaly: look for NaN behind each op, as ``torch.autograd.detect_anomaly()`` around a step does too. The first op that makes
                one is an ``AnomalyError``, with your line and the ranges of its operands. inf is no anomaly; nor is, with fp16, what an
                overflow of scaled gradients makes of it. What was written before the error stays so: an update has written its parameters.
            offload: keep the optimizer's state, and averages, in host memory, and update each rank's pieces there by torch's kernels for the CPU, as
                in ZeRO-Offload: their gradients go to the host, and the pieces there and back. ``optimizer.state`` has DTensors whose pieces are on
                the CPU; torch's own ``optimizer.step()`` beside it then needs them on the device. It is for accelerators, and was tried on CPU
                alone, where it only copies; ``simulate`` has one memory, and nothing to offload.

        Raises:
            TypeError: an unknown option, an optimizer whose step cannot be part of a graph.
            ValueError: a value that an option does not take, an optimizer over other parameters.
        """
        from autopar.step.options import options_of
        from autopar.step.train_step import TrainStep

        return TrainStep(self, optimizer, options_of(options))

    # -- values ----------------------------------------------------------------------------------------------------

    def initialize(self, init: Init | None = None, *, device: torch.device | str | None = None) -> None:
        """Give a model on meta the values of a single device: those of ``to_empty``, then ``init``, from the first rank's
        generator. ``init`` is a function of a module, as for ``apply``; ``None``: the model's ``init_weights()``, else each
        module's ``reset_parameters()``. Parameters are new objects: make the optimizer afterwards. All ranks call it."""
        initialize(self.module, init, device, self.job, self._agreement)

    def load_weights(self, path: str | os.PathLike[str], *, strict: bool = True) -> Any:
        """Read safetensors: a file, or a folder of ``save_pretrained``. Each rank reads its pieces. A model on meta gets
        storage, and what no file holds its own initialisation. Returns and raises as ``load_state_dict``. All ranks call it."""
        return load_weights(self.module, path, strict, self.mesh, self.job, self._agreement)

    # -- state dicts -----------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own; on processes of DTensors, which ``torch.distributed.checkpoint`` saves."""
        return for_everyone(self.module.state_dict(*args, **kwargs))

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The model's own. Full tensors, as of a model on one device, are cut; DTensors are re-laid."""
        own = inventory(self.module)
        return self.module.load_state_dict(for_model(state_dict, dict([*own.all_parameters, *own.all_buffers]), self.job), *args, **kwargs)


def _refuse_without_values(named: Named) -> None:
    for name, tensor in named:
        if is_transformed(tensor):
            raise ValueError(
                f"{name} is inside a torch.func transform or carries a forward-mode tangent; "
                f"a captured step has gradients through backward() alone"
            )
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device and has no values; to_empty() and init it")


def _told(given: Given, key: Key) -> str:
    """A call in words, the same on every rank that makes it."""
    arguments, (signature, _) = given.arguments, key
    told = [f"{n} {str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for n, t in zip(arguments.names, arguments.tensors, strict=True)]
    told += [value for _, value in signature.constants]
    flags = signature.training
    mode = "train" if all(flags) else "train in part" if any(flags) else "eval"
    grad, deterministic = signature.modes[:2]
    return f"({', '.join(told)}) in {mode}" + " without gradients" * (not grad) + " deterministically" * (deterministic > 0)


def _returned_like_the_model(compiled: Compiled, tensors: list[torch.Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    captured, outputs = compiled.captured, iter(tensors)
    count = captured.outputs + len(captured.leaves)
    leaves = [captured.leaves[k] if k in captured.leaves else next(outputs) for k in range(count)]
    returned = unflatten(leaves, captured.spec)
    for position, way in captured.extended:
        take_over((*args, *kwargs.values())[position], part_at(returned, way))
    return returned
