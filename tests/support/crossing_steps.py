"""Steps of which something crosses the end, beside the same steps that end complete: simulated, or on this rank."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import loops
import pytest
import steps
import torch
from torch import distributed

import autopar
from autopar import Mesh
from autopar.errors import AnomalyError
from autopar.ir.nodes import record_of


def phase(node: Any) -> str:
    return record_of(node).phase


def made(name: str, sizes: dict[str, int], options: dict[str, Any], **given: Any) -> Any:
    """A step with a schedule of its learning rate."""
    torch.manual_seed(0)
    make, _, plan = steps.MODELS[name]
    model = make().float() if "amp" in options else make()
    parallel = autopar.parallelize(model, Mesh(sizes), plan if "tp" in sizes else "ddp", **given)
    optimizer = steps.adamw(parallel)
    step = parallel.train_step(optimizer, **options)
    step.schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return step


def taken(step: Any, name: str, first: int, count: int) -> list[torch.Tensor]:
    """So many steps. Returns the losses."""
    losses = []
    for k in range(first, first + count):
        batch = steps.MODELS[name][1](k)
        if step.options.amp is not None:
            batch = {key: value.float() if value.is_floating_point() else value for key, value in batch.items()}
        losses.append(steps.run(step, batch, promoted=step.options.amp is None))
        step.schedule.step()
    return losses


def state_of(step: Any) -> dict[str, torch.Tensor]:
    """All tensors of a training, whole."""
    step.finish()
    found = {name: loops.whole(value) for name, value in step._calls.module.state_dict().items()}
    for name, (_, parameter) in step.optimizer_state.groups().items():
        found |= {f"{name}.{n}": loops.whole(value) for n, value in step.optimizer.state[parameter].items()}
    if step.averages is not None:
        found |= {f"{name}.ema": loops.whole(value) for name, value in step.averages.tensors.items()}
    return {name: value.clone() for name, value in found.items()}


def assert_alike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], bitwise: bool) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        if bitwise:
            assert torch.equal(value, other[name]), name
        else:
            torch.testing.assert_close(value, other[name], rtol=1e-12, atol=1e-12)


def alike(name: str, sizes: dict[str, int], options: dict[str, Any], counts: tuple[int, ...] = (1, 1, 3)) -> None:
    """Losses, parameters and the optimizer's state are those of steps that end complete, after each of the counts."""
    crossing, complete = made(name, sizes, {**options, "across": True}), made(name, sizes, options)
    bitwise, first = len(sizes) == 1 and sizes.get("dp") == 2, 0
    for count in counts:
        ours, theirs = (taken(step, name, first, count) for step in (crossing, complete))
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=0 if bitwise else 1e-12, atol=0)
        assert_alike(state_of(crossing), state_of(complete), bitwise)
        first += count


def nothing_crosses(name: str, sizes: dict[str, int], options: dict[str, Any], why: str) -> None:
    """The report says so, and why."""
    step = made(name, sizes, {**options, "across": True})
    taken(step, name, 0, 1)
    (note,) = step.communication.notes
    assert note.startswith("nothing crosses the end of a step") and why in note
    assert note in str(step.communication) and note in str(step.reports)
    assert "turn" not in step.local(0).programs and not step._calls.unfinished


# -- what people do between two steps ------------------------------------------------------------------------------


def _pair(options: dict[str, Any] | None = None, sizes: dict[str, int] | None = None) -> tuple[Any, Any]:
    """A step that crosses, with its second step under way, and the same that ends complete."""
    sizes, options = sizes or {"dp": 2}, options or {}
    pair = made("mlp", sizes, {**options, "across": True}), made("mlp", sizes, options)
    for step in pair:
        taken(step, "mlp", 0, 2)
    assert pair[0]._calls.unfinished
    return pair


def completed_by_a_call() -> None:
    crossing, complete = _pair()
    x = steps.vectors(9)["x"]
    ours, theirs = (
        step.parallel(x) if step.parallel.job else step.parallel.simulate(x) for step in (crossing, complete)
    )
    assert torch.equal(loops.whole(ours), loops.whole(theirs)) and not crossing._calls.unfinished
    assert_alike(state_of(crossing), state_of(complete), True)


def completed_by_state_dicts() -> None:
    crossing, complete = _pair()
    ours, theirs = copy.deepcopy(crossing.state_dict()), complete.state_dict()
    assert not crossing._calls.unfinished
    for name, value in theirs["model"].items():
        assert torch.equal(loops.whole(ours["model"][name]), loops.whole(value)), name
    taken(crossing, "mlp", 2, 1), taken(complete, "mlp", 2, 1)
    for name, value in complete.parallel.state_dict().items():
        assert torch.equal(loops.whole(crossing.parallel.state_dict()[name]), loops.whole(value)), name
    taken(crossing, "mlp", 3, 1), taken(complete, "mlp", 3, 1)
    for key, state in complete.optimizer.state_dict()["state"].items():
        for name, value in state.items():
            found = crossing.optimizer.state_dict()["state"][key][name]
            assert torch.equal(loops.whole(found), loops.whole(value)), name


def loaded_in_the_middle() -> None:
    """A state that is loaded replaces what is under way, and a training goes on from it."""
    crossing, complete = _pair({"zero": 1})
    saved = [copy.deepcopy(step.state_dict()) for step in (crossing, complete)]
    for step in (crossing, complete):
        taken(step, "mlp", 2, 2)
    for step, state in zip((crossing, complete), saved, strict=True):
        step.load_state_dict(state)
        assert step.steps == 2
        taken(step, "mlp", 5, 2)
    assert_alike(state_of(crossing), state_of(complete), True)


def averaged() -> None:
    crossing, complete = _pair({"ema": 0.5})
    for step in (crossing, complete):
        with step.averaged():
            step.seen = {name: loops.whole(p).clone() for name, p in step.parallel.named_parameters()}
    assert_alike(crossing.seen, complete.seen, True)
    for step in (crossing, complete):
        taken(step, "mlp", 2, 1)
        step.seen = {name: loops.whole(value).clone() for name, value in step.ema.items()}
        taken(step, "mlp", 3, 1)
    assert_alike(crossing.seen, complete.seen, True)
    assert_alike(state_of(crossing), state_of(complete), True)


def another_batch_shape() -> None:
    """A step of other programs completes the one before."""
    crossing, complete = _pair()
    for step in (crossing, complete):
        steps.run(step, {"x": steps.vectors(7)["x"][:8]})
        taken(step, "mlp", 3, 1)
        steps.run(step, {"x": steps.vectors(8)["x"][:8]})
        assert step.captures == 2
    assert_alike(state_of(crossing), state_of(complete), True)


def captured_in_between() -> None:
    """A capture may move parameters, so it completes the step before."""
    crossing, complete = _pair()
    for step in (crossing, complete):
        step.capture({"x": steps.vectors(7)["x"][:8]})
        assert not step._calls.unfinished
        taken(step, "mlp", 2, 1)
    assert_alike(state_of(crossing), state_of(complete), True)


def other_numbers_of_the_optimizer() -> None:
    """Numbers that are part of the program belong to their own step, too."""
    crossing, complete = _pair()
    for step in (crossing, complete):
        step.optimizer.param_groups[0]["maximize"] = True
        taken(step, "mlp", 2, 1)
        step.optimizer.param_groups[0]["weight_decay"] = 0.5
        step.optimizer.param_groups[0]["betas"] = (0.5, 0.9)
        taken(step, "mlp", 3, 2)
    assert_alike(state_of(crossing), state_of(complete), True)


def two_steps_of_a_model() -> None:
    """The step of one optimizer completes that of another one."""
    crossing, complete = _pair()
    for step in (crossing, complete):
        step.finish()
        options = step.options.across
        other = step.parallel.train_step(torch.optim.SGD(step.parallel.parameters(), lr=0.1), across=options)
        for k in (4, 6):
            steps.run(step, steps.vectors(k)), steps.run(other, steps.vectors(k + 1))
        other.finish()
    assert_alike(state_of(crossing), state_of(complete), True)


def two_steps_of_an_optimizer() -> None:
    """The second one completes the first, and the hooks of the first are not those of the user."""
    crossing, complete = _pair()
    for step in (crossing, complete):
        other = step.parallel.train_step(step.optimizer, across=step.options.across)
        for k in (4, 6):
            steps.run(other, steps.vectors(k)), steps.run(step, steps.vectors(k + 1))
    assert_alike(state_of(crossing), state_of(complete), True)
    crossing.optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(ValueError, match="has step hooks"):
        crossing.parallel.train_step(crossing.optimizer, across=True)


def reading_is_refused() -> None:
    crossing, _ = _pair()
    with pytest.raises(
        RuntimeError, match=r"(?s)parameters are read while.*across=True.*step\.finish\(\) on all ranks"
    ):
        list(crossing.parallel.parameters())
    crossing.finish()
    assert list(crossing.parallel.parameters())


def writing_is_refused() -> None:
    """A write to a parameter or to the optimizer's state is found at the next step, and a state can be loaded."""
    crossing, complete = _pair()
    state = copy.deepcopy(complete.state_dict())
    name, parameter = next(iter(crossing._calls.module.named_parameters()))
    for write in (
        lambda: parameter.mul_(2),
        lambda: crossing.optimizer.state[parameter]["exp_avg"].zero_(),
        lambda: crossing.optimizer.state[parameter].update(exp_avg=torch.zeros_like(parameter)),
    ):
        with torch.no_grad():
            write()
        for again in (lambda: taken(crossing, "mlp", 2, 1), crossing.finish, crossing.state_dict):
            with pytest.raises(RuntimeError, match=rf"(?s){name} was written to or replaced while.*step\.load_state"):
                again()
        crossing.load_state_dict(copy.deepcopy(state))
        taken(crossing, "mlp", 2, 1)
    taken(complete, "mlp", 2, 1)
    assert_alike(state_of(crossing), state_of(complete), True)


def an_exception_between_steps() -> None:
    """A step that is refused before it runs changes nothing of what is under way."""
    crossing, complete = _pair()
    with pytest.raises((TypeError, ValueError)):
        steps.run(crossing, {"z": torch.zeros(3)})
    for step in (crossing, complete):
        taken(step, "mlp", 2, 1)
    assert_alike(state_of(crossing), state_of(complete), True)


def an_exception_in_a_step() -> None:
    """A step that fails has taken what was under way: the next one is refused until a state is loaded."""
    crossing, complete = (
        made("mlp", {"dp": 2}, {"across": across, "detect_anomaly": True}) for across in (True, False)
    )
    for step in (crossing, complete):
        taken(step, "mlp", 0, 2)
    state = copy.deepcopy(complete.state_dict())
    with pytest.raises(AnomalyError):
        steps.run(crossing, {"x": steps.vectors(2)["x"] * 1e200})
    for again in (lambda: taken(crossing, "mlp", 2, 1), crossing.finish, crossing.state_dict):
        with pytest.raises(RuntimeError, match=r"(?s)a step has failed.*step\.load_state_dict\(state\)"):
            again()
    crossing.load_state_dict(state)
    for step in (crossing, complete):
        taken(step, "mlp", 2, 1)
    assert_alike(state_of(crossing), state_of(complete), True)


def torch_step_beside() -> None:
    """The optimizer's own step comes behind the update that is under way."""
    crossing, complete = _pair()
    for step in (crossing, complete):
        for parameter in step._calls.module.parameters():
            parameter.grad = torch.ones_like(parameter)
        step.optimizer.step()
        step.optimizer.zero_grad()
        taken(step, "mlp", 2, 1)
    assert_alike(state_of(crossing), state_of(complete), True)


BETWEEN = {function.__name__: function for function in (
    completed_by_a_call, completed_by_state_dicts, loaded_in_the_middle, averaged, another_batch_shape,
    captured_in_between, other_numbers_of_the_optimizer, two_steps_of_a_model, two_steps_of_an_optimizer,
    reading_is_refused, writing_is_refused, an_exception_between_steps, an_exception_in_a_step, torch_step_beside,
)}  # fmt: skip


def between(name: str) -> None:
    BETWEEN[name]()


# -- on processes ----------------------------------------------------------------------------------------------------


def closed_under_way(options: dict[str, Any]) -> None:
    """``close`` completes what is under way; a closed step takes no further batch."""
    crossing, complete = _pair(options)
    parameters = dict(crossing._calls.module.named_parameters())
    crossing.parallel.close()
    assert not crossing._calls.unfinished
    for name, value in complete.parallel.named_parameters():
        assert torch.equal(parameters[name].to_local(), value.to_local()), name  # type: ignore[operator]
    with pytest.raises(RuntimeError, match="closed"):
        steps.run(crossing, steps.vectors(2))
    complete.parallel.close()


def saved_under_way(folder: str, options: dict[str, Any]) -> None:
    crossing, complete = _pair(options)
    autopar.checkpoint.save(Path(folder), crossing.state_dict())
    again = made("mlp", {"dp": distributed.get_world_size()}, {**options, "across": True})
    again.capture(steps.vectors(0))
    again.load_state_dict(autopar.checkpoint.load(Path(folder), again.state_dict()))
    for step in (again, crossing, complete):
        taken(step, "mlp", 2, 2)
    for step in (again, crossing):
        assert_alike(state_of(step), state_of(complete), True)


def one_rank_alone() -> None:
    """A rank that completes a step alone is refused, and so are the others. They go on from a state."""
    crossing, complete = _pair({"zero": 1})
    state = copy.deepcopy(complete.state_dict())
    words = (
        r"(?s)the ranks make different calls\n    rank 0: finish the step before \(across=True\)\n"
        r"    rank 1: train step"
        r".*step\.finish\(\) and what completes a step are for all ranks: let all of them, or none, do that"
    )
    with pytest.raises(RuntimeError, match=words):
        if distributed.get_rank() == 0:
            crossing.finish()
        else:
            taken(crossing, "mlp", 2, 1)
    if distributed.get_rank() == 1:
        with pytest.raises(RuntimeError, match=r"(?s)step\.load_state_dict.*It has failed with.*for all ranks"):
            crossing.finish()
    crossing.load_state_dict(state)
    for step in (crossing, complete):
        taken(step, "mlp", 2, 2)
    assert_alike(state_of(crossing), state_of(complete), True)


def all_but_one_finish() -> None:
    """Where no rank has taken a step, the ranks go on when they complete it alike."""
    crossing, complete = _pair({"zero": 1})
    with pytest.raises(RuntimeError, match=r"(?s)finish the step before.*forward"):
        if distributed.get_rank() == 0:
            crossing.finish()
        else:
            crossing._calls.agreement.announce("forward")
            crossing._calls.agreement.wait()
    crossing.finish()
    assert_alike(state_of(crossing), state_of(complete), True)


def ranks_disagree() -> None:
    """An option ``across`` of some ranks alone is named, in the first step."""
    step = made("mlp", {"dp": 2}, {"across": distributed.get_rank() == 0})
    with pytest.raises(RuntimeError, match=r"(?s)rank 0: .*, across=True\n    rank 1: .*the same options"):
        taken(step, "mlp", 0, 1)
