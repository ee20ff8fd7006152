"""Make the program that ends a step: it reduces the gradients, clips their norm, and takes the optimizer's step.

    up_weight : f32[8 4] = state(up_weight_next, 'up.weight')
    up_weight_exp_avg : f32[8/dp 4] = state(up_weight_exp_avg_next, 'up.weight.exp_avg')
    up_weight_exp_avg_sq : f32[8/dp 4] = state(up_weight_exp_avg_sq_next, 'up.weight.exp_avg_sq')
    step_0 : f32[] = state(step_0_next, '.step.0')
    up_weight_grad : f32[8 4] +dp = buffer('up.weight.grad')
    lr_0 : f64[] = input('.lr.0')
    beta1_0 : f64[] = input('.beta1.0')
    update:
      step_0_next : f32[] = autopar::counted(step_0, None)
      adamw : (f32[8 4], …) = autopar::adamw(up_weight, up_weight_grad, up_weight_exp_avg, …, step_0_next, lr_0, None,
      None, beta1=beta1_0, …)

Each parameter has one op. The transfers follow from the layouts of its operands: here a reduce-scatter of the gradient
before the op, and an all-gather of the parameter after it. Unscaling and clipping are one number that gradients are
divided by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from autopar.ir.layout import DistAttr, layout_of
from autopar.ir.mesh import Mesh
from autopar.ir.ops.over_stages import OVER_STAGES
from autopar.ir.ops.sum_of_squares import SUM_OF_SQUARES
from autopar.ir.program import Program
from autopar.ir.record import Record, TensorType
from autopar.ir.value_names import (  # fmt: skip
    AVERAGES,
    GROWTH,
    LOSS,
    SCALE,
    average_name,
    gradient_name,
    scheduled_name,
    state_name,
    steps_name,
)
from autopar.optimizers import AVERAGED
from autopar.optimizers.update import COUNTED, RATE, Update
from autopar.plan.loss_scaling import LossScaling, updated_scale
from autopar.step.compiling.graph_builder import GraphBuilder, type_of
from autopar.torch_private import aten

NOWHERE = Record(None)  # of ops that belong to no parameter


@dataclass(frozen=True)
class Trained:
    """One parameter of the optimizer.

    Attributes:
        name: the user's name of it.
        type: its type between steps.
        gradient: the type of the sum of its gradients, as ``micro`` returns it.
        state: the layout of the optimizer's state, which the reduced gradient gets, too.
        update: how the optimizer computes its next value.
        types: the types of its states, without the counts of steps.
        group: the number of its parameter group.
        steps: the number of the counter of its steps.
        by: the name of the optimizer's class, in sources.
    """

    name: str
    type: TensorType
    gradient: TensorType
    state: DistAttr
    update: Update
    types: Mapping[str, TensorType]
    group: int
    steps: int = 0
    by: str = "the optimizer"

    @property
    def about(self) -> Record:
        """The module and the source of the ops that update it."""
        return Record(None, module=self.name.rpartition(".")[0], source=f"update by {self.by}")


@dataclass(frozen=True)
class Untrained:
    """A parameter that the optimizer does not have, whose gradient is part of the norm.

    Attributes:
        name: the user's name of it.
        gradient: the type of the sum of its gradients, as ``micro`` returns it.
        state: the layout of the reduced gradient.
    """

    name: str
    gradient: TensorType
    state: DistAttr

    @property
    def about(self) -> Record:
        """The module and the source of the ops that measure its gradient."""
        return Record(None, module=self.name.rpartition(".")[0], source=f"norm of the gradient of {self.name}")


@dataclass(frozen=True)
class Norm:
    """How the norm of the gradients is measured.

    Attributes:
        limit: the largest norm; larger ones are clipped to it. ``None``: the norm is only measured.
        others: the parameters whose gradients are measured beside those of the optimizer.
    """

    limit: float | None = None
    others: Sequence[Untrained] = ()


@dataclass(frozen=True)
class Staged:
    """Where the values of an update are that all stages of a pipeline run.

    Attributes:
        mesh: the mesh of one stage, on which the update is placed.
        home: parameter → the stage that keeps and updates it.
        foreign: parameter → stage → the type of the sum of its gradients on another stage that reads it.
        losses: stage → the type of the state in which losses add up there.
    """

    mesh: Mesh
    home: Mapping[str, str]
    foreign: Mapping[str, Mapping[str, TensorType]]
    losses: Mapping[str, TensorType]


@dataclass(frozen=True)
class UpdateProgram:
    """The traced program of an update.

    Attributes:
        program: the program.
        constraints: placeholder → its layout.
        stages: placeholder → its stage, of those that are on one.
        returns: the names of the values that it returns: ``loss``; ``norm`` where the norm is measured; ``found_inf``
            where the loss is scaled, which is 1 where gradients overflowed and nothing was changed, else 0.
    """

    program: Program
    constraints: Mapping[str, DistAttr]
    stages: Mapping[str, str]
    returns: tuple[str, ...]


def update_of(trained: Sequence[Trained], loss: TensorType | None, device: torch.device, *, norm: Norm | None = None,
              scaling: LossScaling | None = None, ema: float | None = None,
              staged: Staged | None = None) -> UpdateProgram:  # fmt: skip
    """Make the update of all trained parameters; linear in their number.

    Args:
        loss: the type of the state in which losses add up; ``None``: ``staged`` has those of the stages.
        norm: which norm is measured and clipped, as by ``clip_grad_norm_``; ``None``: no norm is measured.
        scaling: how the scale of the loss changes, which gradients are multiplied by; ``None``: the loss is not scaled.
        ema: the decay of the moving averages of parameters; ``None``: there are no averages.
        staged: where the values are, if the update is that of all stages of a pipeline.
    """
    return _Update(trained, loss, device, norm, scaling, ema, staged).run()


class _Update:
    """Builds the program of an update."""

    def __init__(self, trained: Sequence[Trained], loss: TensorType | None, device: torch.device, norm: Norm | None,
                 scaling: LossScaling | None, ema: float | None, staged: Staged | None) -> None:  # fmt: skip
        self.trained, self.norm, self.scaling, self.ema = trained, norm, scaling, ema
        self.staged = staged
        self.builder = GraphBuilder(device)
        self.builder.phase = "update"
        self.constraints: dict[str, DistAttr] = {}
        self.stages: dict[str, str] = {}
        self.losses: Mapping[str, TensorType] = {"": loss} if loss is not None else {}
        if staged is not None:
            self.losses = staged.losses

    def run(self) -> UpdateProgram:
        parameters = [self._state(t, t.name, t.type, t.type.attr) for t in self.trained]
        states = [
            {n: self._state(t, state_name(t.name, n), type, self._state_layout(t, type)) for n, type in t.types.items()}
            for t in self.trained
        ]
        averages = (
            [] if self.ema is None else [self._state(t, average_name(t.name), t.type, t.state) for t in self.trained]
        )
        count = None if self.ema is None else self._input(AVERAGES, torch.int64, "state")
        steps = {
            k: self._input(steps_name(k), torch.float32, "state")
            for k in sorted({t.steps for t in self.trained if t.update.counted})
        }
        scale = (
            None
            if self.scaling is None
            else [self._input(SCALE, torch.float32, "state"), self._input(GROWTH, torch.int32, "state")]
        )
        gradients = [self._gradient(t) for t in self.trained]
        others = [] if self.norm is None else [self._gradient(parameter) for parameter in self.norm.others]
        losses = {  # of stages, they are reduced when they are added
            stage: self._sum_of(LOSS, type, None if stage else DistAttr.replicated(0), stage=stage)
            for stage, type in self.losses.items()
        }
        updates = {t.group: t.update for t in self.trained}
        numbers = {
            g: {n: self._input(scheduled_name(n, g), torch.float64, "input") for n in (RATE, *updates[g].scheduled)}
            for g in sorted(updates)
        }
        replaced: dict[fx.Node, fx.Node] = {}
        self.builder.about = Record(None, source="loss of all stages")
        returned: dict[str, fx.Node] = {"loss": self._over_stages(losses, "loss_of_all")}
        found_inf: fx.Node | None = None
        total = measured = None
        if scale is not None or self.norm is not None:
            squares = self._squares(self.trained, gradients)
            others_squares = self._squares(self.norm.others, others) if self.norm is not None else {}
            total = self._over_stages(squares, "squares") if squares else None
            measured = self._measured(squares, total, others_squares)
        divisor = None if scale is None else scale[0]
        if self.scaling is not None and scale is not None:
            clips = (
                self.norm is not None and self.norm.limit is not None
            )  # then every measured gradient is one that the step uses
            found_inf = returned["found_inf"] = self.builder.inline(
                overflowed, measured if clips else total, name="found_inf"
            )
            replaced |= zip(
                scale,
                self.builder.inline(
                    updated_scale, *scale, found_inf, **self.scaling.constants, name=("scale_next", "growth_next")
                ),
                strict=True,
            )
        if self.norm is not None and self.norm.limit is not None:
            returned["norm"], divisor = self.builder.inline(
                clipped, measured, divisor, self.norm.limit, name=("norm", "divisor")
            )
        elif self.norm is not None:
            returned["norm"] = self.builder.inline(norm_of, measured, divisor, name="norm")
        counted = {
            k: self.builder.inline(COUNTED, step, found_inf, name=f"{step.name}_next") for k, step in steps.items()
        }
        replaced |= {steps[k]: node for k, node in counted.items()}
        for t, parameter, gradient, own_states in zip(self.trained, parameters, gradients, states, strict=True):
            self.builder.about = t.about
            new = self._updated(
                t, parameter, gradient, own_states, counted.get(t.steps), numbers[t.group], divisor, found_inf
            )
            replaced |= dict(zip((parameter, *own_states.values()), new, strict=True))
        self.builder.about = NOWHERE
        if count is not None:  # after all updates, which run as one kernel, as the averages do
            replaced[count] = self.builder.inline(COUNTED, count, found_inf, name=f"{count.name}_next")
            for t, parameter, average in zip(self.trained, parameters, averages, strict=True):
                self.builder.about = t.about
                operands = average, replaced[parameter], replaced[count], found_inf
                replaced[average] = self.builder.inline(
                    AVERAGED, *operands, name=f"{average.name}_next", decay=self.ema
                )
        program = self.builder.program(list(returned.values()), replaced)
        return UpdateProgram(program, self.constraints, self.stages, tuple(returned))

    def _measured(
        self, squares: Mapping[str, fx.Node], total: fx.Node | None, others: Mapping[str, fx.Node]
    ) -> fx.Node | None:
        """Return the sum of the squares of all gradients; ``None`` if there are none.

        Args:
            squares, others: stage → the squares of the optimizer's gradients, and of others.
            total: the sum of ``squares``.
        """
        if not others:
            return total
        both = {
            stage: self._added([found[stage] for found in (squares, others) if stage in found])
            for stage in (*squares, *(stage for stage in others if stage not in squares))
        }
        return self._over_stages(both, "squares")

    def _over_stages(self, values: Mapping[str, fx.Node], name: str) -> fx.Node:
        """Return the sum of the numbers of all stages. One number is the sum: its stage sends it to its readers."""
        numbers = list(values.values())
        if len(numbers) == 1:
            return numbers[0]
        dtype = type_of(numbers[0]).dtype  # the same on all stages, so that all clip alike
        for number in numbers:
            dtype = torch.promote_types(dtype, type_of(number).dtype)
        return self.builder.inline(OVER_STAGES, numbers, dtype, self.builder.device, name=name)

    def _updated(self, t: Trained, parameter: fx.Node, gradient: fx.Node, states: Mapping[str, fx.Node],
                 step: fx.Node | None, numbers: Mapping[str, fx.Node], divisor: fx.Node | None,
                 found_inf: fx.Node | None) -> Sequence[fx.Node]:  # fmt: skip
        """Return the values of the parameter and of its states after the step."""
        operands = [states.get(name, step) for name in t.update.states]
        names = [f"{node.name}_next" for node in (parameter, *states.values())]
        scheduled = {name: numbers[name] for name in t.update.scheduled}
        results = self.builder.inline(
            t.update.function,
            parameter,
            gradient,
            *operands,
            numbers[RATE],
            divisor,
            found_inf,
            name=names,
            **scheduled,
            **t.update.constants,
        )
        return results if isinstance(results, tuple) else (results,)

    def _squares(self, of: Sequence[Trained | Untrained], gradients: Sequence[fx.Node]) -> dict[str, fx.Node]:
        """Return stage → the sum of the squares of its gradients.

        Gradients that are sharded over the same axes are added first, so that they need one reduction.
        """
        alike: dict[str, dict[frozenset[str], list[fx.Node]]] = {}
        for t, gradient in zip(of, gradients, strict=True):
            self.builder.about = t.about
            alike.setdefault(self._home(t.name), {}).setdefault(frozenset(t.state.axes), []).append(
                self.builder.inline(SUM_OF_SQUARES, gradient, name="squares")
            )
        self.builder.about = Record(None, source="norm of the gradients")
        return {stage: self._added([self._added(squares) for squares in own.values()]) for stage, own in alike.items()}

    def _added(self, values: Sequence[fx.Node]) -> fx.Node:
        total, *rest = values
        for value in rest:
            total = self.builder.inline(aten.add.Tensor, total, value, name="squares")
        return total

    def _home(self, parameter: str) -> str:
        """Return the stage that keeps a parameter; "" without stages."""
        return "" if self.staged is None else self.staged.home[parameter]

    def _placed(self, node: fx.Node, attr: DistAttr | None, stage: str) -> fx.Node:
        if attr is not None:
            self.constraints[node.name] = attr
        if stage:
            self.stages[node.name] = stage
        return node

    def _state(self, t: Trained, name: str, type: TensorType, attr: DistAttr) -> fx.Node:
        record = t.about._replace(type=TensorType(type.shape, type.dtype), role="state", name=name)
        return self._placed(self.builder.placeholder(name, record), attr, self._home(t.name))

    def _state_layout(self, t: Trained, type: TensorType) -> DistAttr:
        return t.state if type.shape == t.type.shape else DistAttr.replicated(len(type.shape))

    def _gradient(self, t: Trained | Untrained) -> fx.Node:
        """Return the sum of a parameter's gradients, reduced to the layout of the optimizer's state.

        ``micro`` returns it in a layout of its own.
        """
        name = gradient_name(t.name)
        total = self._sum_of(name, t.gradient, t.state, t.about, self._home(t.name))
        for stage, type in self.staged.foreign.get(t.name, {}).items() if self.staged else ():
            self.builder.about = t.about
            other = self._sum_of(name, type, t.state, t.about, stage)
            total = self.builder.inline(aten.add.Tensor, total, other, name=f"{total.name}_all")
        return total

    def _sum_of(self, name: str, type: TensorType, reduced: DistAttr | None, about: Record = NOWHERE, stage: str = ""
                ) -> fx.Node:  # fmt: skip
        """Return a sum over micro-batches.

        ``reduced``: the layout in which the update reads it, where it is still a partial sum over ranks; ``None``: any.
        """
        waits = bool(type.attr.pending)
        kept = TensorType(type.shape, type.dtype)
        if waits:
            kept = type if self.staged is None else replace(type, layout=layout_of(self.staged.mesh, type.attr))
        node = self.builder.placeholder(name, about._replace(type=kept, role="buffer", name=name))
        return self._placed(node, reduced if waits else type.attr, stage)

    def _input(self, name: str, dtype: torch.dtype, role: str) -> fx.Node:
        return self.builder.placeholder(name, Record(TensorType((), dtype), role=role, name=name))


def clipped(total: torch.Tensor, scale: torch.Tensor | None, limit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm, and the number that gradients are divided by so that it is at most ``limit``.

    The formula is that of ``clip_grad_norm_``, with its 1e-6.

    Args:
        total: the sum of the squares of the scaled gradients.
        scale: the factor of the loss; ``None``: the loss is not scaled.
    """
    norm = norm_of(total, scale)
    divisor = ((norm + 1e-6) / limit).clamp(min=1.0)
    return norm, divisor if scale is None else divisor * scale


def norm_of(total: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Return the norm of the gradients. ``total``: the sum of the squares of the gradients times ``scale``."""
    return total.sqrt() if scale is None else total.sqrt() / scale


def overflowed(total: torch.Tensor) -> torch.Tensor:
    """1 where a gradient is inf or nan, else 0."""
    return total.isfinite().logical_not().to(torch.float32)
