"""What the model returns beside its loss comes back from a step on stages, on the ranks of all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from outputs import outputs_alike
from pipelined_outputs import MODELS, told_alike
from pipelined_steps import MESHES, vectors

import autopar
from autopar import Mesh


@pytest.mark.parametrize(("sizes", "microbatches", "options"), [
    ({"pp": 2}, 1, {"schedule": "1f1b"}), ({"pp": 2, "tp": 2}, 3, {"schedule": "zb-h1"}),
    ({"pp": 2, "dp": 2}, 2, {"schedule": "1f1b", "zero": 3, "clip_norm": 1e9}),
], ids=str)  # fmt: skip
def test_outputs_of_each_kind(sizes: dict[str, int], microbatches: int, options: dict[str, Any]) -> None:
    outputs_alike(sizes, microbatches, options)


@pytest.mark.parametrize(("name", "mesh", "policy", "microbatches", "layers", "options"), [
    ("told", "pp4", "1f1b", 3, 4, {}), ("shared", "pp2 tp2", "zb-v", 3, 4, {}),
    ("told", "pp2 dp2", "interleaved-1f1b", 2, 4, {"recompute": "blocks", "ema": 0.9}),
    ("told", "pp2 tp2", "dualpipe-v", 2, 4, {"outputs": "global"}),
], ids=str)  # fmt: skip
def test_outputs_of_all_stages(
    name: str, mesh: str, policy: str, microbatches: int, layers: int, options: dict[str, Any]
) -> None:
    step = told_alike(name, mesh, policy, microbatches, layers, **options)
    makers = {stage.number for stage in step._current().micro.stages if stage.cut.outputs}
    assert len(makers) == MESHES[mesh]["pp"] * (1 if policy == "1f1b" else 2), "else this would test little"


def in_two_stages(returns: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    parallel = autopar.parallelize(MODELS["told"](4).double(), Mesh(pp=2), {})
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    return parallel.train_step(optimizer, microbatches=3, schedule="1f1b", returns=returns, **options)


def test_memory_has_them() -> None:
    found = {}
    for returns, own in (("loss", []), ("outputs", ["turned"])):
        step = in_two_stages(returns, stages=["layers.[01]*", ["layers.[23]*", "head", *own]])
        step.capture(**vectors(12)(0))
        found[returns] = step.memory(0)
    assert found["loss"].kinds["outputs"] == 0
    # of 3 micro-batches with 4 rows: the results of two layers, the labels and their number
    made = 3 * (2 * 4 * 8 * 8 + 4 * 8 + 8)
    assert found["outputs"].kinds["outputs"] == made <= found["outputs"].peak - found["loss"].peak


def test_a_dict_says_how() -> None:
    step = in_two_stages({"scores": "stack", "labels": "stack"})
    found = step.simulate(**vectors(12)(0))
    assert found["scores"].shape == (3, 4, 11) and found["labels"].shape == (3, 4) and found["layer 0"].shape == (12, 8)
    assert torch.equal(found["labels"].flatten(), vectors(12)(0)["y"])


def test_views_of_messages_are_kept() -> None:
    """The memory of a message is written again, by the next one; simulated, when its micro-batch ends."""
    step = in_two_stages("outputs", stages=["layers.[01]*", ["layers.[23]*", "head", "turned"]])
    batch = vectors(12)(0)
    alone, found = step.parallel.module(**batch), step.simulate(**batch)
    torch.testing.assert_close(found["turned"], alone["turned"], rtol=1e-10, atol=1e-10)


def test_an_unknown_name() -> None:
    parallel = autopar.parallelize(torch.nn.Linear(2, 2), Mesh(pp=2), {})
    with pytest.raises(ValueError, match=r"^returns='logits': a step returns its \"loss\", or the \"outputs\" of the"):
        parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1), schedule="1f1b", returns="logits")  # type: ignore[arg-type]


def test_calls_give_whole_outputs() -> None:
    """Also of the model on stages, with ``outputs="global"``."""
    step = told_alike("told", "pp2 dp2", "1f1b", 2, 4, outputs="global")
    batch = vectors(8)(0)
    with torch.no_grad():
        found = step.parallel.simulate(**batch)
        alone = step.parallel.module(**batch)
    for name in ("scores", "turned", "labels"):
        torch.testing.assert_close(found[name], alone[name], rtol=1e-10, atol=1e-10)
