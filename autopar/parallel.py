"""Run a model on a mesh, and be used as the model itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from autopar.capture.guards import Original
from autopar.capture.model_state import inventory
from autopar.capture.model_swap import ONE_AT_A_TIME
from autopar.ir.dtensor import edge_of
from autopar.ir.layout import DistAttr
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.ir.structure import part_at, take_over
from autopar.model.calls import Calls
from autopar.model.compiled import Compiled, Compiler, RankContext
from autopar.model.dtensor_parameters import sharded
from autopar.model.inputs import describe
from autopar.model.proxy import ModelProxy
from autopar.model.wrappers import refuse_compile
from autopar.plan.constraints import layouts_of
from autopar.plan.plan import Plan
from autopar.report.passes import Reports
from autopar.report.transfers import Transfers, transfers_of
from autopar.runtime.processes.agreement import Agreement
from autopar.runtime.processes.job import Job

if TYPE_CHECKING:
    from autopar.step.train_step import TrainStep

OUTPUTS = ("sharded", "global")


class Parallel(ModelProxy):
    """A model on a mesh. Made by ``parallelize``.

    A module with the model's own children, attributes and names: ``named_parameters``, ``state_dict``, ``train``, ``requires_grad_``
    and the like are the model's, and ``parallel.beta = 2.0`` sets the attribute that forward reads. On processes its parameters are
    DTensors, copies of the model's; without, they are the model's own, and ``simulate`` runs it.

    Attributes:
        module: the model; on processes, the copy of it whose parameters are DTensors.
        mesh: the mesh.
        job: the processes of the mesh; ``None`` in a process that is alone.
        compiler: how its calls are captured and placed.
    """

    OWN = ModelProxy.OWN | {"compiler"}

    def __init__(self, model: torch.nn.Module, mesh: Mesh, plan: Plan | None = None, *, job: Job | None = None,
                 strict: bool = False, inputs: str = "global", outputs: str = "sharded", recapture: bool = True,
                 random: str = "parallel") -> None:  # fmt: skip
        agreement = None if job is None or mesh.size == 1 else Agreement(job.control, mesh)
        context = None
        if job is not None or mesh.size == 1:
            context = RankContext(mesh.ranks[0], {}) if job is None else RankContext(job.rank, job.groups, agreement)
        attrs = layouts_of(plan, model, mesh)
        module = model if job is None else sharded(model, attrs, mesh, job)
        original = None if job is None else Original(model, module)
        layouts = {name: edge_of(attrs.get(name, DistAttr.replicated(p.dim())), mesh, p.shape, strided=True) for name, p in model.named_parameters()}
        compiler = Compiler(module, mesh, plan, context, strict, outputs == "global", random)
        super().__init__(Calls(compiler, job, inputs, recapture, layouts, original))

    @property
    def compiler(self) -> Compiler:
        return self._calls.compiler

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
        return len(self._calls.captures)

    def local(self, rank: int) -> Program:
        """The program of one rank, in the shapes of its pieces. Ranks with pieces of equal sizes share one graph."""
        return self._current().local[rank]

    def _current(self) -> Compiled:
        if self._calls.latest is None:
            call = "call it" if self.compiler.context else "call .simulate(x)"
            raise RuntimeError(f"nothing has been captured yet; give parallelize an example=(x,), or {call} once")
        return self._calls.latest

    # -- calls -----------------------------------------------------------------------------------------------------

    def capture(self, *args: Any, **kwargs: Any) -> Compiled:
        """Capture a call of these shapes and place it, unless that was done before.

        Raises:
            RuntimeError: it was not, and ``recapture=False``.
        """
        calls = self._calls
        inputs = calls.inputs(calls.bound(args, kwargs))
        return calls.compiled(inputs, calls.call(inputs, inventory(self.module)))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model: its own signature, its own output structure; outputs are attached to autograd.

        Scalars come back as plain tensors with their global value, other tensors as DTensors; with ``outputs="global"``
        all as plain tensors, whole on every rank. All ranks call it alike.
        """
        refuse_compile()
        calls = self._calls
        context, agreement, tensors = calls.context(" and call parallelize in each"), calls.agreement, calls.tensors
        with ONE_AT_A_TIME:  # while a thread captures, the model has stand-ins in the place of its tensors
            inputs, state = calls.inputs(calls.bound(args, kwargs)), inventory(self.module)
            call = calls.call(inputs, state)
            words = f"call {describe(inputs, call.key)}{call.where}"
            if not call.known:
                agreement.announce(f"{words}, for the first time")
                agreement.wait()
            compiled = calls.compiled(inputs, call)
        step = compiled.here
        pieces, leaves, brought = tensors.pieces(inputs, state, step.interface, context.rank)
        pieces += calls.computed(compiled.captured).values()
        agreement.announce(words, [inputs], call.numbers_now)
        types = step.interface.types
        owners = () if self.job is None else [tensor for _, tensor in state.parameters]  # writing to a DTensor does not mark its piece
        made = step(pieces, leaves, lambda name, piece: piece if name in brought else tensors.gradient(leaves[name], types[name], piece), owners)
        outputs = [tensors.returned(tensor, type) for tensor, (_, type) in zip(made, step.interface.returned, strict=True)]
        return _returned_like_the_model(compiled, outputs, args, kwargs)

    def simulate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model with all ranks in this process: its own signature, its own output structure, full tensors.

        The outputs are attached to autograd: ``backward()`` fills full-size ``.grad`` of the model's parameters.
        """
        calls = self._calls
        calls.refuse_to_simulate()
        with ONE_AT_A_TIME:
            inputs, state = calls.inputs(calls.bound(args, kwargs)), inventory(self.module)
            compiled = calls.compiled(inputs, calls.call(inputs, state))
        calls.refuse_without_values(inputs, state)
        tensors = [tensor for _, tensor in (*state.parameters, *state.buffers, *inputs.named)]
        return _returned_like_the_model(compiled, compiled.simulated([*tensors, *calls.computed(compiled.captured).values()]), args, kwargs)

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

        return TrainStep(self, self._calls, optimizer, options_of(options))


def _returned_like_the_model(compiled: Compiled, tensors: list[torch.Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The model's own structure around these tensors; caches that forward extends hold what it returned."""
    returned = compiled.captured.with_tensors(tensors)
    for position, way in compiled.captured.extended:
        take_over((*args, *kwargs.values())[position], part_at(returned, way))
    return returned
