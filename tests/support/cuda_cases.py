"""List what the campaign of CUDA tries: features of one rank, and trainings on two and four ranks.

Each case runs in processes of its own (``cuda_case_run.py``), and returns how far its numbers are from eager's, or
``None`` if it compares none.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cuda_trainings import ON, Training, apart, decoder, low_precision, optimizer_of, parameters_apart, put, rows
from torch import nn
from torch.nn import functional

from autopar import checkpoint

ONE = {"dp": 1}
BF16 = 5e-2  # eager and ours round at other places; the most shows in biases, which are small after four steps


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        feature: what it tries.
        ranks: how many processes.
        compared: what is compared with eager; "" if it only has to run.
        precision: the dtype of the numbers that are compared.
        tolerance: how far they may be apart.
        run: returns how far they are.
    """

    feature: str
    ranks: int
    compared: str
    precision: str
    tolerance: float
    run: Callable[[], float | None]


def of(feature: str, training: Training) -> Case:
    ranks = 1
    for size in training.mesh.values():
        ranks *= size
    return Case(feature, ranks, "losses, parameters", training.precision, training.tolerance, training.run)


def _stepped(steps: int = 3, model: nn.Module | None = None, **options: Any) -> tuple[Any, Any, dict[str, Any]]:
    """A step on one rank that has run."""
    parallel, batch = put(model or decoder(), ONE), rows()
    step = parallel.train_step(optimizer_of(parallel, {}), **options)
    for _ in range(steps):
        step(**batch)
    return step, parallel, batch


def attention_dropout() -> float:
    """Two trainings from one seed have the same losses, others from another one; blocks computed again draw the same
    masks. Without dropout the loss is eager's."""

    def losses(seed: int, **options: Any) -> list[float]:
        torch.manual_seed(seed)
        parallel, batch = put(decoder(layers=1, dropout=0.3), ONE), rows()
        torch.manual_seed(seed)
        step = parallel.train_step(optimizer_of(parallel, {}), **options)
        return [float(step(**batch)) for _ in range(3)]

    one = losses(1)
    if ON.values:
        assert one != losses(2), "another seed draws the same masks"
        assert one[2] < one[0], "it does not learn"
    model = decoder(layers=1, dropout=0.3).eval()
    quiet = apart(float(put(model, ONE)(**rows()).detach()), float(model(**rows()).detach()))
    return max(apart(losses(1), one), apart(losses(1, recompute="blocks"), one), quiet)


def gpt2() -> float:
    """GPT-2 with its default dropout of 0.1, attention's too; without it, the loss is eager's."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4, use_cache=False)
    model = GPT2LMHeadModel(config).to(ON.name)
    ids = rows()["ids"]
    parallel = put(model.eval(), ONE)
    quiet = apart(float(parallel(ids, labels=ids).loss.detach()), float(model(ids, labels=ids).loss.detach()))
    parallel.train()
    step = parallel.train_step(optimizer_of(parallel, {}))
    losses = [float(step(input_ids=ids, labels=ids)) for _ in range(4)]
    assert not ON.values or losses[3] < losses[0], f"it does not learn: {losses}"
    return quiet


def llama() -> float:
    """A Llama of transformers under amp, with a mask of ones as collators pass it."""
    from transformers import LlamaForCausalLM

    model, ids = _llama(), rows()["ids"]
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    single = LlamaForCausalLM(model.config).to(ON.name)
    single.load_state_dict(model.state_dict())
    optimizer, wanted = optimizer_of(single, {}), []
    for _ in range(3):
        optimizer.zero_grad()
        with low_precision():
            loss = single(**batch).loss
        loss.backward()
        optimizer.step()
        wanted.append(float(loss.detach()))
    parallel = put(model, ONE)
    step = parallel.train_step(optimizer_of(parallel, {}), amp="bf16-O1")
    return max(apart([float(step(**batch)) for _ in range(3)], wanted), parameters_apart(parallel, single))


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(ON.name)


def dropout() -> float:
    """``random="single"`` draws the numbers of the device."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.5), nn.Linear(256, 64)).to(ON.name)
    x = torch.randn(32, 64).to(ON.name)
    parallel = put(model, ONE, random="single")
    torch.manual_seed(3)
    found = parallel(x).detach()
    torch.manual_seed(3)
    return apart(found, model(x))


def convolutions() -> float:
    """Convolutions and batch norm, forward and backward."""
    torch.manual_seed(0)
    # no bias before a norm: its gradient is zero but for rounding
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, groups=4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip
    return _called(model.to(ON.name), torch.randn(8, 3, 32, 32).to(ON.name))


def recurrent() -> float:
    """GRU and LSTM."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.lstm = nn.GRU(16, 32, batch_first=True), nn.LSTM(32, 16, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(self.gru(x)[0])[0]

    torch.manual_seed(0)
    return _called(Model().to(ON.name), torch.randn(4, 6, 16).to(ON.name))


def _called(model: nn.Module, x: torch.Tensor) -> float:
    """Outputs, gradients and buffers of two calls beside eager's."""
    import copy

    single = copy.deepcopy(model)
    parallel = put(model, ONE)
    worst = 0.0
    for _ in range(2):
        ours, wanted = parallel(x), single(x)
        ours.square().mean().backward()
        wanted.square().mean().backward()
        worst = max(worst, apart(ours, wanted))
    gradients = {name: p.grad for name, p in single.named_parameters()}
    buffers = dict(single.named_buffers())
    worst = max([worst, *(apart(p.grad, gradients[name]) for name, p in parallel.named_parameters())])
    return max([worst, *(apart(b, buffers[name]) for name, b in parallel.named_buffers())])


def sizes() -> float:
    """Calls of three lengths."""
    model = decoder()
    parallel = put(model, ONE)
    worst = 0.0
    for length in (64, 48, 40):
        batch = rows(length=length)
        loss = parallel(**batch)
        loss.backward()
        worst = max(worst, apart(float(loss.detach()), float(model(**batch).detach())))
    return worst


def saved() -> float:
    """A checkpoint is saved, and another training goes on from it."""
    step, _, batch = _stepped(zero=1, clip_norm=1.0)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(folder, step.state_dict())
        following = [float(step(**batch)) for _ in range(2)]
        torch.manual_seed(5)
        other, _, _ = _stepped(1, zero=1, clip_norm=1.0)
        other.load_state_dict(checkpoint.load(folder, other.state_dict()))
    return apart([float(other(**batch)) for _ in range(2)], following)


def generated(mesh: dict[str, int], plan: str) -> Callable[[], float]:
    def run() -> float:
        """Greedy tokens of a Llama are those of transformers."""
        model, ids = _llama(), rows(2, 16)["ids"]
        wanted = model.generate(ids, max_new_tokens=8, do_sample=False)  # type: ignore[operator]
        found = put(model, mesh, plan).generate(ids, max_new_tokens=8, do_sample=False)
        return apart(found, wanted)

    return run


def searched() -> float:
    """An example and no plan: the layouts are searched with the figures of the card."""
    model, batch = decoder(), rows()
    parallel = put(model, ONE, None, example=((), batch))
    return apart(float(parallel(**batch).detach()), float(model(**batch).detach()))


def reports() -> None:
    """Timeline, profile, measure, rank_report, memory, log and page have figures of the card."""
    import autopar

    step, _, batch = _stepped(zero=1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        timeline = step.timeline(**batch)
        timeline.save(folder / "timeline.json")
        print(timeline)
        profile = step.profile(batch, steps=2, path=folder / "trace.json")
        print(profile)
        assert json.loads((folder / "trace.json").read_text())
        print(step.measure())
        print(step.rank_report(**batch))
        print(step.communication, step.memory(0), step.figures())
        autopar.log(folder / "log", step, loss=1.0)
        step.page(folder / "page.html")


def ranks_reported() -> None:
    """The same on two ranks: how long each computes, and its timeline, profile and report."""
    parallel, batch = put(decoder(), {"dp": 2}), rows()
    step = parallel.train_step(optimizer_of(parallel, {}))
    for _ in range(12):  # every eighth is measured
        step(**batch)
    assert step.ranks.paces, str(step.ranks)
    print(step.ranks, step.timeline(**batch), step.rank_report(**batch))
    with tempfile.TemporaryDirectory() as folder:
        print(step.profile(batch, steps=2, path=f"{folder}/trace.json"))


def verified() -> None:
    """``autopar verify --rank``: one rank of eight, without the others."""
    from typer.testing import CliRunner

    from autopar.cli.app import app

    words = ["verify", "llama-3-8b", "--mesh", "dp=4,tp=2", "--plan", "megatron", "--sequence", "64", "--rank", "3"]
    sized = "hidden_size=64,intermediate_size=128,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2"
    result = CliRunner().invoke(app, [*words, "--set", f"{sized},vocab_size=256", "--zero", "1"])
    print(result.output)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output[-500:]


def graphed() -> float:
    """A whole step is captured as a CUDA graph, and replayed."""
    step, _, batch = _stepped()
    single, _ = Training(ONE, steps=9).alone(decoder(), batch)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(**batch)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(**batch)
    losses = []
    for _ in range(2):
        graph.replay()
        losses.append(float(loss))
    # what is captured is not run: the replays are the seventh and the eighth step
    return apart(losses, single[6:8])


def inference() -> float:
    """Logits of bf16 parameters in eval mode, under ``no_grad``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 256))
    model = model.to(ON.name, torch.bfloat16).eval()
    with torch.no_grad():
        return apart(
            functional.softmax(put(model, ONE)(rows()["ids"]), -1), functional.softmax(model(rows()["ids"]), -1)
        )


def checked(
    feature: str, compared: str, run: Callable[[], float | None], ranks: int = 1, precision: str = "f32",
    tolerance: float = 2e-5,
) -> Case:  # fmt: skip
    return Case(feature, ranks, compared, precision, tolerance, run)


S, L = {"schedule": "1f1b", "microbatches": 4}, {"layers": 4}
CLIP, AMP = {"clip_norm": 0.5}, {"amp": "bf16-O1"}
ALL = AMP | CLIP | {"microbatches": 2, "recompute": "blocks", "zero": 1}
CASES: dict[str, Case] = {
    # -- one rank
    "loop": of("plain loop", Training(ONE, "ddp", None)),
    "loop-amp": of("plain loop under autocast, clipped", Training(ONE, "ddp", None, autocast=True, tolerance=BF16)),
    "step": of("a whole step", Training(ONE, "ddp")),
    "step-all": of("step: amp, clip, micro-batches, recompute, zero", Training(ONE, "ddp", ALL, tolerance=BF16)),
    "step-fused": of("step: fused AdamW, clip", Training(ONE, "ddp", CLIP, optimizer={"fused": True})),
    "step-bf16": of(
        "step: parameters in bf16", Training(ONE, "ddp", model={"dtype": torch.bfloat16}, tolerance=BF16)
    ),
    "step-zero3": of("step: zero=3, min-cut", Training(ONE, "fsdp", {"zero": 3, "recompute": "min-cut"})),
    "compile": of("compile=True", Training(ONE, "ddp", options={"compile": True}, tolerance=1e-4)),
    "compile-amp": of(
        "compile=True, amp", Training(ONE, "ddp", AMP, {"compile": True}, tolerance=BF16)
    ),
    "offload": of("offload=True", Training(ONE, "ddp", {"offload": True})),
    "attention-dropout": checked("dropout in attention, recomputed too", "loss without dropout", attention_dropout),
    "dropout": checked("dropout, random='single'", "output", dropout),
    "gpt2": checked("GPT-2 with its default dropout", "loss without dropout", gpt2),
    "llama": checked(
        "a Llama with a mask of ones, amp", "losses, parameters", llama, precision="amp bf16", tolerance=BF16
    ),
    "convolutions": checked("convolutions, batch norm", "outputs, gradients, buffers", convolutions, tolerance=1e-4),
    "recurrent": checked("GRU and LSTM", "outputs, gradients", recurrent, tolerance=1e-4),
    "sizes": checked("calls of three lengths", "losses", sizes),
    "checkpoint": checked("a checkpoint, saved and gone on from", "losses with autopar's own", saved),
    "generate": checked("tokens of a Llama", "tokens", generated(ONE, "ddp"), tolerance=0.0),
    "search": checked("a searched plan, from an example", "loss", searched),
    "inference": checked("probabilities in bf16", "output", inference, precision="bf16", tolerance=BF16),
    "graph": checked("a step in a CUDA graph", "losses of two replays", graphed),
    "reports": checked("timeline, profile, measure, rank_report, page", "", reports),
    "verify-rank": checked("autopar verify --rank", "", verified),
    # -- several ranks
    "dp": of("dp", Training({"dp": 2}, "ddp")),
    "dp-loop": of("dp, plain loop", Training({"dp": 2}, "ddp", None)),
    "dp-uneven": of("dp, seven rows", Training({"dp": 2}, "ddp", rows=7)),
    "dp-all": of("dp: amp, clip, micro-batches, recompute, zero", Training({"dp": 2}, "ddp", ALL, tolerance=BF16)),
    "dp-across": of("dp: across, zero=1", Training({"dp": 2}, "ddp", {"across": True, "zero": 1})),
    "dp-compile": of("dp: compile=True", Training({"dp": 2}, "ddp", options={"compile": True}, tolerance=1e-4)),
    "dp-reports": checked("dp: step.ranks, timeline, rank_report, profile", "", ranks_reported, 2),
    "fsdp": of("zero=3, blocks", Training({"dp": 2}, "fsdp", {"zero": 3, "recompute": "blocks"})),
    "fsdp-streams": of(
        "zero=3, two-streams", Training({"dp": 2}, "fsdp", {"zero": 3}, {"overlap": "two-streams"})
    ),
    "tp": of("tp, split sequence, clip", Training({"tp": 2}, "megatron+sp", CLIP)),
    "tp-generate": checked("tp: tokens of a Llama", "tokens", generated({"tp": 2}, "megatron"), 2, tolerance=0.0),
    "cp": of("cp", Training({"cp": 2})),
    "1f1b": of("pp: 1f1b", Training({"pp": 2}, None, S)),
    "1f1b-amp": of("pp: 1f1b, amp, clip", Training({"pp": 2}, None, S | AMP | CLIP, tolerance=BF16)),
    "zb-h1": of("pp: zb-h1", Training({"pp": 2}, None, S | {"schedule": "zb-h1"})),
    "interleaved": of(
        "pp: interleaved-1f1b", Training({"pp": 2}, None, S | {"schedule": "interleaved-1f1b", "chunks": 2}, model=L)
    ),
    "dp-tp": of("dp × tp, split sequence, zero=1", Training({"dp": 2, "tp": 2}, "megatron+sp", CLIP | {"zero": 1})),
    "hsdp": of("hsdp, zero=3", Training({"rep": 2, "dp": 2}, "hsdp", {"zero": 3})),
    "pp-dp": of("pp × dp: 1f1b, zero=1", Training({"pp": 2, "dp": 2}, None, S | {"zero": 1})),
    "search-4": of("dp × tp, searched", Training({"dp": 2, "tp": 2}, "search")),
}  # fmt: skip
