"""Let optimizers that cannot step DTensors step whole parameters, and give loaded states the layouts of parameters.

Adafactor's means of rows, Shampoo's matrices, 8-bit blocks and states made by ``torch.zeros(p.shape)`` are not of the
parameter's layout, and DTensor refuses to mix them with it. Whether a step works is found by a trial before the first
step, on copies. If it does not, torch calls the class's own step with a stand-in for the optimizer, whose parameters
and gradients are gathered; its states are whole on each rank. Then each rank keeps its pieces of the result.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autopar.capture.provenance import user_line, warn_user
from autopar.optimizers import is_known, stand_in_of
from autopar.runtime.dtensors import distributed, full_tensor, is_dtensor
from autopar.runtime.processes.job import Job, job_with
from autopar.runtime.seeds import first_ranks_generator

WHOLE = (
    "{kind} cannot step the pieces of parameters that ranks hold ({error}): each of its steps gathers the parameters "
    "and gradients, and each rank keeps whole states; AdamW, and others that work element by element on tensors made "
    "by zeros_like(p), keep pieces"
)
ONCE = (
    "{kind} calls its closure several times in a step of whole parameters\n    {line}\n  the closure computes with the "
    "pieces, which change only at the end of the step: write its states with zeros_like(p), so that it steps pieces"
)
CALL = "first step of {kind}"
ALIKE = "{line}\n  let all ranks make the steps of the optimizer"

_steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Steps] = weakref.WeakKeyDictionary()
_others: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_hooked: list[Any] = []


def take_steps() -> None:
    """Look at each optimizer before its first step."""
    if not _hooked:
        _hooked.append(register_optimizer_step_pre_hook(_before))
        _hooked.append(register_optimizer_step_post_hook(_after))


def _before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if optimizer in _others:
        return None
    steps = _steps.get(optimizer)
    if steps is None:
        first = next(iter(_parameters(optimizer)), None)
        job = job_with(first.device_mesh, alone=True) if is_dtensor(first) else None
        if job is None:
            _others.add(optimizer)
            return None
        steps = _steps[optimizer] = _Steps(job)
    return steps.before(optimizer, args, kwargs)


def _after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if (steps := _steps.get(optimizer)) is not None and steps.stand_in is not None:
        steps.after(optimizer)


class _Steps:
    """The steps of an optimizer of a model on processes.

    Attributes:
        whole: why its steps take whole parameters; "" if they do not, ``None`` before the first step.
        stand_in: what steps now in the place of the optimizer.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.whole: str | None = None
        self.stand_in: torch.optim.Optimizer | None = None
        self._seen: Any = None  # the states that have the right layouts; a loaded state dict brings others
        self._wholes: dict[torch.Tensor, torch.Tensor] = {}
        self._drawing = contextlib.ExitStack()
        self._warns = False

    def before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_first = self.whole is None
        if is_first and is_known(type(optimizer)):
            self.whole = ""
        if optimizer.state is not self._seen and not self.whole:
            _split(optimizer)
        self._seen = optimizer.state
        if self.whole == "":
            return None
        kind = type(optimizer).__name__
        results = [_Called(value, kind) for value in (*args[1:], *kwargs.values()) if callable(value)]
        given = {id(called.closure): called for called in results}
        args = (args[0], *(given.get(id(value), value) for value in args[1:]))
        kwargs = {name: given.get(id(value), value) for name, value in kwargs.items()}
        if is_first:
            self.whole = self._why_whole(optimizer, args, kwargs)
            self._warns = bool(self.whole) and self._job.rank == 0
        if not self.whole:
            return args, kwargs
        for called in results:
            called.is_last = True
        return (self._gathered(optimizer), *args[1:]), kwargs

    def _why_whole(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        kind = type(optimizer)
        ranks, error = self._job.surface, ""
        if ranks is not None:
            ranks.agree(CALL.format(kind=kind.__name__), ALIKE.format(line=user_line()))
        copies = {id(p): _copied(p) for p in _parameters(optimizer)}
        trial = _stand_in(optimizer, copies, copy.deepcopy)
        _others.add(trial)  # its step may call that of a base, with hooks
        devices = [self._job.device] if self._job.device.type != "cpu" else []
        with torch.random.fork_rng(devices, device_type=self._job.device.type if devices else "cuda"):
            try:
                _step_of(kind)(trial, *map(_again, args[1:]), **{name: _again(value) for name, value in kwargs.items()})
            except Exception as reason:  # whatever it is: if it is not of DTensor, the step of wholes has it too
                error = f"{type(reason).__name__}: {str(reason).partition(chr(10))[0]}"
        every = [error] if ranks is None else ranks.gathered(error)
        return next((one for one in every if one), "")

    def _gathered(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        self._drawing.close()  # after a step that failed
        self._wholes = {p: _whole(p) for p in _parameters(optimizer) if _is_here(p)}
        for p, whole in self._wholes.items():
            whole.grad = None if p.grad is None else _whole(p.grad)
            for name, value in optimizer.state[p].items() if p in optimizer.state else ():
                if is_dtensor(value):
                    optimizer.state[p][name] = _whole(value)
        self.stand_in = _stand_in(optimizer, {id(p): whole for p, whole in self._wholes.items()}, lambda value: value)
        self._drawing.enter_context(first_ranks_generator(self._job, self._job.device))
        return self.stand_in

    @torch.no_grad()
    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep this rank's pieces of the parameters, and what the step has done to the stand-in."""
        self._drawing.close()
        stand_in, self.stand_in = self.stand_in, None
        assert stand_in is not None
        of_whole = {id(whole): p for p, whole in self._wholes.items()}
        for p, whole in self._wholes.items():
            p.copy_(distributed(whole, p) if is_dtensor(p) else whole)
        for key, value in stand_in.state.items():
            optimizer.state[of_whole.get(id(key), key)] = value
        for group, stepped in zip(optimizer.param_groups, stand_in.param_groups, strict=True):
            group.update({name: value for name, value in stepped.items() if name != "params"})
        own = {"param_groups", "state", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"}
        vars(optimizer).update({name: value for name, value in vars(stand_in).items() if name not in own})
        self._wholes = {}
        if self._warns:
            self._warns = False
            warn_user(WHOLE.format(kind=type(optimizer).__name__, error=self.whole))


class _Called:
    """A closure that was called before the step, which reads its gradients."""

    def __init__(self, closure: Callable[[], Any], kind: str) -> None:
        self.closure, self._kind, self.is_last = closure, kind, False
        with torch.enable_grad():
            self.result = closure()
        self._results = [self.result]

    def __call__(self) -> Any:
        if not self._results and self.is_last:
            raise RuntimeError(ONCE.format(kind=self._kind, line=user_line()))
        return self._results.pop() if self._results else self.closure()


def _again(value: Any) -> Any:
    """Return a closure for a trial, with the result of the step's."""
    return (lambda: value.result) if isinstance(value, _Called) else value


def _split(optimizer: torch.optim.Optimizer) -> None:
    """Give whole states of a parameter's shape, as a file of one device has, the parameter's layout."""
    for p, state in optimizer.state.items():
        if not is_dtensor(p) or not p.dim():
            continue
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and not is_dtensor(value) and value.shape == p.shape:
                state[name] = distributed(value, p)


def _stand_in(optimizer: torch.optim.Optimizer, replaced: dict[int, torch.Tensor], kept: Any) -> torch.optim.Optimizer:
    """Return an optimizer with other parameters in the place of these; those that are not named are left out."""
    groups = [
        {**group, "params": [replaced[id(p)] for p in group["params"] if id(p) in replaced]}
        for group in optimizer.param_groups
    ]
    states = {replaced.get(id(p), p): kept(state) for p, state in optimizer.state.items()}
    return stand_in_of(optimizer, groups, states)


def _step_of(kind: type[torch.optim.Optimizer]) -> Any:
    """Return the step of a class without hooks, which torch has put around it when the first optimizer was made."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def _parameters(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _is_here(p: Any) -> bool:
    """Return whether this rank has a part of a parameter; it has none of those of other stages."""
    return not is_dtensor(p) or p.device_mesh.get_coordinate() is not None


def _copied(p: torch.Tensor) -> torch.Tensor:
    copied = p.detach().clone().requires_grad_(p.requires_grad)
    copied.grad = None if p.grad is None else p.grad.detach().clone()
    return copied


def _whole(value: torch.Tensor) -> torch.Tensor:
    whole = full_tensor(value.detach()) if is_dtensor(value) else value.detach()
    return whole.contiguous().clone()
