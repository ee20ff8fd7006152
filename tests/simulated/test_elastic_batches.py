"""``autopar.elastic.batches`` goes on exactly: losses, dropout, learning rates, the scale of the loss, and the data."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar import checkpoint, elastic
from autopar.errors import CheckpointError

PLAN = {"up.weight": ("tp", None), "down.weight": (None, "tp")}
ROWS = 16


class Dropped(torch.nn.Module):
    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, hidden, bias=False), torch.nn.Linear(hidden, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(self.down(torch.relu(self.up(x))), 0.3, self.training).square().mean()


def listed() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, 8, generator=generator) for _ in range(5)]


class Drawn:
    """Batches in an order and with noise from torch's own generator, from which each pass draws when it begins.

    ``rolls``: what was loaded at the end of a pass begins the next one at once, as torchdata's loader does; else it is
    an empty pass.
    """

    def __init__(self, rolls: bool) -> None:
        self.rolls = rolls
        self.order: list[int] = []
        self.given, self.is_loaded = 0, False

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = torch.randperm(5).tolist()
        if not self.is_loaded or (self.rolls and self.given == 5):
            self.order, self.given = order, 0
        self.is_loaded = False
        return self._batches()

    def _batches(self) -> Iterator[torch.Tensor]:
        for index in self.order[self.given :]:
            self.given += 1
            yield listed()[index] + torch.randn(ROWS, 8) / 100

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.given, self.is_loaded = list(state["order"]), state["given"], True


def train(folder: Path, data: Any, steps: int, ranks: int = 4, hidden: int = 16, stop: int | None = None,
          every: int = 4, background: bool = False, **options: Any) -> list[float]:  # fmt: skip
    """The losses of the steps that are left. ``stop``: the loop is left before this step, as by an error."""
    torch.manual_seed(7)
    chosen = elastic.choose("dp=2,tp=2", "tp=2", global_batch=ROWS, micro_batch=8, ranks=ranks)
    parallel = autopar.parallelize(Dropped(hidden), chosen.mesh, PLAN)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    step = parallel.train_step(optimizer, microbatches=chosen.microbatches, **options)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=40)
    losses = []
    with warnings.catch_warnings():  # a first step that is skipped for its overflow looks like a wrong order of calls
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        for batch in elastic.batches(folder, step, data, steps=steps, every=every, background=background,
                                     states={"schedule": schedule}):  # fmt: skip
            if step.steps + 1 == stop:
                break
            losses.append(step.simulate(batch).item())
            schedule.step()
    return losses


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp16, whose first steps overflow": {"amp": "fp16-O2", "loss_scale": 1e9, "zero": 1, "clip_norm": 1.0},
    "averages, written in the background": {"ema": 0.9, "background": True},
}


@pytest.mark.long
@pytest.mark.parametrize("how", OPTIONS)
def test_it_goes_on_bit_for_bit(how: str, tmp_path: Path) -> None:
    """Dropout and learning rates too; the steps after the checkpoint are taken again, and no others."""
    options, stop = OPTIONS[how], 11
    whole = train(tmp_path / "whole", listed(), 16, **options)
    before = train(tmp_path / "stopped", listed(), 16, stop=stop, **options)
    saved = (stop - 1) // 4 * 4
    after = train(tmp_path / "stopped", listed(), 16, **options)
    assert before == whole[: stop - 1] and after == whole[saved:]
    assert len(set(whole)) == 16, "dropout and batches differ from step to step"


@pytest.mark.long
@pytest.mark.parametrize(
    ("every", "rolls"), [(5, True), (5, False), (4, False)]
)  # at the end of a pass, and within one
def test_data_that_draws_from_the_generator_of_the_training(every: int, rolls: bool, tmp_path: Path) -> None:
    """What begins a pass draws once, before the checkpoint; a training that goes on does not draw again."""
    whole = train(tmp_path / "whole", Drawn(rolls), 14, every=every)
    train(tmp_path / "stopped", Drawn(rolls), 14, stop=12, every=every)
    assert train(tmp_path / "stopped", Drawn(rolls), 14, every=every) == whole[11 // every * every :]


@pytest.mark.long
def test_a_loader_of_torchdata(tmp_path: Path) -> None:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        torch.manual_seed(3)  # it draws the seed of its order
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
            return loaders.StatefulDataLoader(torch.cat(listed()), batch_size=ROWS, shuffle=True)

    for every, stop in ((4, 7), (5, 8), (5, 12)):  # within a pass, and at the end of one
        whole = train(tmp_path / f"whole{stop}", loader(), 15, every=every)
        train(tmp_path / f"stopped{stop}", loader(), 15, stop=stop, every=every)
        assert train(tmp_path / f"stopped{stop}", loader(), 15, every=every) == whole[(stop - 1) // every * every :]


@pytest.mark.long
def test_on_another_mesh_as_on_that_mesh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run that goes on is that of the mesh on which it goes on, undisturbed, from the checkpoint."""
    for name in ("killed", "undisturbed"):
        train(tmp_path / name, listed(), 16, stop=11)
    train(tmp_path / "killed", listed(), 16, ranks=2, stop=15)  # killed twice, on the mesh that is left too
    again = train(tmp_path / "killed", listed(), 16, ranks=2)
    assert again == train(tmp_path / "undisturbed", listed(), 16, ranks=2)[4:]
    assert [line.partition(", from")[0] for line in capsys.readouterr().err.splitlines()[2:]] == [
        "autopar: step 9 of 16 is next, on tp=2", "autopar: step 13 of 16 is next, on tp=2",
        "autopar: step 9 of 16 is next, on tp=2",
    ]  # fmt: skip
    assert train(tmp_path / "killed", listed(), 16) == []


def test_steps_that_were_lost_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, listed(), 16, stop=4)
    train(tmp_path, listed(), 16, stop=8)
    train(tmp_path, listed(), 16, stop=6)
    assert [line.partition(f" {tmp_path}")[2] for line in capsys.readouterr().err.splitlines()] == [
        " has no checkpoint", " has no checkpoint; 3 steps lost", "; 3 steps lost",
    ]  # fmt: skip


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another model": ({"hidden": 32}, r"does not fit the state.*training/model/up\.weight is float32 \[16 8\] in the "
                      r"checkpoint, and float32 \[32 8\] in the state"),
    "another precision": ({"amp": "bf16-O1"}, r"is of another training\n    amp: bf16-O1, and in the checkpoint None\n"
                          r"  train with the same as before, on any mesh, or name another folder"),
    "another clipping": ({"clip_norm": 2.0}, r"clip_norm: 2\.0, and in the checkpoint None"),
    "another batch": ({"data": [torch.randn(2 * ROWS, 8)] * 5}, r"the rows of a batch: 32, and in the checkpoint 16"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", REFUSED)
def test_a_checkpoint_of_another_training_is_refused(what: str, tmp_path: Path) -> None:
    train(tmp_path, listed(), 4)
    changed, said = REFUSED[what]
    with pytest.raises(CheckpointError, match=f"(?s){said}"):
        train(tmp_path, changed.pop("data", listed()), 8, **changed)


def test_another_list_of_data_is_refused(tmp_path: Path) -> None:
    train(tmp_path, listed(), 4)
    with pytest.raises(ValueError, match="the position is in 5 batches, and here are 4"):
        train(tmp_path, listed()[:4], 8)


def test_data_without_batches_is_refused(tmp_path: Path) -> None:
    train(tmp_path, listed(), 4)
    empty = Drawn(rolls=False)
    empty.given, empty.order, empty.is_loaded = 5, [], True
    with pytest.raises(ValueError, match="the data has no batch; give the data that the checkpoint was saved with"):
        train(tmp_path, empty, 8)


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"model": torch.zeros(2), "position": 1})
    with pytest.raises(
        CheckpointError, match=r"is not of autopar\.elastic\.batches: it has no training and no states and"
    ):
        train(tmp_path, listed(), 4)


def test_two_starts_at_once(tmp_path: Path) -> None:
    """The earlier one ends at its next checkpoint, and has not written it."""
    torch.manual_seed(7)
    parallel = autopar.parallelize(Dropped(), autopar.Mesh(dp=2, tp=2), PLAN)
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=1e-2))
    earlier = elastic.batches(tmp_path, step, listed(), steps=8, every=3)
    later = train(tmp_path, listed(), 2)
    with pytest.raises(CheckpointError, match="another start of this training has taken"):
        for batch in earlier:
            step.simulate(batch)
    assert step.steps == 3 and len(later) == 2
    assert checkpoint.load(tmp_path, {}, strict=False)["training"]["step"] == 2


@pytest.mark.parametrize("inputs", ["local", "global"])
def test_another_batch_of_a_sharded_loader_is_refused(tmp_path: Path, inputs: Any) -> None:
    """Also where the ranks bring their own rows."""
    rows = torch.utils.data.TensorDataset(torch.randn(64, 8))
    for size in (16, 32):
        parallel = autopar.parallelize(Dropped(), autopar.Mesh(dp=1), "ddp", inputs=inputs)
        step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=1e-2))
        data = autopar.data.sharded(rows, parallel, size)
        if size == 16:
            for (batch,) in elastic.batches(tmp_path, step, data, steps=2, every=2):
                step(batch)
        else:
            with pytest.raises(CheckpointError, match="the rows of a batch: 32, and in the checkpoint 16"):
                elastic.batches(tmp_path, step, data, steps=4, every=2)


def test_bad_arguments(tmp_path: Path) -> None:
    parallel = autopar.parallelize(Dropped(), autopar.Mesh(dp=2), "ddp")
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=1e-2))
    bad: list[tuple[dict[str, Any], str]] = [
        (
            {"step": parallel},
            r"step is .*Parallel.*; autopar\.elastic\.batches takes what parallel\.train_step returned",
        ),
        ({"steps": 0}, r"steps=0 is no number of steps; give 1 or more"),
        ({"every": 2.5}, r"every=2\.5 is no number of steps"),
        ({"states": {"lr": 0.1}}, r"states\['lr'\] is .*float.*, which has no state_dict and load_state_dict"),
        ({"keep": 0}, r"keep=0 would leave no checkpoint; give 1 or more, or None to keep all"),
        ({"states": [1]}, r"states is a list; give a dict of name → what has state_dict and load_state_dict"),
        ({"data": iter(listed())}, r"cannot say where it is"),
    ]
    for changed, said in bad:
        given: dict[str, Any] = {"folder": tmp_path, "step": step, "data": listed(), "steps": 4, **changed}
        with pytest.raises((TypeError, ValueError), match=said):
            elastic.batches(**given)
    left = elastic.batches(tmp_path, step, listed(), steps=4)
    with pytest.raises(
        RuntimeError, match=r"a whole pass over the data has taken no step; call step\(batch\) in the loop"
    ):
        for _ in left:
            pass
    with pytest.raises(RuntimeError, match="these batches were given before"):
        next(iter(left))


class Taken:
    """A sharded loader of 72 shuffled rows, four batches of 16 and one of 8, and the sum of each batch that it gave."""

    def __init__(self, ranks: int) -> None:
        dataset = torch.utils.data.TensorDataset(torch.cat(listed())[:72])
        self.loader = autopar.data.sharded(dataset, autopar.Mesh(dp=ranks // 2, tp=2), ROWS, shuffle=True)
        self.state_dict, self.load_state_dict = self.loader.state_dict, self.loader.load_state_dict
        self.sums: list[float] = []

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            self.sums.append(batch[0].sum().item())
            yield batch


def test_rows_of_a_sharded_loader_go_on_with_the_next_one(tmp_path: Path) -> None:
    """Over the end of a pass with a smaller last batch, on the same mesh and on another one."""
    whole, first, same, other = Taken(4), Taken(4), Taken(4), Taken(2)
    losses = train(tmp_path / "whole", whole, 12)
    begun = train(tmp_path / "parts", first, 12, stop=8)
    assert len(set(whole.sums)) == 12 and begun == losses[:7]
    shutil.copytree(tmp_path / "parts", tmp_path / "other")
    assert train(tmp_path / "parts", same, 12) == losses[4:]
    train(tmp_path / "other", other, 12, ranks=2)
    assert same.sums[-8:] == other.sums[-8:] == whole.sums[4:]  # before these is one that the capture took
