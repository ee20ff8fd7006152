"""Unroll recurrent layers and cells into plain functional ops, step by step, as torch's own kernels compute them.

torch's CPU kernels write into the gates, so their graph would need a second trace to be functional. On accelerators
they are one opaque op.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar.torch_private import set_cudnn, set_onednn

State = tuple[torch.Tensor, ...]
Step = Callable[[torch.Tensor, State, "Weights"], State]


@dataclass(frozen=True)
class Weights:
    """The weights of one layer in one direction."""

    input: torch.Tensor
    hidden: torch.Tensor
    input_bias: torch.Tensor | None = None
    hidden_bias: torch.Tensor | None = None
    projection: torch.Tensor | None = None

    def of_input(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.input, self.input_bias)

    def of_hidden(self, h: torch.Tensor) -> torch.Tensor:
        return F.linear(h, self.hidden, self.hidden_bias)


# -- steps: (contribution of the input, state before) → state after; the first tensor of the state is the output
# -------------------------


def _plain_step(
    activation: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, state: State, weights: Weights
) -> State:
    return (activation(weights.of_hidden(state[0]) + x),)


def _lstm_step(x: torch.Tensor, state: State, weights: Weights) -> State:
    h, c = state
    into, forget, cell, out = (weights.of_hidden(h) + x).chunk(4, 1)
    c = forget.sigmoid() * c + into.sigmoid() * cell.tanh()
    h = out.sigmoid() * c.tanh()
    return (h if weights.projection is None else F.linear(h, weights.projection)), c


def _gru_step(x: torch.Tensor, state: State, weights: Weights) -> State:
    (h,) = state
    reset, update, new = x.chunk(3, 1)
    reset_of_h, update_of_h, new_of_h = weights.of_hidden(h).chunk(3, 1)
    new = (new + new_of_h * (reset_of_h + reset).sigmoid()).tanh()
    return ((h - new) * (update_of_h + update).sigmoid() + new,)


_tanh_step, _relu_step = (functools.partial(_plain_step, activation) for activation in (torch.tanh, torch.relu))


# -- layers ---------------------------------------------------------------------------------------------------------


def _layer(
    step: Step, inputs: Iterable[torch.Tensor], state: State, weights: Weights
) -> tuple[list[torch.Tensor], State]:
    outputs = []
    for x in inputs:
        state = step(x, state, weights)
        outputs.append(state[0])
    return outputs, state


def _layers(step: Step, x: torch.Tensor, states: Sequence[torch.Tensor], params: Sequence[torch.Tensor],
            has_biases: bool, num_layers: int, dropout: float, train: bool, bidirectional: bool,
            batch_first: bool) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Run all layers and directions; return the outputs of the last layer, and the last states of all layers."""
    directions = 1 + bidirectional
    starts = list(zip(*(state.unbind(0) for state in states), strict=True))
    each = len(params) // len(starts)
    ends: list[State] = []
    x = x.transpose(0, 1) if batch_first else x
    for layer in range(num_layers):
        results = []
        for direction in range(directions):
            k = len(ends)
            weights = _weights(params[k * each : (k + 1) * each], has_biases)
            order = slice(None, None, -1 if direction else 1)
            outputs, end = _layer(step, weights.of_input(x).unbind(0)[order], starts[k], weights)
            results.append(torch.stack(outputs[order]))
            ends.append(end)
        x = torch.cat(results, -1) if bidirectional else results[0]
        if dropout and train and layer < num_layers - 1:
            x = torch.dropout(x, dropout, True)
    x = x.transpose(0, 1) if batch_first else x
    return x, *(torch.stack(last) for last in zip(*ends, strict=True))


def _weights(params: Sequence[torch.Tensor], has_biases: bool) -> Weights:
    biases: Sequence[torch.Tensor | None] = params[2:4] if has_biases else (None, None)
    rest = params[4:] if has_biases else params[2:]
    return Weights(params[0], params[1], *biases, *rest)


def _cell(step: Step, x: torch.Tensor, state: State, *params: torch.Tensor) -> Any:
    weights = Weights(*params)
    after = step(weights.of_input(x), state, weights)
    return after if len(state) > 1 else after[0]


LAYERS: dict[Any, Step] = {
    torch.lstm: _lstm_step,
    torch.gru: _gru_step,
    torch.rnn_tanh: _tanh_step,
    torch.rnn_relu: _relu_step,
}
CELLS: dict[Any, Step] = {
    torch.lstm_cell: _lstm_step,
    torch.gru_cell: _gru_step,
    torch.rnn_tanh_cell: _tanh_step,
    torch.rnn_relu_cell: _relu_step,
}


class Unroller(TorchFunctionMode):
    """Unrolls the recurrences of a forward.

    Packed sequences are left to torch, which reads their lengths.

    Attributes:
        steps: the path of the module that was running → how many steps it was unrolled into.
    """

    def __init__(self, running: Callable[[], str]) -> None:
        super().__init__()
        self._running = running
        self.steps: collections.Counter[str] = collections.Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in CELLS:
            x, state, *params = args
            return _cell(CELLS[func], x, _state(state), *params)
        if func in LAYERS and isinstance(args[3], bool):  # for packed sequences, argument 3 is the list of parameters
            x, state, *options = args
            self.steps[self._running()] += int(x.shape[1 if options[-1] else 0])
            return _layers(LAYERS[func], x, _state(state), *options)
        return func(*args, **(kwargs or {}))


def _state(state: Any) -> State:
    return tuple(state) if isinstance(state, (tuple, list)) else (state,)


@contextlib.contextmanager
def plain_recurrences(model: nn.Module) -> Iterator[None]:
    """Trace recurrent layers as plain ops and not as one op of oneDNN or cuDNN.

    The backward of oneDNN's takes a tensor that may be undefined; cuDNN's draws its dropout itself, and its layers read
    where their weights lie. This does not change which kernels the ops use in a run.
    """
    before: Any = torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled
    set_onednn(False)
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        set_cudnn(False)
    try:
        yield
    finally:
        set_onednn(before[0])
        set_cudnn(before[1])
