"""What the model returns beside its loss comes back from a step on request: that of the whole batch."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from equality import relative
from loops import text
from outputs import Many, batch, outputs_alike
from processes import ranks
from steps import MODELS, run
from torch import nn

import autopar
from autopar import Mesh
from autopar.step.compiling.loss import StepLoss


@pytest.mark.parametrize(("sizes", "microbatches", "options"), [
    ({"dp": 2}, 1, {}), ({"dp": 2, "tp": 2}, 3, {"zero": 1}), ({"dp": 3}, 2, {"zero": 3, "clip_norm": 0.5}),
    ({"tp": 2}, 2, {}),
], ids=str)  # fmt: skip
def test_outputs_of_the_batch(sizes: dict[str, int], microbatches: int, options: dict[str, Any]) -> None:
    if "clip_norm" in options:
        options = {**options, "clip_norm": 1e9}
    outputs_alike(sizes, microbatches, options)


@pytest.mark.processes
@pytest.mark.parametrize("given", [
    ({"dp": 2, "tp": 2}, 3, {"zero": 2}, "local"), ({"dp": 2}, 3, {}, "global", "global"),
    *(
        pytest.param(given, marks=pytest.mark.sweep("each of its options occurs in another case"))
        for given in [
            ({"dp": 2, "tp": 2}, 1, {}), ({"dp": 2, "tp": 2}, 3, {"zero": 2}), ({"dp": 2, "tp": 2}, 3, {}, "local"),
            ({"dp": 4}, 3, {}, "global", "global"),
        ]
    ),
], ids=str)  # fmt: skip
def test_on_processes(given: tuple[Any, ...]) -> None:
    ranks(math.prod(given[0].values())).run(outputs_alike, *given)


def test_one_process() -> None:
    for microbatches in (1, 2):
        outputs_alike({"dp": 1}, microbatches, {})


@pytest.mark.long
def test_a_model_of_hugging_face() -> None:
    """Its own class, with logits of all rows."""
    make, _, plan = MODELS["gpt2"]
    torch.manual_seed(0)
    model = make()
    alone = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(dp=2, tp=2), plan)
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1), microbatches=2, returns="outputs")
    given = {**text(0), "use_cache": False}
    ours, theirs = run(step, given), run_alone(alone, given)
    assert type(ours) is type(theirs) and type(ours.loss) is StepLoss
    assert relative(ours.loss, theirs.loss) <= 1e-9 and relative(ours.logits, theirs.logits.detach()) <= 1e-9


def run_alone(model: nn.Module, given: dict[str, Any]) -> Any:
    from casts import PromotedCasts

    with PromotedCasts():
        return model(**given)


def made(returns: Any, microbatches: int = 3) -> Any:
    torch.manual_seed(0)
    parallel = autopar.parallelize(Many(), Mesh(dp=2), "ddp")
    return parallel.train_step(
        torch.optim.SGD(parallel.parameters(), lr=0.1), microbatches=microbatches, returns=returns
    )


def test_a_dict_says_how() -> None:
    x, y = batch(0)
    parts = [Many.forward(made("loss").parallel.module, *part) for part in zip(x.chunk(3), y.chunk(3), strict=True)]
    step = made({"norm": "mean", "largest": "cat", "penalty": "stack"})
    ours = step.simulate(x, y)
    torch.testing.assert_close(ours["norm"], torch.stack([part["norm"] for part in parts]).mean().detach())
    torch.testing.assert_close(ours["largest"], torch.cat([part["largest"] for part in parts]).detach())
    torch.testing.assert_close(ours["penalty"], torch.stack([part["penalty"] for part in parts]).detach())
    assert not [note for report in step.reports for note in report.notes if "stacked" in note]


def test_an_unknown_name() -> None:
    with pytest.raises(ValueError) as caught:
        made({"logit": "cat"}).simulate(*batch(0))
    names = "error, penalty, logits, columns, flat, hits, total, bias, transposed, x, norm, largest"
    assert (
        str(caught.value)
        == f"returns= names 'logit', and the model has no such output; beside its loss it returns {names}: name one "
        f"of these"
    )


@pytest.mark.long
def test_without_outputs_programs_are_the_same() -> None:
    programs = [made(returns).capture(*batch(0)) for returns in ("loss", "outputs")]
    plain = str(programs[0])
    assert "return" not in str(programs[0].micro) and "  return (" in str(programs[1].micro)
    assert plain == str(made("loss").capture(*batch(0)))
    assert programs[1] == type(programs[1]).parse(str(programs[1]))


def test_rows_of_one_are_stacked_unless_it_is_said() -> None:
    x, y = (one[3:6] for one in batch(0))
    assert made("outputs").simulate(x, y)["logits"].shape == (3, 1, 5)
    assert made({"logits": "cat"}).simulate(x, y)["logits"].shape == (3, 5)
