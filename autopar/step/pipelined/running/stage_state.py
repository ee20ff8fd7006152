"""Hold what a rank has of one stage during a step, and run its passes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any

import torch

from autopar.ir.value_names import sums_in
from autopar.pipeline import Task
from autopar.step.pipelined.placing.programs import Stage
from autopar.step.pipelined.running.functions import Functions, zeros_of

PHASES = {"F": "forward", "B": "backward", "W": "weight_gradients"}
Tensors = dict[str, torch.Tensor]
Gathers = Callable[[], Generator[Any, Any, Tensors]]


class StageState:
    """The tensors of one stage on one rank, by placeholder.

    Attributes:
        stage: the stage.
        held: what all micro-batches share: parameters, buffers, numbers, and the sums so far.
        inputs: those of each micro-batch.
        kept: for each micro-batch, what a pass leaves to a later one.
        outputs: for each micro-batch, what the step returns of it, by name.

    Args:
        functions: the functions of the stage.
        device: where sums begin.
        gathers: gathers the parameters that slots of the schedule gather; ``None`` if none do.
    """

    def __init__(
        self, stage: Stage, functions: Functions, held: Tensors, inputs: Sequence[Tensors], device: torch.device,
        gathers: Gathers | None = None,
    ) -> None:  # fmt: skip
        self.stage, self.held, self.inputs = stage, held, inputs
        self.kept: list[Tensors] = [{} for _ in inputs]
        self.outputs: list[Tensors] = [{} for _ in inputs]
        self._outputs = [stage.interface.returned[k][0] for k in stage.cut.outputs.values()]
        self._functions, self._device, self._gathers = functions, device, gathers
        self._gathered: tuple[str, ...] = ()
        named = {placeholder: name for name, placeholder in stage.named.items()}
        sums = sums_in(stage.program)
        self._sums = {placeholder for placeholder, name in named.items() if name in sums}
        self._states = {state: next_value for state, (next_value, _) in stage.interface.states.items()}
        self._later = self._taken_later()
        self._begun: set[str] = set()

    def _taken_later(self) -> Mapping[str, frozenset[str]]:
        """Return for each pass what later passes take, or what is sent back behind them."""
        later: dict[str, frozenset[str]] = {}
        taken: frozenset[str] = frozenset()
        for of in reversed(PHASES):
            later[of] = taken
            function = self._functions.phase(PHASES[of])
            taken |= frozenset() if function is None else frozenset(function.takes)
            if of == "B":
                taken |= {self.stage.sent_back(value)[0] for value in self.stage.cut.down}
        return later

    def run(self, task: Task) -> Generator[Any, Any, Tensors]:
        """Run a pass of a micro-batch. Returns its results, by name."""
        of, batch = task.of, task.batch
        phase, kept = PHASES[of], self.kept[batch]
        function = self._functions.phase(phase, zeros=phase not in self._begun)
        self._begun.add(phase)
        if function is None:
            return {}
        later = self._later[of]
        boxed = [self._take(name, batch, name in later) for name in function.takes]
        gives = function.gives
        values = yield from function(boxed, task)
        results = dict(zip(gives, values, strict=True))
        del values
        for state, next_value in self._states.items():
            if next_value in results:
                self._replace(state, results[next_value])
        kept.update((name, value) for name, value in results.items() if name in later)
        return results

    def _take(self, name: str, batch: int, later: bool) -> torch.Tensor:
        """Return a value; if no later pass takes it, nothing here keeps it alive."""
        kept = self.kept[batch]
        if name in kept:
            return kept[name] if later else kept.pop(name)
        if name in self.inputs[batch]:
            return self.inputs[batch][name]
        if name not in self.held and name in self._sums:
            self.held[name] = zeros_of(self._functions.local, name, self._device)
        return self.held.pop(name) if name in self._sums else self.held[name]

    def _replace(self, state: str, value: torch.Tensor) -> None:
        """Keep the next value of a sum; write that of a buffer into the buffer."""
        if state in self._sums:
            self.held[state] = value
        else:
            self.held[state].copy_(value)

    def keep_outputs(self, batch: int, results: Tensors, received: Collection[int]) -> None:
        """Keep what the step returns of a micro-batch, behind its forward.

        Args:
            received: where the memory of its messages begins, which the next ones are received in.
        """
        for name in self._outputs:
            value = results[name]
            memory = value.untyped_storage()
            shares = memory.data_ptr() in received or memory.nbytes() > value.nbytes
            self.outputs[batch][name] = value.clone() if shares else value

    def gather(self) -> Generator[Any, Any, None]:
        """Gather the parameters of the stage, if slots of the schedule do that."""
        if self._gathers is not None:
            gathered = yield from self._gathers()
            self.held.update(gathered)
            self._gathered = tuple(gathered)

    def drop_gathered(self) -> None:
        """Free what was gathered."""
        for name in self._gathered:
            del self.held[name]
        self._gathered = ()

    def end(self, batch: int) -> None:
        """Drop what is left of a micro-batch."""
        self.kept[batch].clear()
