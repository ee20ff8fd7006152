"""Write the speed, the memory and the loss of a training to TensorBoard, by one line in its loop."""

from __future__ import annotations

import atexit
import importlib.util
import resource
import sys
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autopar.costs.machine import Machine, machine_from
from autopar.costs.model_work import ModelWork, model_work
from autopar.errors import class_of
from autopar.ir.nodes import record_of, tensor_type
from autopar.ir.program import Program
from autopar.step.program import Step
from autopar.step.train_step import TrainStep

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

MISSING = (
    "autopar.log writes files of TensorBoard, and tensorboard is not installed; pip install 'autopar[log]', or pip "
    "install tensorboard"
)


def log(
    folder: str | Path | SummaryWriter,
    model: object,
    *,
    tokens: int | None = None,
    seconds: float | None = None,
    machine: Machine | str | Path | None = None,
    at: int | None = None,
    **values: float | torch.Tensor,
) -> None:
    """Write one step of a training to TensorBoard. Call it once after each step, on any ranks; the first one writes.

        for batch in batches:
            loss = step(batch)
            autopar.log("runs/a", step, loss=loss)

    Throughput, TFLOP/s and MFU (model FLOPs utilization) begin with the second call, because they are those of the time
    between two calls. FLOPs are those of the latest captured call, from the sharding rules: each op counts once,
    whatever is computed again or on several ranks. MFU is what they would take at the peaks of all ranks, divided by
    the time.

    Args:
        folder: where the files of the training go, or a ``torch.utils.tensorboard.SummaryWriter``.
        model: what has run the step: a ``TrainStep``, or the result of ``parallelize``.
        tokens: of a step; by default the elements of the first input of integers with two dims or more, such as
            ``input_ids``, else the rows of the first input.
        seconds: of the step, where the time between two calls has something else in it, such as an evaluation.
        machine: the machine whose peak is the whole, as for ``parallelize``; by default that of the model. A machine
            without listed peaks has no MFU.
        at: the number of the step; by default ``step.steps``, which goes on after a checkpoint was loaded; of the
            result of ``parallelize`` the calls of this function are counted, from 1.
        values: further numbers, ``loss=loss``, as ``train/loss``.

    Raises:
        ImportError: tensorboard is not installed.
        TypeError: ``model`` is none of these.
        RuntimeError: nothing has been captured yet.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise ImportError(MISSING)
    parallel: Any = model.parallel if isinstance(model, TrainStep) else model
    if not hasattr(parallel, "compiler"):
        raise TypeError(
            f"autopar.log takes a training step or the result of parallelize, and not {class_of(model)}; for other "
            f"models, use torch.utils.tensorboard.SummaryWriter"
        )
    if not isinstance(folder, (str, Path)) and not hasattr(folder, "add_scalar"):
        raise TypeError(
            f'autopar.log writes to a folder, such as "runs/a", or with a SummaryWriter, and not to {class_of(folder)}'
        )
    if parallel.job is not None and parallel.job.rank != 0:
        return
    logs = _LOGS.setdefault(model, {})
    key = str(Path(folder).resolve()) if isinstance(folder, (str, Path)) else id(folder)
    if key not in logs:
        logs[key] = StepLog(model, parallel, folder)
    logs[key].write(tokens, seconds, machine, at, values)


# model → folder → its log
_LOGS: weakref.WeakKeyDictionary[object, dict[object, StepLog]] = weakref.WeakKeyDictionary()


class StepLog:
    """The steps of one training that were written to one folder."""

    def __init__(self, model: object, parallel: Any, folder: str | Path | SummaryWriter) -> None:
        self.writer = _writer(folder)
        self._step = weakref.ref(model) if isinstance(model, TrainStep) else None
        self._parallel = weakref.ref(parallel)
        self.ranks = parallel.mesh.size
        self.simulates = parallel.job is None and self.ranks > 1
        self.device = parallel.device
        self.machine = parallel.compiler.machine or parallel.compiler.planner.machine
        self.steps, self.ended = 0, 0.0
        self._of: tuple[list[object], int, ModelWork] | None = None  # the machine and programs; their tokens and work

    @property
    def step(self) -> TrainStep | None:
        """The training step; ``None`` in a plain loop."""
        return None if self._step is None else self._step()

    def write(
        self, tokens: int | None, seconds: float | None, machine: Machine | str | Path | None, at: int | None,
        values: Mapping[str, float | torch.Tensor],
    ) -> None:  # fmt: skip
        """Write the numbers of the step that has just ended."""
        numbers = {f"train/{name}": _number(value) for name, value in values.items()}  # waits for the device
        now, self.steps = time.perf_counter(), self.steps + 1
        if seconds is None and self.ended:
            seconds = now - self.ended
        if at is None:
            at = self.steps if self.step is None else self.step.steps
        numbers |= self._of_the_step()
        if seconds:
            numbers |= self._speed(seconds, tokens, self.machine if machine is None else machine_from(machine))
        numbers["memory/peak_bytes"] = _peak_bytes(self.device)
        for tag, number in numbers.items():
            self.writer.add_scalar(tag, number, at)
        self.ended = time.perf_counter()

    def _of_the_step(self) -> dict[str, float]:
        step = self.step
        if step is None:
            return {}
        numbers = {"train/lr": float(step.optimizer.param_groups[0]["lr"])}
        if slow := step.ranks.slow:
            numbers |= {"ranks/slowest": slow[0].rank, "ranks/seconds_slower": slow[0].seconds - slow[0].others}
        norm = step.grad_norm
        return numbers if norm is None else numbers | {"train/grad_norm": _number(norm)}

    def _speed(self, seconds: float, tokens: int | None, machine: Machine) -> dict[str, float]:
        counted, work = self._counted(machine)
        numbers = {
            "speed/seconds": seconds,
            "speed/tokens_per_second": (counted if tokens is None else tokens) / seconds,
        }
        if not self.simulates:
            numbers["speed/tflops_per_rank"] = work.flops / seconds / self.ranks / 1e12
            if machine.peak:
                numbers["speed/mfu"] = work.seconds / seconds / self.ranks
        return numbers

    def _counted(self, machine: Machine) -> tuple[int, ModelWork]:
        """Return the tokens and the work of a step, counted once for each program."""
        parallel, step = self._parallel(), self.step
        assert parallel is not None, "the caller has it"
        latest = parallel.program if step is None else step._ran_last()
        programs = _programs(latest)
        key = [machine, *(program for program, _ in programs)]
        if self._of is None or list(map(id, self._of[0])) != list(map(id, key)):
            work = sum((model_work(program, machine).times(count) for program, count in programs), ModelWork())
            self._of = (key, _tokens(programs), work)
        return self._of[1:]


def _programs(program: Program | Step) -> list[tuple[Program, int]]:
    """Return the programs with the forward and the backward, and how often a step runs each."""
    if isinstance(program, Program):
        return [(program, 1)]
    return [own.runs["micro"] for own in program.stages or [program]]


def _tokens(programs: list[tuple[Program, int]]) -> int:
    """Return the tokens of a step: the elements of the first input of integers, else the rows of the first input."""
    inputs = [
        (tensor_type(node), count)
        for program, count in programs
        for node in program.placeholders
        if record_of(node).role == "input" and tensor_type(node).shape
    ]
    for type, count in inputs:
        if not type.dtype.is_floating_point and len(type.shape) > 1:
            return count * torch.Size(type.shape).numel()
    return inputs[0][1] * inputs[0][0].shape[0] if inputs else 0


def _number(value: float | torch.Tensor) -> float:
    return value.item() if isinstance(value, torch.Tensor) else float(value)


def _writer(folder: str | Path | SummaryWriter) -> SummaryWriter:
    if not isinstance(folder, (str, Path)):
        return folder
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder), flush_secs=10)
    atexit.register(writer.close)  # else the last seconds would be lost
    return writer


def _peak_bytes(device: torch.device) -> int:
    """Return the most bytes that this process has had on its device."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
