"""Trainings with dropout and batch norm whose steps cross their end, beside those of steps that end complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import loops
import steps
import torch
from crossing_steps import assert_alike, state_of

import autopar
from autopar import Mesh

STEPS = 8
OPTIONS: list[dict[str, Any]] = [
    {},
    {"microbatches": 3, "zero": 1},
    {"zero": 2, "ema": 0.9},
    {"zero": 1, "clip_norm": 0.05, "microbatches": 2},
]


class Noisy(torch.nn.Module):
    """A model with random numbers, and with buffers that each micro-batch replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = torch.nn.Linear(8, 16, bias=False), torch.nn.BatchNorm1d(16)  # a bias has none
        self.down, self.drop = torch.nn.Linear(16, 8), torch.nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(torch.relu(self.norm(self.up(x))))).square().mean()


Seen = list[torch.Tensor]


def nothing(step: Any, k: int) -> Seen:
    return []


def rates_are_written(step: Any, k: int) -> Seen:
    """An update has the learning rate of its own step."""
    step.optimizer.param_groups[0]["lr"] = 0.1 / (k + 1)
    return []


def evaluated(step: Any, k: int) -> Seen:
    """A forward in another mode completes the step, and draws nothing."""
    if k % 2:
        return []
    parallel, x = step.parallel, steps.vectors(9)["x"]
    parallel.eval()
    out = parallel.simulate(x) if parallel.job is None else parallel(x)
    parallel.train()
    return [loops.whole(out).detach().clone()]


def states_are_read(step: Any, k: int) -> Seen:
    state = step.optimizer.state_dict()["state"] if k % 2 else {}
    model = step.parallel.state_dict() if k == 2 else {}
    averages = step.ema or {} if k == 4 else {}
    found = [value for one in state.values() for value in one.values()]
    return [loops.whole(value).detach().clone() for value in (*found, *model.values(), *averages.values())]


def finished_twice(step: Any, k: int) -> Seen:
    if k in (1, 2):
        step.finish(), step.finish()
        assert not step._calls.unfinished
    return []


# step → what is done after it, with which number
AFTER = {
    1: (evaluated, 0),
    2: (states_are_read, 3),
    4: (finished_twice, 1),
    5: (states_are_read, 4),
    6: (states_are_read, 2),
}


def one_after_another(step: Any, k: int) -> Seen:
    """All of these in one training, which is captured once."""
    what, number = AFTER.get(k, (nothing, k))
    return rates_are_written(step, k) + what(step, number)


BETWEEN: dict[str, Callable[[Any, int], Seen]] = {
    function.__name__: function
    for function in (nothing, rates_are_written, evaluated, states_are_read, finished_twice, one_after_another)
}


def trained(options: dict[str, Any], sizes: dict[str, int], between: str) -> tuple[Seen, dict[str, torch.Tensor], bool]:
    """Losses and what is seen between steps; the state at the end; and whether something was under way."""
    torch.manual_seed(0)
    parallel = autopar.parallelize(Noisy().double(), Mesh(sizes), "ddp")
    step = parallel.train_step(steps.adamw(parallel), **options)
    batches = [steps.vectors(k) for k in range(STEPS)]
    torch.manual_seed(1)  # of the draws
    seen: Seen = []
    crosses = False
    for k, batch in enumerate(batches):
        seen.append(steps.run(step, batch).clone())
        crosses = bool(step._calls.unfinished)
        random = torch.get_rng_state()
        seen += BETWEEN[between](step, k)
        torch.set_rng_state(random)
    return seen, state_of(step), crosses


def alike(options: dict[str, Any], sizes: dict[str, int], names: list[str]) -> None:
    """The trainings draw the same numbers, and have the same losses and states."""
    bitwise = sizes == {"dp": 2}
    for between in names:
        ours, state, crosses = trained({**options, "across": True}, sizes, between)
        theirs, complete, _ = trained(options, sizes, between)
        assert crosses and len(ours) == len(theirs) >= STEPS
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=0 if bitwise else 1e-12, atol=0 if bitwise else 1e-12)
        assert_alike(state, complete, bitwise)


def deleted_under_way() -> None:
    """What a deleted step has left is completed by what reads the model next."""
    seen = []
    for across in (True, False):
        torch.manual_seed(0)
        parallel = autopar.parallelize(Noisy().double(), Mesh(dp=2), "ddp")
        step = parallel.train_step(steps.adamw(parallel), across=across)
        batch = steps.vectors(0)
        torch.manual_seed(1)
        steps.run(step, batch)
        del step
        seen.append({name: loops.whole(value).clone() for name, value in parallel.state_dict().items()})
    assert_alike(*seen, True)
