"""What a training step is told, beside its optimizer."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from autopar.errors import shown
from autopar.plan.loss_scaling import LossScaling
from autopar.plan.precision.policy import policy_of
from autopar.step.outputs import WAYS

CLIPPED = ("all", "optimizer")  # whose gradients a norm is of
OWN = ("detect_anomaly", "offload")  # options that change nothing for other ranks


@dataclass(frozen=True)
class StepOptions:
    """The keywords of ``parallel.train_step``; their text there."""

    microbatches: int = 1
    amp: str | None = None
    keep: Mapping[str, str] = field(default_factory=dict)
    reduce_dtype: torch.dtype | None = None
    loss_scale: LossScaling = field(default_factory=LossScaling)
    recompute: str | tuple[str, ...] | None = None
    zero: int = 0
    clip_norm: float | None = None
    clip_parameters: str = "all"
    grad_norm: bool = False
    returns: str | Mapping[str, str] = "loss"
    ema: float | None = None
    detect_anomaly: bool = False
    offload: bool = False

    @property
    def measured(self) -> bool:
        """Whether the norm of gradients is measured."""
        return self.grad_norm or self.clip_norm is not None

    @property
    def joins(self) -> Mapping[str, str] | None:
        """Output → how those of micro-batches are joined, where that was said; ``None``: outputs are not returned."""
        if isinstance(self.returns, str):
            return None if self.returns == "loss" else {}
        return self.returns

    @property
    def scaled(self) -> bool:
        """Whether the loss is scaled: small gradients are lost in fp16."""
        return self.amp is not None and self.amp.startswith("fp16")


def describe_options(options: StepOptions) -> str:
    """The options that are not the default, but for those that a rank may choose for itself: ``, zero=1, clip_norm=1.0``."""
    plain = StepOptions()
    given = {one.name: getattr(options, one.name) for one in fields(options)}
    return "".join(f", {name}={value!r}" for name, value in given.items() if name not in OWN and value != getattr(plain, name))


def options_of(given: Mapping[str, Any]) -> StepOptions:
    """The options, checked.

    Raises:
        TypeError: an unknown one; it names the nearest.
        ValueError: a value that an option does not take.
    """
    names = [field.name for field in fields(StepOptions)]
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=2, cutoff=0.4)
            raise TypeError(f"train_step has no option {name!r}; near it: {', '.join(near) or 'none'}. It has {', '.join(names)}")
    if not isinstance(keep := given.get("keep", {}), Mapping) or not all(isinstance(op, str) for op in keep):
        raise TypeError(f"keep={shown(keep)} is no dict of ops and dtypes, as in keep={{'aten::silu': 'f32'}}")
    if isinstance(given.get("recompute"), list):
        given = {**given, "recompute": tuple(given["recompute"])}
    given = {name: value for name, value in given.items() if value is not None}
    if isinstance(scale := given.get("loss_scale"), (int, float)) and not isinstance(scale, bool):
        if not LossScaling.minimum <= scale < math.inf:
            raise ValueError(f"loss_scale={shown(scale)} is no first scale of a loss: give {LossScaling.minimum:g} or more, such as 1024.0")
        given["loss_scale"] = LossScaling(initial=float(scale))
    given["amp"] = None if given.get("amp") is None else policy_of(given["amp"], given.get("keep", {})).name
    found = StepOptions(**given)
    if not isinstance(found.loss_scale, LossScaling):
        raise TypeError(f"loss_scale={shown(found.loss_scale)} is neither a number, the first scale, nor a LossScaling")
    if found.reduce_dtype not in (None, torch.float32):
        raise ValueError(f"reduce_dtype={shown(found.reduce_dtype)}: sums in low precision are reduced as they are (None), or in torch.float32")
    if "loss_scale" in given and not found.scaled:
        raise ValueError(f"loss_scale= is for fp16, whose small gradients are lost; amp={shown(found.amp)} needs none")
    if found.recompute is not None and not found.recompute:
        raise ValueError(f'recompute={shown(found.recompute)}: say "blocks", "min-cut", a glob over module paths, as in "*.layers.*", or None')
    if found.keep and found.amp is None:
        raise ValueError("keep= says in which dtype ops run under amp=, which is not given")
    if isinstance(found.microbatches, bool) or not isinstance(found.microbatches, int) or found.microbatches < 1:
        raise ValueError(f"microbatches={shown(found.microbatches)} is no number of micro-batches; give 1 or more")
    if isinstance(found.zero, bool) or not isinstance(found.zero, int) or found.zero not in (0, 1, 2, 3):
        raise ValueError(f"zero={shown(found.zero)} is no stage of ZeRO: 0 splits nothing, 1 the optimizer's state, 2 gradients too, 3 parameters too")
    norm = found.clip_norm
    if norm is not None and (isinstance(norm, bool) or not isinstance(norm, (int, float)) or not norm > 0):
        raise ValueError(f"clip_norm={shown(norm)} is no norm above 0; None does not clip, {math.inf} only measures")
    if found.clip_parameters not in CLIPPED:
        raise ValueError(
            f'clip_parameters={shown(found.clip_parameters)}: "all" measures the gradients of all parameters that require one, "optimizer" those of the optimizer\'s'
        )
    if not isinstance(found.grad_norm, bool):
        raise ValueError(f"grad_norm={shown(found.grad_norm)}: True measures the norm of the gradients at each step, False only where clip_norm needs it")
    if "clip_parameters" in given and not found.measured:
        raise ValueError("clip_parameters= says which gradients are measured, and none are: give clip_norm= or grad_norm=True too")
    _check_returns(found.returns)
    if found.ema is not None and (isinstance(found.ema, bool) or not isinstance(found.ema, (int, float)) or not 0 <= found.ema <= 1):
        raise ValueError(f"ema={shown(found.ema)} is no decay of a moving average: give a number from 0 to 1, such as 0.999, or None")
    if not isinstance(found.detect_anomaly, bool):
        raise ValueError(f"detect_anomaly={shown(found.detect_anomaly)}: True looks for the first NaN behind each op, False does not")
    if not isinstance(found.offload, bool):
        raise ValueError(f"offload={shown(found.offload)}: True keeps the optimizer's state in host memory, False beside the parameters")
    return found


def _check_returns(returns: Any) -> None:
    if isinstance(returns, Mapping):
        wrong = next(((name, how) for name, how in returns.items() if not isinstance(name, str) or how not in WAYS), None)
        if wrong is not None:
            raise ValueError(f"returns={{{wrong[0]!r}: {wrong[1]!r}}} is no way to join the outputs of micro-batches; there are {', '.join(WAYS)}")
    elif returns not in ("loss", "outputs"):
        raise ValueError(
            f'returns={returns!r}: a step returns its "loss", or the "outputs" of the model, of which a dict says how those of micro-batches are joined: '
            f"{{'logits': 'cat'}}"
        )
