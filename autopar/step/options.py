"""Check and describe the options of a training step."""

from __future__ import annotations

import difflib
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

import torch

from autopar.costs.machine import Machine, machine_from
from autopar.costs.profile import Profile
from autopar.errors import shown
from autopar.pipeline import PipelineSchedule
from autopar.plan.loss_scaling import LossScaling
from autopar.plan.plan import SEARCH
from autopar.plan.precision.policy import AmpName, Kept, policy_of
from autopar.scheduling.programs.overlap import Given, overlap_of
from autopar.search.devices.stages import Pipelined
from autopar.search.search import check_memory, check_time_limit
from autopar.step.compiling.outputs import WAYS, Way

Clipped = Literal["all", "optimizer"]  # whose gradients a norm is of
CLIPPED: tuple[Clipped, ...] = get_args(Clipped)
Returned = Literal["loss", "outputs"]
RETURNED: tuple[Returned, ...] = get_args(Returned)
Zero = Literal[0, 1, 2, 3, "search"]
STAGES: tuple[Zero, ...] = (0, 1, 2, 3)
Opened = Literal["search"]  # the step chooses the cheapest
Recompute = str | tuple[str, ...] | None
WAYS_TO_RECOMPUTE: tuple[Recompute, ...] = (None, "min-cut", "blocks")
RANK_OPTIONS = ("detect_anomaly", "offload")  # each rank may choose these for itself


@dataclass(frozen=True)
class StepOptions:
    """The options of ``parallel.train_step``, which documents them."""

    microbatches: int | Opened = 1
    amp: AmpName | None = None
    keep: Mapping[str, Kept] = field(default_factory=dict)
    reduce_dtype: torch.dtype | None = None
    loss_scale: LossScaling = field(default_factory=LossScaling)
    recompute: Recompute = None
    zero: Zero = 0
    clip_norm: float | None = None
    clip_parameters: Clipped = "all"
    grad_norm: bool = False
    returns: Returned | Mapping[str, Way] = "loss"
    ema: float | None = None
    detect_anomaly: bool = False
    offload: bool = False
    machine: Machine | None = None
    time_limit: float | None = None
    memory: float | None = None
    overlap: Given | None = None
    profile: Profile | None = None
    across: bool = False
    schedule: str | PipelineSchedule | Pipelined | None = None
    chunks: int | None = None
    stages: tuple[str | tuple[str, ...], ...] | None = None
    compared: tuple[str, ...] = field(default=(), compare=False)  # open options of which this is one way

    @property
    def measured(self) -> bool:
        """Whether the norm of gradients is measured."""
        return self.grad_norm or self.clip_norm is not None

    @property
    def joins(self) -> Mapping[str, Way] | None:
        """Output → how the outputs of micro-batches are joined, if the user requires a way.

        ``None``: outputs are not returned.
        """
        if isinstance(self.returns, str):
            return None if self.returns == "loss" else {}
        return self.returns

    @property
    def opened(self) -> tuple[str, ...]:
        """The options for which the step chooses the cheapest value."""
        return tuple(name for name in ("microbatches", "recompute", "zero") if getattr(self, name) == SEARCH)

    @property
    def count(self) -> int:
        """The number of micro-batches, where it is not open."""
        assert isinstance(self.microbatches, int), "the step has not chosen the number of micro-batches yet"
        return self.microbatches

    @property
    def scaled(self) -> bool:
        """Whether the loss is scaled, so that fp16 does not lose small gradients."""
        return self.amp is not None and self.amp.startswith("fp16")


class StepKeywords(TypedDict, total=False):
    """The keywords of ``parallel.train_step``; ``None`` stands for the default."""

    microbatches: int | Opened | None
    amp: AmpName | None
    keep: Mapping[str, Kept] | None
    reduce_dtype: torch.dtype | None
    loss_scale: float | LossScaling | None
    recompute: str | Sequence[str] | None
    zero: Zero | None
    clip_norm: float | None
    clip_parameters: Clipped | None
    grad_norm: bool | None
    returns: Returned | Mapping[str, Way] | None
    ema: float | None
    detect_anomaly: bool | None
    offload: bool | None
    machine: Machine | str | Path | None
    time_limit: float | None
    memory: float | None
    overlap: Given | None
    profile: Profile | str | Path | None
    across: bool | None
    schedule: str | PipelineSchedule | Pipelined | None
    chunks: int | None
    stages: Sequence[str | Sequence[str]] | None


def describe_options(options: StepOptions) -> str:
    """Describe the options that differ from the default: ``, zero=1, clip_norm=1.0``.

    Options that each rank may choose are left out.
    """
    plain = StepOptions()
    values = {option.name: getattr(options, option.name) for option in fields(options) if option.compare}
    return "".join(
        f", {name}={_described(value)}"
        for name, value in values.items()
        if name not in RANK_OPTIONS and value != getattr(plain, name)
    )


def _described(value: object) -> str:
    """Describe a value in one line, so that values that differ have other lines."""
    if isinstance(value, Pipelined):
        return f"{_described(value.schedule)} cut at {' '.join(map(str, value.cut))}"
    if isinstance(value, PipelineSchedule):
        digest = hashlib.blake2b(value.to_json().encode(), digest_size=4).hexdigest()
        return f"{value.title} (table {digest})"
    return str(value.name) if isinstance(value, (Machine, Profile)) else repr(value)


def options_of(keywords: Mapping[str, Any]) -> StepOptions:
    """Check the options.

    Raises:
        TypeError: an option is unknown; the error names the nearest.
        ValueError: an option does not take the value.
    """
    names = [field.name for field in fields(StepOptions) if field.compare]
    for name in keywords:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=2)
            raise TypeError(
                f"train_step has no option {name!r}; near it: {', '.join(near) or 'none'}. It has {', '.join(names)}"
            )
    if not isinstance(keep := keywords.get("keep", {}), Mapping) or not all(isinstance(op, str) for op in keep):
        raise TypeError(f"keep={shown(keep)} is no dict of ops and dtypes, as in keep={{'aten::silu': 'f32'}}")
    if isinstance(keywords.get("recompute"), list):
        keywords = {**keywords, "recompute": tuple(keywords["recompute"])}
    keywords = {name: value for name, value in keywords.items() if value is not None}
    if isinstance(scale := keywords.get("loss_scale"), (int, float)) and not isinstance(scale, bool):
        if not LossScaling.minimum <= scale < math.inf:
            raise ValueError(
                f"loss_scale={shown(scale)} is no first scale of a loss: give {LossScaling.minimum:g} or more, such "
                f"as 1024.0"
            )
        keywords["loss_scale"] = LossScaling(initial=float(scale))
    keywords["amp"] = None if keywords.get("amp") is None else policy_of(keywords["amp"], keywords.get("keep", {})).name
    if "machine" in keywords:
        keywords["machine"] = machine_from(keywords["machine"])
    if "profile" in keywords:
        given = keywords["profile"]
        if not isinstance(given, (Profile, str, Path)):
            raise TypeError(f"profile={shown(given)} is neither a Profile nor the path of a file that one was saved in")
        keywords["profile"] = given if isinstance(given, Profile) else Profile.load(given)
    if isinstance(globs := keywords.get("stages"), (list, tuple)):
        keywords["stages"] = tuple(tuple(of) if isinstance(of, list) else of for of in globs)
    if "overlap" in keywords:
        overlap_of(keywords["overlap"], "direct")  # refused here if it means nothing
    options = StepOptions(**keywords)
    check_time_limit(0.0 if options.time_limit is None else options.time_limit)
    check_memory(options.memory)
    if not isinstance(options.loss_scale, LossScaling):
        raise TypeError(
            f"loss_scale={shown(options.loss_scale)} is neither a number, the first scale, nor a LossScaling"
        )
    if options.reduce_dtype not in (None, torch.float32):
        raise ValueError(
            f"reduce_dtype={shown(options.reduce_dtype)}: sums in low precision are reduced as they are (None), or in "
            f"torch.float32"
        )
    if "loss_scale" in keywords and not options.scaled:
        raise ValueError(
            f"loss_scale= is for fp16, whose small gradients are lost; amp={shown(options.amp)} needs none"
        )
    if options.recompute is not None and not options.recompute:
        raise ValueError(
            f'recompute={shown(options.recompute)}: say "blocks", "min-cut", a glob over module paths, as in '
            f'"*.layers.*", or None'
        )
    if options.keep and options.amp is None:
        raise ValueError("keep= says in which dtype ops run under amp=, which is not given")
    count = options.microbatches
    if count != SEARCH and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise ValueError(
            f'microbatches={shown(count)} is no number of micro-batches; give 1 or more, or "search" for the cheapest'
        )
    if options.zero != SEARCH and (type(options.zero) is not int or options.zero not in STAGES):
        raise ValueError(
            f"zero={shown(options.zero)} is no stage of ZeRO: 0 splits nothing, 1 the optimizer's state, 2 gradients "
            f'too, 3 parameters too, and "search" chooses for each parameter'
        )
    norm = options.clip_norm
    if norm is not None and (isinstance(norm, bool) or not isinstance(norm, (int, float)) or not norm > 0):
        raise ValueError(f"clip_norm={shown(norm)} is no norm above 0; None does not clip, {math.inf} only measures")
    if options.clip_parameters not in CLIPPED:
        raise ValueError(
            f'clip_parameters={shown(options.clip_parameters)}: "all" measures the gradients of all parameters that '
            f'require one, "optimizer" those of the optimizer\'s'
        )
    if not isinstance(options.grad_norm, bool):
        raise ValueError(
            f"grad_norm={shown(options.grad_norm)}: True measures the norm of the gradients at each step, False only "
            f"where clip_norm needs it"
        )
    if "clip_parameters" in keywords and not options.measured:
        raise ValueError(
            "clip_parameters= says which gradients are measured, and none are: give clip_norm= or grad_norm=True too"
        )
    if not isinstance(options.across, bool):
        raise ValueError(
            f"across={shown(options.across)}: True lets communication cross the end of a step, False completes each "
            f"step"
        )
    if options.across and options.opened:
        raise ValueError(
            f'across=True needs steps that are known before: give {options.opened[0]}= a value, and not "search"'
        )
    _check_returns(options.returns)
    if options.ema is not None and (
        isinstance(options.ema, bool) or not isinstance(options.ema, (int, float)) or not 0 <= options.ema <= 1
    ):
        raise ValueError(
            f"ema={shown(options.ema)} is no decay of a moving average: give a number from 0 to 1, such as 0.999, or "
            f"None"
        )
    if not isinstance(options.detect_anomaly, bool):
        raise ValueError(
            f"detect_anomaly={shown(options.detect_anomaly)}: True looks for the first NaN behind each op, False does "
            f"not"
        )
    if not isinstance(options.offload, bool):
        raise ValueError(
            f"offload={shown(options.offload)}: True keeps the optimizer's state in host memory, False beside the "
            f"parameters"
        )
    return options


def _check_returns(returns: object) -> None:
    if isinstance(returns, Mapping):
        wrong = next(
            ((name, how) for name, how in returns.items() if not isinstance(name, str) or how not in WAYS), None
        )
        if wrong is not None:
            raise ValueError(
                f"returns={{{wrong[0]!r}: {wrong[1]!r}}} is no way to join the outputs of micro-batches; there are "
                f"{', '.join(WAYS)}"
            )
    elif returns not in RETURNED:
        raise ValueError(
            f'returns={returns!r}: a step returns its "loss", or the "outputs" of the model; a dict says how those of '
            f"the micro-batches are joined: {{'logits': 'cat'}}"
        )
