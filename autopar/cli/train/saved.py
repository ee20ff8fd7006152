"""Save and resume a training: checkpoints of the step, the schedule, the position in the data and the curves so far.

Batches depend only on the seed and the number of the step, and weights only on the saved state. So a training that is
interrupted at any moment and resumed has the numbers of an uninterrupted one.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from autopar import checkpoint
from autopar.cli.train.check import Checked
from autopar.cli.train.loop import TrainedStep
from autopar.cli.train.options import option
from autopar.cli.train.refused import Refused
from autopar.elastic.owner import Owner
from autopar.elastic.reached import Reached
from autopar.elastic.start import Start
from autopar.step.train_step import TrainStep

SAME = ("size", "dtype", "batch", "sequence", "optimizer", "warmup", "weight_decay", "clip_norm", "seed", "amp")


DIFFERED = "differs-from-single-device"  # a file in the folder of the checkpoints, with the number of steps


def numbers_of(checked: Checked) -> dict[str, Any]:
    """Return the options that determine the numbers of a training: it cannot be resumed with others.

    The mesh and the like may change.
    """
    o, text = checked.options, checked.text
    options = {name: getattr(o, name) for name in SAME}
    options |= {
        "lr": checked.lr,
        "text": f"{text.name} ({len(text.data):,} bytes, crc32 {zlib.crc32(text.data.numpy().data):08x})",
    }
    # the schedule of the learning rate ends with the last step
    return options | ({"steps": o.steps} if o.warmup else {})


def check_resumed(checked: Checked) -> int:
    """Return how many steps the newest complete checkpoint has, 0 if there is none.

    ``Refused`` if it has other options.
    """
    options = checked.options
    folder = options.checkpoint
    if not options.resume or folder is None:
        return 0
    try:
        state = checkpoint.load(folder, {}, strict=False)
    except FileNotFoundError:
        return 0
    if not isinstance(state.get("options"), dict) or "curve" not in state:
        raise Refused(f"--checkpoint {folder} is not of autopar train; name another folder")
    for name, value in numbers_of(checked).items():
        if (saved := state["options"].get(name)) != value:
            raise Refused(
                f"{option(name)} is {value}, and in the checkpoint in {folder} it was {saved}; give {option(name)} as "
                f"it was, or name another folder"
            )
    taken = len(state["curve"])
    if taken > options.steps:
        raise Refused(
            f"--steps {options.steps}, but the checkpoint in {folder} has taken {taken} already; give --steps {taken} "
            f"or more"
        )
    return taken


def differed(checked: Checked) -> bool:
    """Return whether an earlier start has found other numbers than a single device's, and say so.

    A launcher starts the ranks again after that; they need not compare again.
    """
    o = checked.options
    path = Path(o.checkpoint or "") / DIFFERED
    found = o.elastic and o.checkpoint is not None and path.exists() and path.read_text() == str(o.steps)
    if found and checked.launched is not None and checked.launched.rank == 0:
        print(
            f"autopar: the numbers of these {o.steps} steps were not those of a single device; remove {path} "
            f"to compare them again",
            file=sys.stderr,
        )
    return found


@dataclass
class Saved:
    """The checkpoints of one training. All ranks make the same calls.

    Attributes:
        start: with ``--elastic``, once it has resumed: from which step it goes on, and how many steps were lost.
    """

    checked: Checked
    step: TrainStep
    schedule: LRScheduler
    start: Start | None = field(default=None, init=False)
    _reached: Reached | None = field(default=None, init=False)
    _owner: Owner | None = field(default=None, init=False)

    def resume(self) -> list[TrainedStep]:
        """Load the newest complete checkpoint into the captured step, and return its past steps.

        There are none without a checkpoint.
        """
        o = self.checked.options
        if o.elastic:
            self._owner = Owner(self._folder)
            self._owner.claim()
        steps = self._resumed()
        if o.elastic:
            self._reached = Reached(self._folder)
            lost = max(0, self._reached.newest() - len(steps))
            self.start = Start(self._folder, bool(steps), len(steps), lost, o.steps, o.every, self.checked.mesh)
        return steps

    def _resumed(self) -> list[TrainedStep]:
        if not check_resumed(self.checked):
            return []
        state = checkpoint.load(self._folder, self._state([]))
        self.step.load_state_dict(state["step"])
        self.schedule.load_state_dict(state["schedule"])
        steps = [
            TrainedStep(number, loss, norm, skipped=skipped)
            for number, (loss, norm, skipped) in enumerate(state["curve"])
        ]
        if state["next"] != len(steps):
            raise Refused(f"--checkpoint {self._folder} is not of autopar train; name another folder")
        return steps

    def kept(
        self, before: list[TrainedStep], steps: Iterable[TrainedStep], on_saved: Callable[[Path, int], None]
    ) -> Iterator[TrainedStep]:
        """Yield the same steps, and save a checkpoint after every ``--every`` steps and after the last.

        ``on_saved`` is called after each save.
        """
        curve, o = list(before), self.checked.options
        for step in steps:
            curve.append(step)
            if self._reached is not None:
                self._reached.note(len(curve))
            if o.checkpoint is not None and (len(curve) % o.every == 0 or len(curve) == o.steps):
                if self._owner is not None:
                    self._owner.check()
                on_saved(checkpoint.save(self._folder, self._state(curve)), len(curve))
            yield step

    def note_difference(self) -> None:
        """Note that the numbers of the whole training are not those of a single device."""
        (Path(self._folder) / DIFFERED).write_text(str(self.checked.options.steps))

    @property
    def _folder(self) -> str:
        assert self.checked.options.checkpoint is not None
        return self.checked.options.checkpoint

    def _state(self, curve: list[TrainedStep]) -> dict[str, Any]:
        return {
            "step": self.step.state_dict(),
            "schedule": self.schedule.state_dict(),
            "next": len(curve),  # the number of the next batch and step
            "curve": [[step.loss, step.norm, step.skipped] for step in curve],
            "options": numbers_of(self.checked),
        }
