"""Warn at the first step of an optimizer that trains nothing, because it has other parameters than those of the loop.

On processes the parameters of what ``parallelize`` returns are copies. So an optimizer of the model's own parameters
gets no gradients from ``parallel(...)``, and one of ``parallel.parameters()`` gets none if the loop calls the model
itself. Nor does one that was made before ``initialize`` or ``load_weights`` gave a model on meta its parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.capture.model_state import model_state
from autopar.capture.provenance import warn_user

EARLIER = (
    "the optimizer {kind} has {name} as it was before the model on meta got values, which are in new parameters: it "
    "trains nothing; make the optimizer after parallel.initialize() or load_weights(), from parallel.parameters()"
)
ORIGINAL = (
    "the optimizer {kind} has {name} of the original model, and the gradients are at the copy that parallelize has "
    "made for this process: it trains nothing; make the optimizer from parallel.parameters()"
)
COPY = (
    "the optimizer {kind} has {name} of what parallelize returned, and the gradients are at the original model, which "
    "was called in its place: it trains nothing, and each rank computes the whole model; call parallel(…), not the "
    "model"
)


class FirstStep:
    """Looks at the first step of an optimizer with parameters of a model; afterwards it costs nothing.

    Args:
        original: the model that was given to ``parallelize``; it is not kept alive.
        module: the model whose parameters calls train: a copy on processes, else the original.
        warns: whether this rank prints the warning; each looks.
    """

    def __init__(self, original: torch.nn.Module, module: torch.nn.Module, warns: bool) -> None:
        self._module, self._warns = weakref.ref(module), warns
        named = dict(model_state(module).parameters)
        self._earlier = {id(p): (name, p) for name, p in named.items() if p.is_meta}
        # an optimizer may be all that is left of the original, as after model = parallelize(model, mesh)
        self._original: dict[str, weakref.ref[torch.Tensor]] = {}
        if original is not module:
            # a gradient of before this says nothing of the loop
            originals = model_state(original).parameters
            self._original = {name: weakref.ref(p) for name, p in originals if p.grad is None}
        self._others: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._end: weakref.finalize[Any, Any] | None = None
        if self._original or self._earlier:
            self._end = weakref.finalize(module, register_optimizer_step_pre_hook(self._look).remove)
            self._end.atexit = False

    def settle(self) -> None:
        """Look no more."""
        if self._end is not None:
            self._end()
        self._original, self._earlier = {}, {}

    def _look(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        module = self._module()
        if module is None or optimizer in self._others:
            return
        copies = dict(model_state(module).parameters)
        originals = {name: p for name, ref in self._original.items() if (p := ref()) is not None}
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        stepped = {name: p for name, p in copies.items() if id(p) in own}
        of_original = {name: p for name, p in originals.items() if id(p) in own}
        earlier = {name: p for key, (name, p) in self._earlier.items() if key in own and copies.get(name) is not p}
        if not (stepped or of_original or earlier):
            self._others.add(optimizer)
        elif any(p.grad is not None for p in (*stepped.values(), *of_original.values())):
            self.settle()
        elif name := _with_gradient(of_original, copies):
            self._warn(ORIGINAL, optimizer, name)
        elif name := _with_gradient(earlier, copies):
            self._warn(EARLIER, optimizer, name)
        elif name := _with_gradient(stepped, originals):
            self._warn(COPY, optimizer, name)

    def _warn(self, text: str, optimizer: torch.optim.Optimizer, name: str) -> None:
        self.settle()
        if self._warns:
            warn_user(text.format(kind=type(optimizer).__name__, name=name))


def _with_gradient(held: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> str:
    """Return the first of these names whose other parameter has a gradient; "" if there is none."""
    return next((name for name in held if name in others and others[name].grad is not None), "")
