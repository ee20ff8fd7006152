"""What a training goes on from after it was ended: checkpoints of the step, the schedule, the place in the data and the curves so far.

Batches are functions of the seed and of the step's number, and weights of what is saved; so a training that was ended at any
moment and goes on has the numbers of one that was not.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from autopar import checkpoint
from autopar.cli.train.check import Checked
from autopar.cli.train.loop import TrainedStep
from autopar.cli.train.options import option
from autopar.cli.train.refused import Refused
from autopar.step.train_step import TrainStep

SAME = ("size", "dtype", "batch", "sequence", "optimizer", "warmup", "weight_decay", "clip_norm", "seed", "amp")


def numbers_of(checked: Checked) -> dict[str, Any]:
    """The options from which the numbers of a training follow: it does not go on with others. The mesh and the like are free."""
    o, text = checked.options, checked.text
    found = {name: getattr(o, name) for name in SAME}
    found |= {"lr": checked.lr, "text": f"{text.name} ({len(text.data):,} bytes, crc32 {zlib.crc32(text.data.numpy()):08x})"}
    return found | ({"steps": o.steps} if o.warmup else {})  # the schedule ends with the last of them


def check_resumed(checked: Checked) -> int:
    """How many steps the newest whole checkpoint has, 0 where there is none; ``Refused`` where it is of other options."""
    options = checked.options
    folder = options.checkpoint
    if not options.resume or folder is None:
        return 0
    try:
        found = checkpoint.load(folder, {}, strict=False)
    except FileNotFoundError:
        return 0
    if not isinstance(found.get("options"), dict) or "curve" not in found:
        raise Refused(f"--checkpoint {folder} is not of autopar train; name another folder")
    for name, value in numbers_of(checked).items():
        if (saved := found["options"].get(name)) != value:
            raise Refused(f"{option(name)} is {value}, and in the checkpoint in {folder} it was {saved}; give {option(name)} as it was, or name another folder")
    taken = len(found["curve"])
    if taken > options.steps:
        raise Refused(f"--steps {options.steps}, but the checkpoint in {folder} has taken {taken} already; give --steps {taken} or more")
    return taken


@dataclass
class Saved:
    """The checkpoints of one training. All ranks call all of it alike."""

    checked: Checked
    step: TrainStep
    schedule: LRScheduler

    def resume(self) -> list[TrainedStep]:
        """Go on from the newest whole checkpoint: the steps that were taken; none where there is no checkpoint. The step has been captured."""
        if not check_resumed(self.checked):
            return []
        state = checkpoint.load(self._folder, self._state([]))
        self.step.load_state_dict(state["step"])
        self.schedule.load_state_dict(state["schedule"])
        steps = [TrainedStep(number, loss, norm, skipped=skipped) for number, (loss, norm, skipped) in enumerate(state["curve"])]
        if state["next"] != len(steps):
            raise Refused(f"--checkpoint {self._folder} is not of autopar train; name another folder")
        return steps

    def kept(self, before: list[TrainedStep], steps: Iterable[TrainedStep], told: Callable[[Path, int], None]) -> Iterator[TrainedStep]:
        """The same steps, with a checkpoint after every ``--every`` of them and after the last. ``told`` hears of each one."""
        curve, o = list(before), self.checked.options
        for step in steps:
            curve.append(step)
            if o.checkpoint is not None and (len(curve) % o.every == 0 or len(curve) == o.steps):
                told(checkpoint.save(self._folder, self._state(curve)), len(curve))
            yield step

    @property
    def _folder(self) -> str:
        assert self.checked.options.checkpoint is not None
        return self.checked.options.checkpoint

    def _state(self, curve: list[TrainedStep]) -> dict[str, Any]:
        return {
            "step": self.step.state_dict(),
            "schedule": self.schedule.state_dict(),
            "next": len(curve),  # the batch, and the number of the step
            "curve": [[step.loss, step.norm, step.skipped] for step in curve],
            "options": numbers_of(self.checked),
        }
