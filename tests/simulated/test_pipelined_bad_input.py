"""What a pipelined step refuses, in words that say what to change; before anything is captured where that can be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipelined_steps import MODELS, plan_of, vectors
from torch import nn

import autopar
from autopar import Mesh
from autopar.errors import PlanError, ScheduleError
from autopar.pipeline import PipelineSchedule, Slot, Task, build
from autopar.pipeline.rows import rows


def refused(sizes: dict[str, int] | None = None, plan: Any = None, model: nn.Module | None = None,
            call: Any = None, **options: Any) -> tuple[type[BaseException], str, bool]:  # fmt: skip
    """What a step raises: its class, its text, and whether that was before the first call."""
    sizes = {"pp": 2} if sizes is None else sizes
    step = None
    try:
        parallel = autopar.parallelize(model or MODELS["layers"][0](4), Mesh(sizes), plan or plan_of("layers", sizes))
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        step = parallel.train_step(optimizer, **{"schedule": "1f1b", "microbatches": 2, **options})
        step.simulate(**(vectors(4)(0) if call is None else call))
    except Exception as error:
        return type(error), str(error), step is None
    raise AssertionError("it was not refused")


AT_ONCE: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "pp without a schedule": (
        {"schedule": None},
        ValueError,
        'the mesh (pp=2) has 2 stages along pp, and train_step has no schedule: give schedule="1f1b", another of ',
    ),
    "a schedule without pp": (
        {"sizes": {"dp": 2}},
        ValueError,
        "schedule= is about the stages of a pipeline, and the mesh "
        "(dp=2) has no axis pp, along which they lie: use a mesh such as Mesh(pp=2, dp=2), or leave "
        "schedule= out",
    ),
    "globs without pp": (
        {"sizes": {"dp": 2}, "schedule": None, "stages": ["layers.*"]},
        ValueError,
        "stages= is about the stages of a pipeline, and the mesh (dp=2) has no axis pp",
    ),
    "chunks without pp": (
        {"sizes": {"dp": 2}, "schedule": None, "chunks": 2},
        ValueError,
        "chunks= is about the stages of a pipeline, and the mesh (dp=2) has no axis pp",
    ),
    "pp as the axis of a layout": (
        {"plan": {"head.weight": ("pp", None)}},
        PlanError,
        "the plan's 'head.weight': ('pp', "
        "None) is split over pp, which is no axis of layouts: the stages of a pipeline lie along",
    ),
    "pp as the axis of a batch": (
        {"plan": {"x": ("pp", None)}},
        PlanError,
        "the plan's 'x': ('pp', None) is split over pp",
    ),
    "a preset without its axis": (
        {"plan": "megatron"},
        PlanError,
        "the preset 'megatron' splits over an axis named tp, and the mesh () has none; name one so: Mesh(tp=2)\n"
        "  a plan is for the mesh of one stage, which is (pp=2) without pp; keep pp beside the axes that you name",
    ),
    "no such policy": ({"schedule": "1f1"}, ScheduleError, "there is no policy '1f1'; did you mean '1f1b'"),
    "chunks of another policy": (
        {"chunks": 2},
        ScheduleError,
        "1f1b has 1 stages on a rank, not 2; interleaved-1f1b and looped-bfs have any number",
    ),
    "a number of micro-batches that a schedule decides": (
        {"schedule": build("1f1b", 2, 4), "microbatches": "search"},
        ScheduleError,
        'microbatches="search" compares schedules of several numbers of micro-batches, and this one has 4: give '
        'microbatches=4, or the name of a policy, as in schedule="1f1b"',
    ),
    "a file": (
        {"schedule": "zb.json"},
        ScheduleError,
        "schedule='zb.json' is a file: load it, schedule=autopar.pipeline.PipelineSchedule.load('zb.json')",
    ),
}


@pytest.mark.parametrize("what", AT_ONCE)
def test_refused_at_once(what: str) -> None:
    options, kind, words = AT_ONCE[what]
    raised, text, at_once = refused(**options)
    assert (raised, at_once) == (kind, True) and text.startswith(words), text


LATER: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "micro-batches that do not divide": (
        {"microbatches": 3},
        ValueError,
        "3 micro-batches do not divide a batch of 4 rows (x, y): use a batch of 3 or 6 rows, or microbatches=2; a "
        "last, shorter batch of an epoch is left out with drop_last=True of the DataLoader",
    ),
    "more stages than parts": (
        {"schedule": "interleaved-1f1b", "chunks": 4},
        PlanError,
        "the schedule has 8 stages, and the forward has 6 parts between which it can be cut: layers.0, layers.1, "
        "layers.2, layers.3, head, the root; use fewer stages (a smaller pp, or fewer chunks), or a model with more "
        "layers",
    ),
    "globs leave ops out": ({"stages": ["layers.0", "layers.1"]}, PlanError, "no stage has the module layers.2.0\n"),
    "globs overlap": (
        {"stages": [["layers.*"], ["layers.3", "head"]]},
        PlanError,
        "the module layers.3 is on stage 0, and 'layers.3' puts it on stage 1, too: change one of the globs",
    ),
    "globs run backwards": (
        {"stages": [["layers.2", "layers.3", "head"], ["layers.0", "layers.1"]]},
        PlanError,
        "the cut runs backwards: addmm_2 of stage 0 reads tanh_1 of stage 1, in the forward\n",
    ),
    "globs match nothing": (
        {"stages": [["layers.*", "head"], ["layers.9"]]},
        PlanError,
        "the glob 'layers.9' of stage 1 matches no module that runs an op; near it: ",
    ),
    "globs for other stages": (
        {"stages": ["layers.*"]},
        PlanError,
        "stages=('layers.*',) gives globs for 1 stages, and the "
        "schedule has 2: give one glob, or a list of them, for each",
    ),
    "a number": (
        {"stages": 3},
        PlanError,
        "stages=3: give one glob over module paths, or a list of them, for each stage",
    ),
    "an empty stage": (
        {"stages": [["*"], []]},
        PlanError,
        "stage 1 has no op of the forward: change stages=, or leave it out",
    ),
    "ZeRO without data": ({"zero": 1}, ValueError, "zero= splits what an axis of the batch replicates, but no axis"),
}


@pytest.mark.parametrize("what", LATER)
def test_refused_when_it_is_cut(what: str) -> None:
    options, kind, words = LATER[what]
    raised, text, at_once = refused(**options)
    assert (raised, at_once) == (kind, False) and text.startswith(words), text


class Running(nn.Module):
    """A buffer that each layer reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) + self.mean
            with torch.no_grad():
                self.mean.add_(x.mean(0))
        return x.square().mean()


def test_a_buffer_of_two_stages() -> None:
    raised, text, _ = refused(model=Running(), plan={}, microbatches=1, call={"x": torch.randn(4, 4)})
    assert raised is PlanError
    assert text.startswith("the buffer mean is written in the forward, and the stages 0, 1 read it\n"), text
    assert text.endswith("  keep its readers on one stage, with stages=")


def test_a_buffer_of_two_stages_in_a_call() -> None:
    """The step reads the statistics, and only the call writes them."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = self.norm(layer(x))
            return x.square().mean()

    model, x = Shared(), torch.randn(4, 4)
    parallel = autopar.parallelize(model, autopar.Mesh(pp=2), {})
    parallel.eval()
    step = parallel.train_step(torch.optim.SGD(model.parameters(), lr=0.1), microbatches=2, schedule="gpipe")
    step.simulate(x)
    parallel.train()
    with torch.no_grad(), pytest.raises(PlanError, match=r"the buffer norm.running_mean is written in the forward"):
        parallel.simulate(x)


def test_a_buffer_out_of_order() -> None:
    """A schedule that runs the forwards of micro-batches in another order than theirs."""
    order = [Task(kind, stage, batch) for batch in (1, 0) for kind, along in (("FW", (0, 1)), ("BW", (1, 0)))
             for stage in along]  # fmt: skip
    orders = [[Slot((task,)) for task in order if task.stage == rank] for rank in range(2)]
    schedule = PipelineSchedule(rows(orders, (0, 1)), 2, (0, 1))
    raised, text, _ = refused(model=MODELS["normed"][0](4), plan={}, schedule=schedule, call=vectors(16)(0))
    assert raised is PlanError
    assert (
        "is written in the forward of each micro-batch, and the schedule runs the forwards of stage 0 in the order 1, 0"
        in text
    )
    assert text.endswith("use a schedule that keeps the order of the micro-batches")
