"""What comes from the cache is what a capture makes, runs alike, and has the numbers of a single device."""

from __future__ import annotations

import copy
import importlib
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.cache.folder import Folder
from autopar.ir.program import text_digest
from autopar.step.choices import _Comparison

MESH = autopar.Mesh(dp=2, tp=2)
PLAN = {"*.up.weight": ("tp", None), "*.down.weight": (None, "tp")}


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.BatchNorm1d(8)
        self.dropout = dropout

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        hidden = torch.relu(self.up(self.norm(x)))
        if self.dropout:
            hidden = nn.functional.dropout(hidden, self.dropout, self.training)
        out = self.down(hidden)
        kept = (y > 0).to(x.dtype)
        table = torch.tensor([1.0, 2.0], dtype=x.dtype)
        return {"loss": ((out - y).square() * kept).sum() / kept.sum(), "out": out, "two": out.sum(0) * table[1],
                "none": None, "number": 3}  # fmt: skip


class Plain(nn.Module):
    """Without statistics over the batch, so that it may be cut into micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.down(torch.relu(self.up(x)))
        kept = (y > 0).to(x.dtype)
        return ((out - y).square() * kept).sum() / kept.sum(), out


class Scaled(Plain):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, y)[0] * self.scale


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)


def call(model: nn.Module, batch: Any, cache: Any, plan: Any = PLAN, **options: Any) -> autopar.Parallel:
    return autopar.parallelize(model, MESH, plan, example=batch, cache=cache, **options)


def said(reports: Any) -> list[str]:
    return [report.notes[0].partition(" ")[0] for report in reports if report.name.endswith("cache")]


def without_cache(reports: Any) -> list[Any]:
    return [(r.name, r.inserted, r.removed, r.bytes, r.notes, r.unmatched) for r in reports if "cache" not in r.name]


@pytest.mark.parametrize("plan", [PLAN, "ddp", "search"], ids=str)
def test_a_call_from_the_cache_is_the_call(tmp_path: Path, batch: Any, plan: Any) -> None:
    model = Net().double()
    made, kept, found = call(model, batch, False, plan), call(model, batch, tmp_path, plan), call(
        model, batch, tmp_path, plan)  # fmt: skip
    assert said(kept.reports) == ["miss:"] and said(found.reports) == ["hit:"] and said(made.reports) == []
    assert found.program == made.program
    assert found.program.text(comments=True) == made.program.text(comments=True)
    for rank in MESH.ranks:
        assert found.local(rank).text(comments=True) == made.local(rank).text(comments=True)
    if plan != "search":  # whose notes have seconds
        assert without_cache(found.reports) == without_cache(made.reports)
    else:
        assert found.solution is not None and kept.solution is not None
        assert found.solution.values == kept.solution.values
        assert found.solution.certificate == kept.solution.certificate
        assert [row.module for row in found.solution.modules] == [row.module for row in kept.solution.modules]
    assert str(found.communication) == str(kept.communication)
    assert str(found.transfers) == str(made.transfers)


def test_numbers_of_a_call_from_the_cache(tmp_path: Path, batch: Any) -> None:
    call(Net().double(), batch, tmp_path)
    model = Net().double()
    alone = copy.deepcopy(model)
    parallel = call(model, batch, tmp_path)
    assert said(parallel.reports) == ["hit:"]
    for _ in range(2):  # the statistics of the batch norm are state
        mine, eager = parallel.simulate(*batch), alone(*batch)
        assert mine.keys() == eager.keys() and mine["none"] is None and mine["number"] == 3
        for name in ("loss", "out", "two"):
            torch.testing.assert_close(mine[name], eager[name], rtol=1e-10, atol=1e-10)
    (mine["loss"] + mine["two"].sum()).backward()
    (eager["loss"] + eager["two"].sum()).backward()
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-10, msg=name)
    torch.testing.assert_close(model.norm.running_mean, alone.norm.running_mean)


@pytest.mark.parametrize("plan", [PLAN, "search"], ids=str)
def test_a_backward_of_some_outputs(tmp_path: Path, batch: Any, plan: Any) -> None:
    """It needs the trace, which is made in this process then."""
    call(Net().double(), batch, tmp_path, plan)
    model = Net().double()
    alone = copy.deepcopy(model)
    parallel = call(model, batch, tmp_path, plan)
    assert said(parallel.reports) == ["hit:"]
    parallel.simulate(*batch)["two"].sum().backward()
    alone(*batch)["two"].sum().backward()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-10)


def test_random_numbers_are_those_of_a_capture(tmp_path: Path, batch: Any) -> None:
    model = Net(dropout=0.5).double()
    outs = []
    for cache, random_ in ((False, "parallel"), (tmp_path, "parallel"), (tmp_path, "parallel"), (False, "single"),
                           (tmp_path, "single"), (tmp_path, "single")):  # fmt: skip
        parallel = call(copy.deepcopy(model), batch, cache, random=random_)
        torch.manual_seed(3)
        outs.append((parallel.simulate(*batch)["out"], *said(parallel.reports)))
    assert [row[1:] for row in outs] == [(), ("miss:",), ("hit:",)] * 2
    for at in (0, 3):
        assert torch.equal(outs[at][0], outs[at + 1][0]) and torch.equal(outs[at][0], outs[at + 2][0])


STEPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "micro-batches": {"microbatches": 2},
    "everything": {"microbatches": 2, "zero": 1, "clip_norm": 0.5, "ema": 0.9, "recompute": "*.up",
                   "returns": "outputs"},
    "zero 3": {"zero": 3},
    "across": {"across": True, "zero": 1},
    "one stream": {"overlap": "today"},
    "open options": {"microbatches": "search", "recompute": "search", "zero": "search"},
}  # fmt: skip


@pytest.mark.parametrize("plan", [PLAN, "search"], ids=["given", "searched"])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_from_the_cache_is_the_step(tmp_path: Path, batch: Any, name: str, plan: Any) -> None:
    model, found = Plain().double(), []
    rows: list[Any] = []
    for cache in (tmp_path, tmp_path):
        own = copy.deepcopy(model)
        parallel = autopar.parallelize(own, MESH, plan, cache=cache)
        step = parallel.train_step(torch.optim.AdamW(own.parameters(), lr=0.1), **STEPS[name])
        losses = []
        for _ in range(3):
            made = step.simulate(*batch)
            losses.append(made[0] if isinstance(made, tuple) else made)
        step.finish()
        found.append(said(step.reports))
        texts = [step.program.text(comments=True), str(step.communication), str(step.choice)]
        texts += [str(part) for rank in MESH.ranks for part in vars(step.local(rank)).values()]
        rows.append((losses, [p.detach().clone() for p in own.parameters()], list(map(text_digest, texts))))
    assert found == [["miss:", "miss:"], ["hit:", "hit:"]]
    for first, second in zip(*rows, strict=True):
        assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
                   for a, b in zip(first, second, strict=True))  # fmt: skip


def test_numbers_of_a_step_from_the_cache(tmp_path: Path, batch: Any) -> None:
    for _ in range(2):
        torch.manual_seed(0)
        model = Plain().double()
        alone = copy.deepcopy(model)
        parallel = autopar.parallelize(model, MESH, PLAN, cache=tmp_path)
        step = parallel.train_step(torch.optim.AdamW(model.parameters(), lr=0.1), microbatches=2, clip_norm=0.5)
        optimizer = torch.optim.AdamW(alone.parameters(), lr=0.1)
        for _ in range(3):
            loss = step.simulate(*batch)
            optimizer.zero_grad()
            expected = alone(*batch)[0]
            expected.backward()
            torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
            optimizer.step()
            torch.testing.assert_close(loss, expected.detach(), rtol=1e-10, atol=1e-10)
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-10)
    assert said(step.reports) == ["hit:", "hit:"]


# -- what is not kept --------------------------------------------------------------------------------------------------


class Reads(nn.Module):
    """Its forward reads something that nobody can compare with that of another process."""

    def __init__(self, read: Any) -> None:
        super().__init__()
        self.up, self.read = nn.Linear(8, 8), read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x) * float(self.read())


def drawn() -> float:
    return random.random()


def drawn_by_name() -> float:
    return importlib.import_module("random").random()


def timed() -> float:
    return time.time()


def from_file() -> float:
    return float(Path(__file__).read_text()[:1] == "x")


class Opaque:
    """An iterator has a state and no description."""

    def __init__(self) -> None:
        self.numbers = iter([1.0] * 100)

    def __call__(self) -> float:
        return next(self.numbers)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.calls = nn.Linear(8, 8), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.up(x) * (2.0 if self.calls > 5 else 1.0)


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.table = nn.Linear(8, 8), torch.arange(64.0).view(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x) + self.table


NOT_KEPT = {
    "uses random": lambda: Reads(drawn),
    "drawn_by_name (": lambda: Reads(drawn_by_name),
    "uses time": lambda: Reads(timed),
    "uses read_text": lambda: Reads(from_file),
    "forward reads and changes read.numbers": lambda: Reads(Opaque()),
    "forward reads and changes calls": Counts,
    "a constant of shape [8, 8]": Large,
}


@pytest.mark.parametrize("why", NOT_KEPT)
def test_what_cannot_be_compared_is_not_kept(tmp_path: Path, why: str) -> None:
    for _ in range(2):
        parallel = autopar.parallelize(
            NOT_KEPT[why](), MESH, "ddp", example=(torch.zeros(8, 8),), cache=tmp_path, first_values="keep"
        )
        note = parallel.reports["cache"].notes[0]
        assert note.startswith("miss: ") and "not kept: " in note and why in note, note
    assert Folder(tmp_path).entries() == []


def test_an_optimizer_in_python_is_not_kept(tmp_path: Path) -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.add_(p.grad, alpha=-group["lr"])

    model = Plain()
    step = autopar.parallelize(model, MESH, PLAN, cache=tmp_path).train_step(Own(model.parameters(), lr=0.1))
    step.simulate(torch.randn(8, 8), torch.randn(8, 8))
    notes = [report.notes[0] for report in step.reports if report.name.endswith("cache")]
    assert notes[-1] == "not used: the optimizer's step is Python code", notes


def test_open_options_are_chosen_once(tmp_path: Path, batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second start compares nothing. Another limit is another choice; what forward reads is compared."""
    compared = []
    best = _Comparison.best
    monkeypatch.setattr(_Comparison, "best", lambda self: compared.append(1) or best(self))

    def chosen(model: nn.Module, **options: Any) -> Any:
        step = autopar.parallelize(model, MESH, cache=tmp_path).train_step(
            torch.optim.SGD(model.parameters(), lr=0.1), microbatches="search", **options)  # fmt: skip
        step.capture(*batch)
        return step.choice, said(step.reports), len(compared)

    first = chosen(Scaled(2.0).double())
    assert first[1:] == (["miss:", "miss:"], 1) and len(first[0].candidates) > 1
    assert chosen(Scaled(2.0).double()) == (first[0], ["hit:", "hit:"], 1)
    assert chosen(Scaled(2.0).double(), recompute="search")[1:] == (["miss:", "miss:"], 2)
    assert chosen(Scaled(3.0).double())[1:] == (["miss:", "miss:"], 3)


# -- entries that cannot be used ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["about.json", "guards.json", "made.json"])
def test_a_corrupt_entry_is_a_miss_with_a_line_and_is_replaced(tmp_path: Path, batch: Any, name: str) -> None:
    model = Plain().double()
    call(model, batch, tmp_path)
    (entry,) = Folder(tmp_path).entries()
    content = (entry / name).read_bytes()
    (entry / name).write_bytes(content[: len(content) // 2])
    note = call(model, batch, tmp_path).reports["cache"].notes[0]
    assert note.startswith("miss: ") and "is corrupt; kept as" in note, note
    assert said(call(model, batch, tmp_path).reports) == ["hit:"]


def test_a_malformed_entry_with_right_digests_is_a_miss(tmp_path: Path, batch: Any) -> None:
    """As of another format with the same name."""
    model = Plain().double()
    call(model, batch, tmp_path)
    folder = Folder(tmp_path)
    (entry,) = folder.entries()
    read = folder.read(entry)
    made = json.loads(read.texts["made.json"])
    for change in (
        {},
        {**made, "record": made["record"][1:]},
        {**made, "shared": {**made["shared"], "Captured": [[]]}},
        {**made, "types": {"meshes": [], "rows": []}},
        [],
        {**made, "shared": {**made["shared"], "Program": 1}},
    ):
        folder.clear()
        folder.write(entry.parent.name, read.about, {**read.texts, "made.json": json.dumps(change)})
        note = call(model, batch, tmp_path).reports["cache"].notes[0]
        assert note.startswith("miss: the entry is malformed: ") and "kept as" in note, note


def test_a_folder_that_cannot_be_written(tmp_path: Path, batch: Any) -> None:
    (tmp_path / "file").write_text("")
    note = call(Plain().double(), batch, tmp_path / "file").reports["cache"].notes[0]
    assert note.startswith(f"miss: {tmp_path / 'file'} is no folder; not kept: Not a directory"), note
