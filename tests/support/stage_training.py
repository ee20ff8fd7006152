"""Train parameters on stages by hand, as the update programs of the stages do, beside torch's own optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import calls_of_stages
import lion
import torch
from calls_of_stages import Net, cut, made, whole
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from autopar.capture.model_state import model_state
from autopar.ir.boxes import box_of
from autopar.ir.dtensor import placements_of
from autopar.ir.layout import DistAttr, Layout
from autopar.ir.record import TensorType
from autopar.ir.value_names import AVERAGES, average_name, scheduled_name, state_name, steps_name
from autopar.model.dtensor_parameters import move_parameters
from autopar.optimizers import AVERAGED, register_optimizer
from autopar.optimizers.ops import COUNTED
from autopar.plan.batch import split_over
from autopar.plan.loss_scaling import LossScaling
from autopar.runtime.dtensors import redistribute
from autopar.runtime.lowering.packing import take
from autopar.step.compiling.update import Trained
from autopar.step.states.average import Averages
from autopar.step.states.optimizer_state import OptimizerState
from autopar.step.states.state import TrainingState
from autopar.torch_private import dtensor_around

DECAY = 0.9


class Rows(lion.ByHand):
    """A state with one number for each row, and one with one number; whole parameters are updated."""

    def step_of(self, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if grad is None:
            return
        old = state or first_rows(param, group)
        new, states = rows(param, grad, old, torch.tensor(group["lr"], dtype=torch.float64))
        param.copy_(new)
        state.update(states)


def first_rows(param: torch.Tensor, group: Any) -> dict[str, torch.Tensor]:
    return {"row": param.new_ones(param.shape[:1]), "total": param.new_zeros(())}


def rows(param: torch.Tensor, grad: torch.Tensor, state: Any, lr: torch.Tensor) -> Any:
    row = 0.9 * state["row"] + 0.1 * grad.square().reshape(*grad.shape[:1], -1).mean(-1).reshape(grad.shape[:1])
    total = state["total"] + row.sum()
    scale = row.reshape((*row.shape, *[1] * (param.dim() - row.dim()))).sqrt() + total
    return param - lr * grad / scale, {"row": row, "total": total}


register_optimizer(Rows, update=rows, state="row total", initial=first_rows)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.05),  # with a number of its own beside the count
    "Rows": lambda p: Rows(p, lr=0.05),  # with states of other shapes than the parameter's
}
WHOLE = {"Rows"}  # these update whole parameters


def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Two groups, in another order than the model's."""
    named = dict(model.named_parameters())
    last = ["scale", "frozen", "up.weight"]
    return [
        {"params": [p for name, p in named.items() if name not in last]},
        {"params": [named[name] for name in last], "lr": 0.01},
    ]


def gradient(name: str, shape: tuple[int, ...], step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + len(name) + sum(map(ord, name)))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def trained_at(name: str, step: int) -> bool:
    """Whether a step's loss depends on a parameter: some begin later, so that counts differ, and a stage has none."""
    return name != "frozen" and (step > 0 or name not in ("qkv.weight", "scale", "down.bias"))


def alone(optimizer: str, steps: int, seed: int = 0) -> dict[str, Any]:
    """The full state after some steps on one device."""
    torch.manual_seed(seed)
    model = Net().double()
    torch_optimizer = OPTIMIZERS[optimizer](groups(model))
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for step in range(steps):
        for name, p in model.named_parameters():
            p.grad = gradient(name, tuple(p.shape), step) if trained_at(name, step) else None
        torch_optimizer.step()
        averaged.update_parameters(model)
    named = dict(model.named_parameters())
    return {
        "model": dict(model.state_dict()),
        "state": {name: dict(torch_optimizer.state[p]) for name, p in named.items() if torch_optimizer.state.get(p)},
        "ema": {name: value for name, value in averaged.module.named_parameters() if name != "frozen"},
    }


class ByHand:
    """A training whose parameters are on stages, or on the whole mesh, with or without ZeRO."""

    def __init__(self, sizes: Mapping[str, int], optimizer: str = "AdamW", seed: int = 0) -> None:
        self.parallel = made(sizes, seed)
        self.whole_states = optimizer in WHOLE
        self.optimizer = OPTIMIZERS[optimizer](groups(self.parallel))
        calls = self.parallel._calls
        self.optimizer_state = OptimizerState(
            self.optimizer, model_state(calls.module).parameters, calls.mesh, calls.job
        )
        self.averages = Averages(self.optimizer_state, DECAY, calls.device)
        self.state = TrainingState(self.parallel, calls, self.optimizer_state, self.averages, None, LossScaling())
        self.steps = 0
        self.move(0)

    def move(self, shift: int | None) -> None:
        """Cut in another way; ``None``: back to the whole mesh."""
        mesh = self.parallel.mesh
        self.homes = whole(self.parallel, mesh) if shift is None else cut(self.parallel, mesh, shift)
        move_parameters(self.parallel.module, self.homes, self.parallel.job)

    def trained(self, step: int) -> tuple[Trained, ...]:
        """As at the captures of a step: the states begin, or move to where their parameters are."""
        types, states = {}, {}
        for name, (_, parameter) in self.optimizer_state.groups().items():
            if trained_at(name, step):
                shape, home = tuple(parameter.shape), self.homes[name]
                types[name] = TensorType(shape, parameter.dtype, home)
                states[name] = DistAttr.replicated(len(shape)) if self.whole_states else home.attr
                if "dp" in home.mesh.names and not self.whole_states:
                    states[name] = split_over(home.attr, shape, home.mesh, "dp")  # ZeRO
        found = self.optimizer_state.trained(types, types, states)
        self.averages.place(found)
        return found

    @torch.no_grad()
    def step(self, found_inf: torch.Tensor | None = None) -> None:
        step, rank = self.steps, self.parallel.job.rank
        trained, pieces = self.trained(step), {**self.optimizer_state.pieces, **self.averages.pieces}
        groups = self.optimizer_state.groups()
        numbers = self.optimizer_state.numbers(torch.device("cpu"))
        here = [t for t in trained if rank in self.homes[t.name].mesh]
        assert not [name for name in pieces if name[0] != "." and not any(name.startswith(t.name) for t in here)]
        if here:
            pieces[AVERAGES].copy_(COUNTED(pieces[AVERAGES], found_inf))
        counted = {steps_name(t.steps) for t in here if t.update.counted}
        counts = {name: pieces[name].clone() for name in counted}
        for name in counted:
            pieces[name].copy_(COUNTED(pieces[name], found_inf))
        for t in here:
            parameter, layout = groups[t.name][1], Layout(self.homes[t.name].mesh, t.state)
            box = box_of(layout, t.type.shape, rank)
            placements = placements_of(t.state, layout.mesh, t.type.shape)
            old = redistribute(parameter.detach(), placements)
            state = {
                n: counts[steps_name(t.steps)] if n in t.update.counted else pieces[state_name(t.name, n)]
                for n in t.update.states
            }
            new, states = t.update(
                old.to_local(), take(gradient(t.name, t.type.shape, step), tuple(box)), state,
                numbers[scheduled_name("lr", t.group)], None, found_inf,
            )  # fmt: skip
            for n, value in states.items():
                if n not in t.update.counted:
                    pieces[state_name(t.name, n)].copy_(value)
            laid = dtensor_around(new, parameter.device_mesh, placements, parameter.shape, parameter.stride())
            parameter.copy_(redistribute(laid, parameter.placements))
            average = pieces[average_name(t.name)]
            average.copy_(AVERAGED(average, new, pieces[AVERAGES], found_inf, decay=DECAY))
        self.optimizer_state.finish(found_inf)
        self.averages.finish(found_inf)
        self.steps += 1

    def check(self, wanted: Mapping[str, Any], atol: float = 1e-12) -> None:
        """The whole state is that of one device: on the ranks of each home, and complete on the others."""
        state = self.state.state_dict(self.steps)
        for name, value in wanted["model"].items():
            same(state["model"][name], value, atol)
        found = state["optimizer"]["state"]
        assert found.keys() == wanted["state"].keys()
        for name, values in wanted["state"].items():
            assert found[name].keys() == values.keys()
            for key, value in values.items():
                same(found[name][key], value, atol)
                if calls_of_stages.is_dtensor(found[name][key]):
                    assert found[name][key].device_mesh == dict(self.parallel.named_parameters())[name].device_mesh
                else:
                    assert key == "step" or self.homes[name].mesh.size == self.parallel.mesh.size
        begun = {name: value for name, value in wanted["ema"].items() if trained_at(name, self.steps - 1)}
        assert state["ema"]["weights"].keys() == begun.keys() and state["ema"]["count"] == self.steps
        for name, value in begun.items():
            same(state["ema"]["weights"][name], value, atol)
        listed = [name for group in state["optimizer"]["param_groups"] for name in group["params"]]
        assert sorted(listed) == sorted(dict(self.parallel.named_parameters()))


def same(found: Any, wanted: torch.Tensor, atol: float) -> None:
    assert found.shape == wanted.shape, (found, wanted)
    value = calls_of_stages.values_here(found)
    if value is not None:
        torch.testing.assert_close(value, wanted.to(value.dtype), rtol=0, atol=atol)


# -- on ranks -----------------------------------------------------------------------------------------------------


def trained(sizes: Mapping[str, int], optimizer: str) -> None:
    """On stages, then on other stages, then on the whole mesh."""
    by_hand = ByHand(sizes, optimizer)
    for shift in (0, 1, None):
        by_hand.move(shift)
        for _ in range(2):
            by_hand.step()
            by_hand.check(alone(optimizer, by_hand.steps))
    by_hand.parallel.close()


def skipped(sizes: Mapping[str, int]) -> None:
    """A step that has overflowed counts nowhere."""
    by_hand = ByHand(sizes)
    by_hand.step()
    by_hand.steps -= 1
    before = by_hand.optimizer_state.describe()
    for found_inf, count in ((1.0, 1), (0.0, 2)):
        by_hand.step(torch.tensor(found_inf))
        by_hand.steps -= 1
        counts = {float(state["step"]) for state in by_hand.optimizer.state.values() if "step" in state}
        assert counts == {float(count)} and int(by_hand.averages.count) == count, (before, counts)
    by_hand.parallel.close()
