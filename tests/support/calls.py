"""What users do with a model on processes, run on each rank beside the model on a single device."""

from __future__ import annotations

import copy
import functools
import gc
import tempfile
from pathlib import Path
from typing import Any

import torch
from casts import PromotedCasts
from equality import loss_of, relative
from loops import VOCABULARY, text, whole
from models import COLUMN_ROW, Block, Language, Residual
from processes import device_mesh
from torch import distributed, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint
from transformers_models import gpt2, llama

import autopar
from autopar import Mesh
from autopar.model.dtensor_parameters import is_dtensor

MESH = Mesh(dp=2, tp=2)
TOLERANCE = 1e-10


def refused(kind: type[Exception], call: Any) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("it was not refused")


def language() -> tuple[nn.Module, nn.Module, torch.Tensor, torch.Tensor]:
    """Two of the same, ids, and labels that are unequally many in the halves of the batch."""
    torch.manual_seed(0)
    model = Language(11, layers=1).double()
    ids = torch.randint(11, (4, 6))
    labels = ids.clone()
    labels[0] = -100
    labels[1, 1:] = -100
    return model, copy.deepcopy(model), ids, labels


class Dropped(nn.Module):
    """Random ops of both phases, on split and on whole values."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.dropout(torch.relu(self.up(x)), 0.3)
        h = checkpoint(lambda h: nn.functional.dropout(self.down(h), 0.3), h, use_reentrant=False)
        return h + torch.rand(8, dtype=h.dtype)


def randomness() -> None:
    """Ranks that are seeded differently draw as the first does; each call anew."""
    rank = distributed.get_rank()
    plan = {"up.weight": ("tp", None), "up.bias": ("tp",), "down.weight": (None, "tp")}
    model, x = Dropped().double(), torch.randn(6, 8, dtype=torch.float64)
    eager = copy.deepcopy(model)
    single = autopar.parallelize(model, MESH, plan, random="single", outputs="global")
    for seed in (3, 4):
        torch.manual_seed(seed)
        wanted = eager(x)
        torch.manual_seed(seed + 100 * rank)
        found = single(x)
        assert relative(found, wanted) <= TOLERANCE
        wanted.square().sum().backward()
        found.square().sum().backward()
        same_gradients(single, eager)
    parallel = autopar.parallelize(model, MESH, plan, outputs="global")
    made = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed + 100 * rank)
        made.append(parallel(x))
    alike = torch.stack([y.detach() for y in made])
    every = [torch.empty_like(alike) for _ in range(4)]
    distributed.all_gather(every, alike)
    assert all(torch.equal(one, every[0]) for one in every)
    assert torch.equal(made[0], made[1]) and not torch.equal(made[1], made[2])


def same_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if b.grad is not None:
            assert a.grad.placements == a.placements and relative(whole(a.grad), b.grad) <= TOLERANCE, name
            a.grad = b.grad = None


def inputs_and_outputs() -> None:
    """The same batch, pieces, DTensors; sharded and gathered outputs: the loss is the mean over all tokens."""
    model, eager, ids, labels = language()
    wanted = eager(ids, labels)
    (wanted["loss"] + wanted["logits"].square().sum()).backward()
    gradients = [p.grad for p in eager.parameters()]
    mesh = device_mesh(MESH)
    half = slice(None, 2) if MESH.coordinates(distributed.get_rank())["dp"] == 0 else slice(2, None)
    split = [distribute_tensor(x, mesh, (Shard(0), Replicate())) for x in (ids, labels)]
    other = [distribute_tensor(x, mesh, (Replicate(), Shard(0))) for x in (ids, labels)]
    given: list[tuple[str, Any]] = [("global", (ids, labels)), ("local", (ids[half], labels[half])), ("global", split),
                                    ("local", split), ("global", other), ("global", (split[0], labels))]  # fmt: skip
    for inputs, (x, y) in given:
        for outputs in ("sharded", "global") if x is ids else ("sharded",):
            parallel = autopar.parallelize(model, mesh, COLUMN_ROW, inputs=inputs, outputs=outputs)
            found = parallel(x, labels=y)
            assert type(found["loss"]) is torch.Tensor and relative(found["loss"], wanted["loss"]) <= TOLERANCE
            assert type(found["logits"]) is (DTensor if outputs == "sharded" else torch.Tensor)
            assert (
                found["logits"].shape == (4, 6, 11) and relative(whole(found["logits"]), wanted["logits"]) <= TOLERANCE
            )
            (found["loss"] + whole(found["logits"].square().sum())).backward()
            for p, gradient in zip(eager.parameters(), gradients, strict=True):
                p.grad = gradient
            same_gradients(parallel, eager)


def inputs_with_gradients() -> None:
    torch.manual_seed(0)
    model = Residual(8, 12).double()
    eager, mesh = copy.deepcopy(model), device_mesh(MESH)
    x = torch.randn(5, 8, dtype=torch.float64)
    theirs = x.clone().requires_grad_()
    loss_of(eager(theirs)).backward()
    parallel = autopar.parallelize(model, MESH, COLUMN_ROW)
    ours = x.clone().requires_grad_()
    loss_of(whole(parallel(ours))).backward()
    assert type(ours.grad) is torch.Tensor and relative(ours.grad, theirs.grad) <= TOLERANCE
    laid = distribute_tensor(x, mesh, (Replicate(), Shard(1))).requires_grad_()
    loss_of(whole(parallel(laid))).backward()
    assert laid.grad.placements == laid.placements and relative(whole(laid.grad), theirs.grad) <= TOLERANCE


def gradients_of_some_outputs() -> None:
    """Whatever is differentiated, also other than the last time; twice with retain_graph; summed over two forwards."""
    model, eager, ids, labels = language()
    parallel = autopar.parallelize(model, MESH, COLUMN_ROW)
    for what in ("loss", "logits", "both", "loss", "both", "loss", "loss"):
        for run in (parallel, eager):
            outputs = run(ids, labels)
            parts = {"loss": outputs["loss"], "logits": loss_of(whole(outputs["logits"]))}
            (sum(parts.values()) if what == "both" else parts[what]).backward()
        same_gradients(parallel, eager)
    for run in (parallel, eager):
        first, second = run(ids, labels)["loss"], run(labels.clamp_min(0), ids)["loss"]
        (first * 2).backward(retain_graph=True)
        first.backward()
        second.backward()
        assert "retain_graph" in refused(RuntimeError, first.backward)
    same_gradients(parallel, eager)
    loss = parallel(ids, labels)["loss"]
    with torch.no_grad():
        next(parallel.parameters()).add_(1.0)
    assert "modified by an inplace operation" in refused(RuntimeError, loss.backward)
    loss = parallel(ids, labels)["loss"]
    assert "differentiated once" in refused(RuntimeError, lambda: loss.backward(create_graph=True))


def frozen_and_tied() -> None:
    torch.manual_seed(0)
    model = llama(tie_word_embeddings=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "mlp" not in name
    eager = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(tp=2), "megatron")
    assert [n for n, _ in parallel.named_parameters()] == [n for n, _ in eager.named_parameters()]
    assert parallel.get_parameter("lm_head.weight") is parallel.get_parameter("model.embed_tokens.weight")
    for step in range(2):
        for run in (parallel, eager):
            run(**text(step)).loss.backward()
        for (name, a), b in zip(parallel.named_parameters(), eager.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None) == ("mlp" in name), name
            assert a.grad is None or relative(whole(a.grad), b.grad) <= 1e-6
    parallel.requires_grad_(True)
    parallel(**text(0)).loss.backward()
    assert all(p.grad is not None for p in parallel.parameters()) and parallel.captures == 2


def state_dicts(name: str) -> None:
    """Of a model on one device, into one on processes, out again, and into one on another mesh."""
    torch.manual_seed(0)
    make = {"gpt2": gpt2, "llama": llama}[name]
    source, model = make(), make()
    parallel = autopar.parallelize(model, MESH, "megatron")
    parallel.load_state_dict(source.state_dict())
    state = parallel.state_dict()
    assert list(state) == list(source.state_dict())
    for key, value in source.state_dict().items():
        assert torch.equal(whole(state[key]), value), key
    other = autopar.parallelize(make(), Mesh(tp=4), "megatron")
    other.load_state_dict(state)
    for key, value in other.state_dict().items():
        assert torch.equal(whole(value), source.state_dict()[key]), key
    missing = dict(state)
    missing.pop("lm_head.weight")
    assert "lm_head.weight" in refused(RuntimeError, lambda: other.load_state_dict(missing))
    assert "size mismatch" in refused(
        RuntimeError, lambda: other.load_state_dict({**state, "lm_head.weight": torch.zeros(3, 3)})
    )
    import torch.distributed.checkpoint as checkpoint

    folder = [tempfile.mkdtemp()]
    distributed.broadcast_object_list(folder)
    checkpoint.save(state, checkpoint_id=folder[0])
    third = autopar.parallelize(make(), Mesh(tp=2, dp=2), "megatron")
    loaded = third.state_dict()
    checkpoint.load(loaded, checkpoint_id=folder[0])
    third.load_state_dict(loaded)
    assert relative(third(**text(0)).loss, source(**text(0)).loss) <= 1e-6


def first_ranks_values() -> None:
    """Ranks with other seeds train the first one's model; what the user gave is not changed."""
    torch.manual_seed(distributed.get_rank())
    model = Block().double()
    before = copy.deepcopy(model.state_dict())
    parallel = autopar.parallelize(model, MESH, COLUMN_ROW)
    torch.manual_seed(0)
    first = Block().double()
    for a, b in zip(parallel.parameters(), first.parameters(), strict=True):
        assert torch.equal(whole(a), b)
    with torch.no_grad():
        for parameter in parallel.parameters():
            parameter.zero_()
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), before.values(), strict=True))


def captured_again() -> None:
    model, eager, ids, labels = language()
    parallel = autopar.parallelize(model, Mesh(dp=2), example=(ids, labels))
    for rows in (4, 3, 1, 4, 3):
        assert relative(parallel(ids[:rows], ids[:rows])["loss"], eager(ids[:rows], ids[:rows])["loss"]) <= TOLERANCE
    assert parallel.captures == 3
    parallel(ids[:2], ids[:2])
    assert "capture 4 of this model: ids is int64[2, 6] on cpu, it was int64[1, 6] on cpu" in str(parallel.reports)
    fixed = autopar.parallelize(model, Mesh(dp=2), example=(ids, labels), recapture=False)
    fixed(ids, labels)
    fixed.eval()
    with torch.no_grad():
        fixed(ids, labels)
    fixed.train()
    said = refused(RuntimeError, lambda: fixed(ids[:3], labels[:3]))
    assert "recapture=False: ids is int64[3, 6] on cpu, it was int64[4, 6] on cpu, labels is" in said, said
    fixed(ids, labels)


def bad_calls() -> None:
    model, _, ids, labels = language()
    rank = distributed.get_rank()
    assert (
        "the mesh (dp=2) has 2 ranks, and there are 4 processes; start one for each, as with torchrun "
        "--nproc-per-node 2" in refused(ValueError, lambda: autopar.parallelize(model, Mesh(dp=2)))
    )
    assert "inputs='mine' is none of 'global', 'local'" in refused(
        ValueError, lambda: autopar.parallelize(model, MESH, inputs="mine")
    )
    assert "outputs='mine' is none of" in refused(ValueError, lambda: autopar.parallelize(model, MESH, outputs="mine"))
    parallel = autopar.parallelize(model, MESH, COLUMN_ROW)
    for _ in range(2):  # captured or not
        said = refused(RuntimeError, functools.partial(parallel, ids[: 4 - (rank == 2)], labels[: 4 - (rank == 2)]))
        assert (
            "the ranks make different calls" in said and "rank 2: call (ids int64[3, 6], labels int64[3, 6])" in said
        ), said
        assert "ranks 0 1 3: call (ids int64[4, 6], labels int64[4, 6])" in said
        parallel = autopar.parallelize(model, MESH, COLUMN_ROW)
        parallel(ids, labels), parallel(ids[:3], labels[:3])
    assert "to simulate, call parallelize in a process that is alone" in refused(
        RuntimeError, lambda: parallel.simulate(ids, labels)
    )
    parallel.body.register_parameter("extra", nn.Parameter(torch.zeros(3)))
    assert "the parameter body.extra was added after parallelize; change the model first" in refused(
        ValueError, lambda: parallel(ids, labels)
    )
    on_meta = autopar.parallelize(copy.deepcopy(model).to("meta"), MESH, COLUMN_ROW)
    assert "is on the meta device and has no values" in refused(ValueError, lambda: on_meta(ids, labels))
    pending = DTensor.from_local(
        torch.ones(4, 8, dtype=torch.float64), device_mesh(MESH), (Replicate(), autopar_partial())
    )
    block = autopar.parallelize(Block().double(), MESH, COLUMN_ROW)
    assert "redistribute it, so that it is not Partial" in refused(ValueError, lambda: block(pending))


def autopar_partial() -> Any:
    from torch.distributed.tensor import Partial

    return Partial()


def sizes_of_one() -> None:
    """Axes of one rank among others."""
    model, eager, ids, labels = language()
    parallel = autopar.parallelize(model, Mesh(dp=1, tp=4, cp=1), COLUMN_ROW)
    for run in (parallel, eager):
        run(ids, labels)["loss"].backward()
    same_gradients(parallel, eager)
    assert all(is_dtensor(p) for p in parallel.parameters())


def cache() -> None:
    """A cache that comes back is passed in again."""
    torch.manual_seed(0)
    model = llama(use_cache=True)
    eager = copy.deepcopy(model).eval()
    parallel = autopar.parallelize(model, Mesh(tp=2), "megatron").eval()
    ids = torch.randint(1, VOCABULARY, (4, 6))
    with torch.no_grad():
        ours, theirs = parallel(ids), eager(ids)
        again, wanted = (
            parallel(ids[:, :1], past_key_values=ours.past_key_values),
            eager(ids[:, :1], past_key_values=theirs.past_key_values),
        )
    assert relative(whole(again.logits), wanted.logits) <= 1e-6


def many_steps(count: int) -> tuple[int, int]:
    """How many more tensors, and bytes of this process, there are after ``count`` steps than after a tenth of them."""
    model = Block(256, 512)
    parallel = autopar.parallelize(model, MESH, COLUMN_ROW)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-3, momentum=0.9)
    x = torch.randn(64, 256)
    seen = []
    for step in range(count):
        loss = parallel(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (count // 10, count - 1):
            gc.collect()
            tensors = sum(isinstance(o, torch.Tensor) for o in gc.get_objects())
            seen.append((tensors, int(Path("/proc/self/statm").read_text().split()[1]) * 4096))
    (tensors, bytes_), (more, grown) = seen
    return more - tensors, grown - bytes_


def readme_loop(code: str) -> None:
    """The loop that the README shows, for a Llama: its losses are the single-device loop's."""
    torch.manual_seed(0)
    model = llama()
    eager = copy.deepcopy(model)
    scope: dict[str, Any] = {
        "autopar": autopar,
        "torch": torch,
        "MyModel": lambda: model,
        "batches": [text(0), text(1), text(2)],
    }
    exec(code, scope)
    optimizer = torch.optim.AdamW(eager.parameters(), lr=1e-3)
    for batch in scope["batches"]:
        loss = eager(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(eager.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert relative(scope["loss"], loss) <= 1e-6


class Turned(nn.Module):
    """The gradient of its weight comes out transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 8, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight.t().contiguous() * x.mean()


def fused_optimizer() -> None:
    """Reads parameters and gradients as they lie in memory; copies of a model are models."""
    torch.manual_seed(0)
    model = Turned()
    eager, x = copy.deepcopy(model), torch.randn(4, 6, dtype=torch.float64)
    parallel = autopar.parallelize(model, Mesh(tp=4), {"weight": (None, "tp")})
    average = torch.optim.swa_utils.AveragedModel(parallel)
    wanted = torch.optim.swa_utils.AveragedModel(eager)
    for run, mean in ((parallel, average), (eager, wanted)):
        optimizer = torch.optim.AdamW(run.parameters(), lr=0.1, fused=True)
        for _ in range(3):
            whole(run(x)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            mean.update_parameters(run)
    assert relative(whole(parallel.weight), eager.weight) <= TOLERANCE
    assert relative(whole(average(x)), wanted(x)) <= TOLERANCE
    assert "save its state_dict()" in refused(TypeError, lambda: torch.save(parallel, "/dev/null"))


class Two(nn.Module):
    """Two outputs, the backwards of which have all-reduces of the same shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block().double()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.block(x)
        return y.square().mean(), y.sin().mean()


def values_that_differ() -> None:
    """Ranks that bring other values of what is one: a batch, a piece, the gradient of a loss made outside."""
    rank = distributed.get_rank()
    torch.manual_seed(0)
    model, x = Block().double(), torch.randn(8, 8, dtype=torch.float64)
    other = x.flip(0) if rank == 2 else x
    parallel = autopar.parallelize(model, MESH, COLUMN_ROW, outputs="global")
    said = refused(RuntimeError, lambda: parallel(other))
    assert (
        "ranks 0 and 2 bring different values of x, which must be equal on these ranks\n  let all ranks have the same"
        in said
    )
    pieces = autopar.parallelize(model, MESH, COLUMN_ROW, inputs="local")
    # as a DistributedSampler over all ranks gives them
    said = refused(RuntimeError, lambda: pieces(x[rank : rank + 1]))
    assert (
        "ranks 0 and 1 bring different values of x, which must be equal on these ranks: both hold the piece at dp=0"
        in said
    )
    assert "a DistributedSampler takes num_replicas=2 and rank=mesh.coordinates(rank)['dp']" in said
    pieces(x[MESH.coordinates(rank)["dp"] :][:1])
    y = parallel(x)
    said = refused(RuntimeError, (y.sum() if rank != 2 else y.square().sum()).backward)
    assert "ranks 0 and 2 bring different values of the gradient of output 0" in said
    parallel.zero_grad()
    parallel(x).sum().backward()


def backwards_that_differ() -> None:
    rank = distributed.get_rank()
    torch.manual_seed(0)
    x = torch.randn(8, 8, dtype=torch.float64)
    two = autopar.parallelize(Two(), MESH, COLUMN_ROW)
    one, other = two(x)
    said = refused(RuntimeError, (one if rank == 1 else other).backward)
    assert (
        "rank 1: backward of call 1 from its outputs 0" in said
        and "ranks 0 2 3: backward of call 1 from its outputs 1" in said
    )
    two = autopar.parallelize(Two(), MESH, COLUMN_ROW)
    first, second = two(x)[0], two(x * 2)[0]
    said = refused(RuntimeError, (first if rank != 3 else second).backward)
    assert "rank 3: backward of call 2" in said


def modes_that_differ() -> None:
    """Captured before or not."""
    rank = distributed.get_rank()
    torch.manual_seed(0)
    x = torch.randn(8, 8, dtype=torch.float64)
    for known in (False, True):
        parallel = autopar.parallelize(Block().double(), MESH, COLUMN_ROW)
        parallel(x)
        if known:
            parallel.eval()(x)
        parallel.train(rank != 1)
        said = refused(RuntimeError, lambda: parallel(x))  # noqa: B023
        assert (
            "rank 1: call (x float64[8, 8]) in eval" in said and "ranks 0 2 3: call (x float64[8, 8]) in train" in said
        )
        parallel = autopar.parallelize(Block().double(), MESH, COLUMN_ROW)
        parallel(x)
        if known:
            with torch.no_grad():
                parallel(x)
        with torch.set_grad_enabled(rank != 1):
            said = refused(RuntimeError, lambda: parallel(x))  # noqa: B023
        assert "rank 1: call (x float64[8, 8]) in train without gradients" in said


def loaded_values_of_the_first_rank() -> None:
    """As those of a model that is put on the mesh."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), nn.BatchNorm1d(8))
    parallel = autopar.parallelize(copy.deepcopy(model), MESH, {"*.up.weight": ("tp", None)})
    scale = 1 + distributed.get_rank()
    parallel.load_state_dict({name: value * scale for name, value in model.state_dict().items()})
    for name, value in parallel.state_dict().items():
        assert torch.equal(whole(value), model.state_dict()[name]), name


def wrapped_layers() -> None:
    """Adapters and parametrizations: outputs, gradients, and where the parameters lie."""
    from wrapped import HAS_PEFT, PARAMETRIZED, Fed, lora_llama

    torch.manual_seed(0)
    x = torch.randn(4, 8, dtype=torch.float64)
    made: list[tuple[nn.Module, dict[str, Any]]] = [
        (Fed(PARAMETRIZED[name]).double(), {"x": x}) for name in ("weight norm", "spectral norm")
    ]
    if HAS_PEFT:
        made.append((lora_llama(), text(0)))
    for model, batch in made:
        eager = copy.deepcopy(model)
        parallel = autopar.parallelize(model, Mesh(tp=2), "megatron", outputs="global")
        with PromotedCasts():
            wanted, found = eager(**batch), parallel(**batch)
            loss_of(wanted).backward()
            loss_of(found).backward()
        assert relative(loss_of(found), loss_of(wanted)) <= TOLERANCE
        same_gradients(parallel, eager)
    if HAS_PEFT:
        placements = {name: parameter.placements for name, parameter in parallel.named_parameters()}
        (name,) = (name for name in placements if "q_proj.lora_B" in name)
        assert placements[name] == (Shard(0),)
