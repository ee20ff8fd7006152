"""Recurrent layers, which keep a list of their parameters beside them and make it anew when these are others."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from equality import check_equal, relative
from processes import ranks
from shared_captures import shared_captures  # noqa: F401
from torch import nn

import autopar
import autopar.model.compiled
import autopar.passes.manager
from autopar import CaptureError, Mesh
from autopar.capture import capture
from autopar.capture.trace import Tracer
from autopar.examples.function_calls import function_calls
from autopar.ir.nodes import record_of
from autopar.runtime.dtensors import full_tensor
from autopar.verify.levels import verify

KINDS = (nn.RNN, nn.LSTM, nn.GRU)


@functools.cache
def layer(kind: Any, both_ways: bool) -> nn.Module:
    return kind(6, 5, **({"num_layers": 2, "bidirectional": True} if both_ways else {"batch_first": True})).double()


@pytest.mark.usefixtures("shared_captures")
@pytest.mark.parametrize(
    ("kind", "both_ways", "mesh"),
    [
        *((kind, False, Mesh(dp=2, tp=2)) for kind in KINDS),
        (nn.LSTM, True, Mesh(dp=2)),
        *(pytest.param(kind, False, Mesh(dp=2), marks=pytest.mark.sweep("it is there on two axes")) for kind in KINDS),
        *(
            pytest.param(kind, True, mesh, marks=pytest.mark.sweep("an LSTM of two layers is there"))
            for kind in KINDS
            for mesh in (Mesh(dp=2), Mesh(dp=2, tp=2))
            if (kind, mesh) != (nn.LSTM, Mesh(dp=2))
        ),
    ],
    ids=str,
)
def test_layers(kind: Any, both_ways: bool, mesh: Mesh) -> None:
    model = layer(kind, both_ways)
    model.zero_grad()
    kept = list(model._flat_weights)
    check_equal(model, mesh, None, (torch.randn((2, 4, 6) if both_ways else (4, 3, 6), dtype=torch.float64),))
    assert all(a is b for a, b in zip(model._flat_weights, kept, strict=True))


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_float32(kind: Any) -> None:
    """For which a CPU has ops of its own."""
    check_equal(kind(6, 5, batch_first=True), Mesh(dp=2), None, (torch.randn(4, 3, 6),), tolerance=1e-4)


class Read(nn.Module):
    """A loss of the last of what a recurrent layer returns."""

    def __init__(self) -> None:
        super().__init__()
        self.Layer, self.Norm = nn.GRU(6, 8, batch_first=True), nn.LayerNorm(8)  # names as people give them

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.Norm(self.Layer(x)[0][:, -1]), y)


def trained(zero: int) -> None:
    """Labels are every other number of a tensor, and a micro-batch has one row of each rank, or two: then the layer is
    captured again, with parameters that zero=3 has laid otherwise since."""
    torch.manual_seed(0)
    model = Read().double()
    alone = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp")
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1), zero=zero, microbatches=2)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for rows in (4, 8, 4):
        x, table = torch.randn(rows, 3, 6, dtype=torch.float64), torch.randint(8, (rows, 2))
        loss = alone(x, table[:, 0])
        assert relative(step(x, table[:, 0]), loss.detach()) <= 1e-12
        loss.backward(), optimizer.step(), optimizer.zero_grad()
    for ours, own in zip(parallel.parameters(), alone.parameters(), strict=True):
        assert relative(full_tensor(ours), own.detach()) <= 1e-12
    assert step.captures == 2
    assert {row.phase for row in step.memory(0)} == {"forward", "backward", "update"}


@pytest.mark.processes
@pytest.mark.parametrize(
    "zero", [3, pytest.param(0, marks=pytest.mark.sweep("zero=3 lays out what this leaves as it is"))]
)
def test_steps_on_processes(zero: int) -> None:
    ranks(2).run(trained, zero)


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.LSTMCell, nn.GRUCell])
def test_cells(kind: Any) -> None:
    """The gates' weights are split gate by gate."""
    gates = {nn.RNNCell: 1, nn.LSTMCell: 4, nn.GRUCell: 3}[kind]
    plan = {"weight_*": (f"({gates} -1/tp)", None), "bias_*": (f"({gates} -1/tp)",)}
    parallel = check_equal(kind(6, 4).double(), Mesh(dp=2, tp=2), plan, (torch.randn(5, 6, dtype=torch.float64),))
    assert parallel.reports["place"].notes == ()


@pytest.mark.parametrize(
    "options", [{"proj_size": 3}, {"bias": False, "num_layers": 2}, {"bidirectional": True, "proj_size": 2}], ids=str
)
def test_lstms_of_other_kinds(options: dict[str, Any]) -> None:
    check_equal(nn.LSTM(6, 5, **options).double(), Mesh(dp=2), None, (torch.randn(3, 4, 6, dtype=torch.float64),))


class WithStates(nn.Module):
    """Begins with states of the caller's, with and without a batch, as tanh and as relu."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.rnn = nn.LSTM(6, 5), nn.RNN(5, 5, nonlinearity="relu")

    def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, (h, c) = self.lstm(x, (h, c))
        return y, h, c, *self.rnn(y[:, 0])


def test_first_states() -> None:
    args = (torch.randn(3, 4, 6), torch.randn(1, 4, 5, requires_grad=True), torch.randn(1, 4, 5))
    check_equal(
        WithStates().double(),
        Mesh(tp=2),
        None,
        tuple(arg.double().detach().requires_grad_(arg.requires_grad) for arg in args),
    )


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        (nn.RNN, 3),
        *(
            pytest.param(kind, 2, marks=pytest.mark.sweep("the layers of an RNN show where it is dropped"))
            for kind in (nn.LSTM, nn.GRU)
        ),
    ],
)
def test_dropout_between_layers(kind: Any, layers: int) -> None:
    """That of a single device, behind every layer but the last, in both directions."""
    model = kind(6, 5, num_layers=layers, bidirectional=True, dropout=0.4, batch_first=True).double()
    x = torch.randn(4, 2, 6, dtype=torch.float64)
    parallel = autopar.parallelize(copy.deepcopy(model), Mesh(dp=2), random="single")
    torch.manual_seed(5)
    ours = parallel.simulate(x)[0]
    torch.manual_seed(5)
    assert relative(ours, model(x)[0].detach()) <= 1e-12
    assert relative(model.eval()(x)[0].detach(), ours.detach()) > 1e-3, "dropout does something"


class Loop(nn.Module):
    """A cell in a loop of its own."""

    def __init__(self, kind: Any, steps: int) -> None:
        super().__init__()
        self.cell, self.steps = kind(3, 4), steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = None
        for _ in range(self.steps):
            state = self.cell(x, state)
        return state[0] if isinstance(state, tuple) else state


class Sampling(nn.Module):
    """Its net takes noise away, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(17):
            x = x - 0.1 * self.net(x)
        return x


def notes_of(model: nn.Module, *args: torch.Tensor) -> list[str]:
    return [note for note in capture(model, args).notes if "time to capture" in note]


@pytest.mark.long
def test_the_report_says_that_layers_are_unrolled() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.encoder(x)[0])

    captured = capture(Two(), (torch.randn(2, 5, 3),))
    lines = sum(record_of(node).module == "encoder" for node in captured.program.nodes)
    total = len(list(captured.program.nodes))
    wanted = (
        f"the LSTM encoder is unrolled into 5 steps, which make {lines} of the program's {total} lines; the time "
        f"to capture grows with them"
    )
    assert [note for note in captured.notes if "time to capture" in note] == [wanted]
    assert "the model (GRU) is unrolled into 5 steps" in notes_of(nn.GRU(3, 4, num_layers=2), torch.randn(5, 2, 3))[0]


@pytest.mark.long
def test_the_report_says_that_a_module_is_called_in_a_loop() -> None:
    """And not what it calls, nor modules that are shared by some layers."""
    (note,) = notes_of(Loop(nn.RNNCell, 17), torch.randn(2, 3))
    assert note.startswith("the RNNCell cell is called 17 times, which make ")
    assert notes_of(Loop(nn.RNNCell, 12), torch.randn(2, 3)) == []
    (note,) = notes_of(Sampling(), torch.randn(2, 3))
    assert note.startswith("the Sequential net is called 17 times")


def test_lengths_of_packed_sequences_are_values() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.GRU(3, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(nn.utils.rnn.pack_padded_sequence(x, [3, 2], batch_first=True))[0].data

    with pytest.raises(
        CaptureError, match=r"keep sequences padded, and take what counts with torch\.where or an index"
    ):
        capture(Packed(), (torch.randn(2, 3, 3),))


@pytest.mark.long
@pytest.mark.parametrize(
    "model", [lambda steps: nn.RNN(3, 4), lambda steps: Loop(nn.RNNCell, steps)], ids=["layer", "loop"]
)
def test_work_is_linear_in_steps(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of capture and all passes; and one trace is enough, since no op writes."""
    traces = []
    monkeypatch.setattr(Tracer, "_functionalize", lambda *args: traces.append(args))
    for module in (autopar.model.compiled, autopar.passes.manager):  # without the texts that tests parse back
        monkeypatch.setattr(module, "verify", verify)

    def work(steps: int) -> int:
        x = torch.randn(steps, 2, 3) if isinstance(model(steps), nn.RNN) else torch.randn(2, 3)
        return function_calls(lambda: autopar.parallelize(model(steps), Mesh(dp=2), "ddp", example=(x,)))

    work(1)  # what is found out once
    few, twice, again = work(2), work(4), work(8)
    assert again - twice < 2.2 * (twice - few)
    assert not traces


def test_references_that_a_layer_renews_are_no_news() -> None:
    """A forward finds that its weak references are to other parameters, and makes new ones; nothing of it stays."""
    model = nn.LSTM(4, 4)
    kept = model._flat_weight_refs
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp", example=(torch.randn(3, 2, 4),))
    assert not any("forward changes" in note for note in parallel.reports["capture"].notes)
    assert model._flat_weight_refs is kept


def test_only_recurrent_models_are_traced_without_cudnn() -> None:
    """Its op draws its own dropout; convolutions and norms keep the kernels that eager has."""
    seen = []

    class Looking(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> Any:
            seen.append(torch.backends.cudnn.enabled)
            return self.inner(x)

    for inner, on in ((nn.GRU(4, 4), False), (nn.Linear(4, 4), True)):
        seen.clear()
        capture(Looking(inner), (torch.randn(3, 2, 4),))
        assert set(seen) == {on} and torch.backends.cudnn.enabled
