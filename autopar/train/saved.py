"""What a training goes on from after it was ended: checkpoints of the step, the schedule, the place in the data and the curves so far.

Batches are functions of the seed and of the step's number, and weights of what is saved; so a training that was ended at any
moment and goes on has the numbers of one that was not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from autopar import checkpoint
from autopar.step.train_step import TrainStep
from autopar.train.loop import Step
from autopar.train.options import NONE, Options, option
from autopar.train.refused import Refused

SAME = ("size", "text", "dtype", "batch", "sequence", "optimizer", "lr", "warmup", "weight_decay", "clip_norm", "seed", "amp")  # the numbers follow from these
OTHER = "steps"  # with a warm-up, the whole schedule follows from it


def wanted(options: Options) -> dict[str, Any]:
    """The options that a training cannot go on without: with others it would have other numbers."""
    found = {name: getattr(options, name) for name in SAME}
    found["text"] = options.text and str(Path(options.text).resolve())
    return found | {OTHER: options.steps if options.warmup else None}


def check_resumed(options: Options) -> int:
    """How many steps the newest whole checkpoint has, 0 where there is none; ``Refused`` where it is of other options."""
    folder = options.checkpoint
    if not options.resume or folder is None or checkpoint.latest(folder) is None:
        return 0
    found = checkpoint.load(folder, {}, strict=False)
    if not isinstance(found.get("options"), dict) or "curve" not in found:
        raise Refused(f"--checkpoint {folder} is not of autopar train; name another folder")
    for name, value in wanted(options).items():
        if (saved := found["options"].get(name)) != value:
            remedy = f"give {option(name)} {saved}" if saved is not None else f"leave {option(name)} out"
            raise Refused(f"{option(name)} {NONE if value is None else value}, but the checkpoint in {folder} was made with {saved}; {remedy}, or name another folder")
    taken = len(found["curve"])
    if taken > options.steps:
        raise Refused(f"--steps {options.steps}, but the checkpoint in {folder} has taken {taken} already; give --steps {taken} or more")
    return taken


@dataclass
class Saved:
    """The checkpoints of one training. All ranks call all of it alike."""

    options: Options
    step: TrainStep
    schedule: LRScheduler

    def resume(self) -> list[Step]:
        """Go on from the newest whole checkpoint: the steps that were taken; none where there is no checkpoint. The step has been captured."""
        if not check_resumed(self.options):
            return []
        state = checkpoint.load(self._folder, self._state([]))
        self.step.load_state_dict(state["step"])
        self.schedule.load_state_dict(state["schedule"])
        steps = [Step(number, *row) for number, row in enumerate(state["curve"])]
        if state["next"] != len(steps):
            raise Refused(f"--checkpoint {self._folder} is not of autopar train; name another folder")
        return steps

    def kept(self, before: list[Step], steps: Iterable[Step], told: Callable[[Path, int], None]) -> Iterator[Step]:
        """The same steps, with a checkpoint after every ``--every`` of them and after the last. ``told`` hears of each one."""
        curve = list(before)
        for step in steps:
            curve.append(step)
            if self.options.checkpoint is not None and (len(curve) % self.options.every == 0 or len(curve) == self.options.steps):
                told(checkpoint.save(self._folder, self._state(curve)), len(curve))
            yield step

    @property
    def _folder(self) -> str:
        assert self.options.checkpoint is not None
        return self.options.checkpoint

    def _state(self, curve: list[Step]) -> dict[str, Any]:
        return {
            "step": self.step.state_dict(),
            "schedule": self.schedule.state_dict(),
            "next": len(curve),  # the batch, and the number of the step
            "curve": [list(dataclasses.astuple(step)[1:]) for step in curve],
            "options": wanted(self.options),
        }
