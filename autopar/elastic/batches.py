"""Go on from the newest checkpoint of a folder: the batches that are left, with a checkpoint every so many steps."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from autopar import checkpoint
from autopar.checkpoint.collective_errors import on_first_rank, rank_in
from autopar.checkpoint.folder import folder_of, read_manifest
from autopar.checkpoint.values import decode_state
from autopar.data.loader import ShardedLoader
from autopar.data.seeding import generators_kept
from autopar.elastic.numbers import check_same, numbers_of
from autopar.elastic.owner import Owner
from autopar.elastic.position import Stateful, plain, rows_of, stateful, with_tensors
from autopar.elastic.reached import Reached
from autopar.elastic.start import Start
from autopar.errors import CheckpointError, class_of, shown
from autopar.parallel import Parallel
from autopar.step.train_step import TrainStep

PARTS = ("training", "states", "position", "given", "numbers")  # of a checkpoint
NONE = object()  # no batch


class Batches:
    """The batches of the steps that are left. Made by ``batches``.

    Attributes:
        start: from which step the training goes on, on which mesh, and how many steps were lost.
    """

    start: Start

    def __init__(
        self, folder: str | os.PathLike[str], step: TrainStep, data: Any, steps: int, every: int, keep: int | None,
        background: bool, states: Mapping[str, Stateful],
    ) -> None:  # fmt: skip
        self._folder, self._step, self._data = folder_of(folder), step, data
        self._steps, self._every, self._keep, self._background = steps, every, keep, background
        self._states, self._reached, self._owner = dict(states), Reached(self._folder), Owner(self._folder)
        self._rows: int | None = None
        self._writing: Future[Path] | None = None
        self._pass: Iterator[Any] | None = None  # over the data
        self._given = 0  # batches of this pass
        self._steps_before = -1  # steps before this pass; below 0 for one that is resumed, of which nothing may be left
        self._is_used = False
        self._resume()

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches, and save what the body of the loop has done with them."""
        if self._is_used:
            raise RuntimeError("these batches were given before; call autopar.elastic.batches again, which goes on")
        self._is_used = True
        while self._step.steps < self._steps:
            batch = self._next()
            before = self._step.steps
            try:
                yield batch
            finally:  # the loop may be left
                taken = self._step.steps
                self._reached.note(taken)
            self._turn()
            if taken // self._every > before // self._every or taken >= self._steps > before:
                self._save()
        self._finish_writing()
        self._reached.close()

    def _next(self) -> Any:
        """Return the next batch, of a new pass over the data where one has ended."""
        while True:
            if self._pass is None:
                self._begin_pass()
            assert self._pass is not None
            batch = next(self._pass, NONE)
            if batch is not NONE:
                self._given += 1
                if self._rows is None:
                    self._rows = self._rows_of(batch)
                return batch
            self._end_pass()

    def _rows_of(self, batch: Any) -> int | None:
        """Return the rows of the global batch; ``None`` if the ranks bring their own rows, and nobody counts them."""
        if isinstance(self._data, ShardedLoader):
            return self._data.batch_size
        return rows_of(batch) if self._step.inputs == "global" else None

    def _begin_pass(self) -> None:
        self._pass, self._given, self._steps_before = iter(self._data), 0, self._step.steps

    def _end_pass(self) -> None:
        if self._steps_before == self._step.steps:
            raise RuntimeError(
                "a whole pass over the data has taken no step; call step(batch) in the loop, with the step that "
                "autopar.elastic.batches was given, and give data that has batches"
            )
        self._pass = None

    def _turn(self) -> None:
        """Begin the next pass at once where the present one is over.

        To begin it may draw from torch's generator. That comes before a checkpoint, so a training that goes on from it
        draws the same numbers.
        """
        if hasattr(self._data, "__len__") and self._given >= len(self._data):
            self._end_pass()
            self._begin_pass()

    # -- resuming --------------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        assert isinstance(self._step.parallel, Parallel)
        self._owner.claim()
        path = on_first_rank(None, lambda: checkpoint.latest(self._folder))
        if path is not None:
            self._load(path)
        taken, reached = self._step.steps, self._reached.newest()
        self.start = Start(
            str(self._folder), path is not None, taken, max(0, reached - taken), self._steps, self._every,
            self._step.parallel.mesh,
        )  # fmt: skip
        if rank_in(None) == 0:
            print(f"autopar: {self.start}", file=sys.stderr, flush=True)

    def _load(self, path: Path) -> None:
        """Load the newest checkpoint. Batches come from its position on."""
        tree = on_first_rank(None, lambda: read_manifest(path).tree)
        if not isinstance(tree, dict) or not set(PARTS) <= set(tree):
            missing = " and no ".join(part for part in PARTS if not isinstance(tree, dict) or part not in tree)
            raise CheckpointError(f"{path} is not of autopar.elastic.batches: it has no {missing}; name another folder")
        # the step gets its optimizer's state by a capture; the state of generators and data is loaded behind it
        batch = next(iter(self._data), NONE)
        if batch is NONE:
            raise ValueError("the data has no batch; give the data that the checkpoint was saved with")
        now = numbers_of(self._step, self._rows_of(batch))
        check_same(self._folder, decode_state(tree["numbers"], {}), now)
        self._step.capture(batch)
        form = {"training": self._step.state_dict(), "states": self._states_now()}
        state = checkpoint.load(self._folder, form)
        self._rows = state["numbers"]["rows"]
        for name, one in self._states.items():
            one.load_state_dict(state["states"][name])
        self._data.load_state_dict(with_tensors(state["position"]))
        self._step.load_state_dict(state["training"])
        with generators_kept():  # to begin a pass may draw from them, and this pass has begun before
            self._pass, self._given = iter(self._data), state["given"]

    # -- saving ----------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        self._owner.check()
        state = {
            "training": self._step.state_dict(),
            "states": self._states_now(),
            "position": plain(self._data.state_dict()),
            "given": self._given,
            "numbers": numbers_of(self._step, self._rows),
        }
        if not self._background:
            checkpoint.save(self._folder, state, keep=self._keep)
            return
        self._finish_writing()
        self._writing = checkpoint.async_save(self._folder, state, keep=self._keep)

    def _finish_writing(self) -> None:
        """Wait for a save in the background; its errors are raised here."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def _states_now(self) -> dict[str, Any]:
        return {name: one.state_dict() for name, one in self._states.items()}


def batches(
    folder: str | os.PathLike[str],
    step: TrainStep,
    data: Any,
    *,
    steps: int,
    every: int = 100,
    keep: int | None = 2,
    background: bool = False,
    states: Mapping[str, Stateful] | None = None,
) -> Batches:
    """Return the batches that are left of a training, and load its newest checkpoint, if there is one.

    When it returns, the model, the optimizer, the scale of the loss, averages, torch's generator, ``states`` and the
    position in the data are those of the checkpoint, which any mesh may have written. Iterating gives one batch for
    each step, and saves a checkpoint after every ``every`` steps and after the last. All ranks call it, and the first
    prints a line with the step, the mesh and the steps that were lost.

    Args:
        folder: where the checkpoints are, on a file system that all ranks share.
        step: what ``parallel.train_step`` returned; the loop calls it with each batch.
        data: what gives the batches, and keeps a position that is the same on all meshes, that of the global batch: it
            has ``state_dict`` and ``load_state_dict``, as torchdata's ``StatefulDataLoader``; or a list of batches. At
            its end it is iterated again.
        steps: the steps of the whole training.
        every: the steps between two checkpoints, and the most that are lost.
        keep: how many checkpoints stay in the folder; ``None``: all.
        background: whether a thread writes the checkpoints; then the steps that are taken meanwhile may be lost, too.
        states: what else belongs to the training, by name, with ``state_dict`` and ``load_state_dict``: a scheduler of
            the learning rate, above all.

    Raises:
        TypeError: an argument is something else; data that has no position.
        ValueError: a number below one, an empty list, or a position in other data.
        CheckpointError: the checkpoint is of another training: another model, batch or option that changes the numbers.
    """
    if not isinstance(step, TrainStep):
        raise TypeError(
            f"step is {class_of(step)}; autopar.elastic.batches takes what parallel.train_step returned, because its "
            f"micro-batches keep the global batch on any mesh"
        )
    for name, value in (("steps", steps), ("every", every)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={shown(value)} is no number of steps; give 1 or more")
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ValueError(f"keep={shown(keep)} would leave no checkpoint; give 1 or more, or None to keep all")
    if states is not None and not isinstance(states, Mapping):
        raise TypeError(f"states is {class_of(states)}; give a dict of name → what has state_dict and load_state_dict")
    for name, one in (states or {}).items():
        if not isinstance(one, Stateful):
            raise TypeError(f"states[{name!r}] is {class_of(one)}, which has no state_dict and load_state_dict")
    return Batches(folder, step, stateful(data), steps, every, keep, background, states or {})
