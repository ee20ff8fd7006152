"""Models from meta on each rank: initialised as on a single device, and read from files piece by piece."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from equality import relative
from error_texts import refused
from loops import text, whole
from models import COLUMN_ROW, Residual
from torch import distributed, nn
from transformers_models import gpt2, llama

import autopar
from autopar import Mesh
from autopar.model.dtensor_parameters import local_of
from autopar.runtime.dtensors import is_dtensor

SEED = 5
MESHES: dict[str, dict[str, int]] = {"dp2 tp2": {"dp": 2, "tp": 2}, "tp4": {"tp": 4}, "dp4": {"dp": 4}}
MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "mlp": (lambda: Residual(8, 12), COLUMN_ROW),
    "mlp uneven": (lambda: Residual(5, 7), COLUMN_ROW),
    "llama": (lambda: llama(kv=2), "megatron"),
    "llama uneven": (
        lambda: llama(heads=3, kv=3, head=2, hidden=11),
        [{"*.embed_tokens.weight": ("tp", None)}, "megatron"],
    ),
    "llama tied": (lambda: llama(tie_word_embeddings=True), "megatron"),
    "gpt2": (lambda: gpt2(), "megatron"),
}


class Odd(nn.Module):
    """Initialised in all the ways that there are."""

    def __init__(self) -> None:
        super().__init__()
        self.truncated = nn.Linear(7, 9)
        self.orthogonal = nn.Linear(9, 6, bias=False)
        self.embed = nn.Embedding(11, 6, padding_idx=3)
        self.parts = nn.Parameter(torch.empty(12, 5))
        self.replaced = nn.Parameter(torch.empty(10, 3))
        self.sparse = nn.Parameter(torch.empty(9, 8))
        self.scaled = nn.Parameter(torch.empty(6, 6))
        self.one = nn.Parameter(torch.empty(6, 6))
        self.recurrent = nn.LSTM(4, 5)
        self.register_buffer("table", torch.empty(7, 3))
        self.register_buffer("count", torch.empty((), dtype=torch.long))

    def init_weights(self) -> None:
        nn.init.trunc_normal_(self.truncated.weight, std=0.02)
        self.truncated.bias.data.uniform_(-1, 1)
        nn.init.orthogonal_(self.orthogonal.weight)
        self.embed.reset_parameters()
        query, key, value = self.parts.chunk(3)
        nn.init.xavier_uniform_(query)
        nn.init.kaiming_normal_(key)
        low, high = value[:2], value[2:]  # two views at a time
        low.normal_()
        high.copy_(low * 2)
        self.parts.data[0, 1:].mul_(3)
        self.replaced = nn.Parameter(torch.randn(10, 3).cumsum(0))
        nn.init.sparse_(self.sparse, 0.3)
        self.scaled.data.normal_()
        self.scaled.data.div_(self.scaled.data.norm()).sigmoid_()
        nn.init.eye_(self.one)
        self.recurrent.reset_parameters()
        self.table.copy_(torch.arange(21.0).view(7, 3))
        self.count.zero_()


ODD_PLAN = {
    "*.truncated.weight": ("tp", None), "*.truncated.bias": ("tp",), "*.orthogonal.weight": (None, "tp"),
    "*.embed.weight": ("tp", None), "*.parts": ("tp", None), "*.replaced": ("tp", None), "*.sparse": ("tp", "dp"),
    "*.scaled": (("dp", "tp"), None), "*.one": ("dp", "tp"), "*.table": ("tp", None), "*.weight_hh_l0": (None, "tp"),
    "*.weight_ih_l0": ("(4 -1/tp)", None),
}  # fmt: skip


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def single(make: Callable[[], nn.Module], init: str) -> nn.Module:
    """The model on one device, initialised in the same way."""
    empty = on_meta(make)
    tied = {id(p): name for name, p in empty.named_parameters()}
    names = {name: tied[id(p)] for name, p in empty.named_parameters(remove_duplicate=False)}
    model = empty.to_empty(device="cpu")
    for name, first in names.items():
        # which to_empty takes apart, and the models' own initialisation ties again
        if name != first and init == "function":
            owner, attribute = name.rsplit(".", 1)
            setattr(model.get_submodule(owner), attribute, model.get_parameter(first))
    torch.manual_seed(SEED)
    with torch.no_grad():
        run(init, model)
    return model


def run(init: str, model: nn.Module) -> None:
    if init == "own" and hasattr(model, "init_weights"):
        model.init_weights()
    elif init == "own":
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    else:
        model.apply(function(model))


def function(model: nn.Module) -> Callable[[nn.Module], Any]:
    """A function of a module, as for ``apply``."""

    def normal(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.LayerNorm)):
            nn.init.normal_(module.weight, std=0.3)
            nn.init.constant_(module.bias, 0.5)

    return getattr(model, "_init_weights", normal)


def same(parallel: nn.Module, wanted: nn.Module) -> None:
    """Every parameter and buffer, to the bit."""
    for ours, theirs in (
        (parallel.named_parameters, wanted.named_parameters),
        (parallel.named_buffers, wanted.named_buffers),
    ):
        found = dict(ours(remove_duplicate=False))
        for name, tensor in theirs(remove_duplicate=False):
            assert not found[name].is_meta and torch.equal(whole(found[name]), tensor), name
            assert found[name].requires_grad == tensor.requires_grad, name


def initialized(name: str, init: str, sizes: dict[str, int]) -> None:
    """The values of a single device, on ranks with other seeds; then a step."""
    make, plan = MODELS[name]
    model = on_meta(make)
    if "tp" not in sizes:
        plan = {"*.up.weight": ("dp", None), "*.down.weight": (None, "dp")} if isinstance(model, Residual) else "ddp"
    parallel = autopar.parallelize(model, Mesh(sizes), plan)
    rank = distributed.get_rank()
    torch.manual_seed(SEED + rank)
    parallel.initialize(None if init == "own" else function(model))
    drawn = torch.rand(3)
    wanted = single(make, init)
    if init == "own" or "tied" not in name:
        same(parallel, wanted)
    assert all(t.is_meta for t in model.parameters())
    if rank == 0:
        assert torch.equal(drawn, torch.rand(3))  # it went on as the single device does
    else:
        torch.manual_seed(SEED + rank)
        assert torch.equal(drawn, torch.rand(3))
    if "tied" in name:
        assert parallel.get_parameter("lm_head.weight") is parallel.get_parameter("model.embed_tokens.weight")
    if not isinstance(model, Residual) and len(sizes) == 2:
        batch = text(0)
        assert relative(parallel(**batch).loss, wanted(**batch).loss) <= 1e-6


def odd_ways(sizes: dict[str, int]) -> None:
    parallel = autopar.parallelize(on_meta(Odd), Mesh(sizes), ODD_PLAN)
    assert sum(any(not p.is_replicate() for p in t.placements) for t in parallel.parameters()) >= 8
    placed = {name: p.placements for name, p in parallel.named_parameters()}
    torch.manual_seed(SEED + distributed.get_rank())
    parallel.initialize()
    same(parallel, single(Odd, "own"))
    assert {name: p.placements for name, p in parallel.named_parameters()} == placed
    assert all(a is b for a, b in zip(parallel.recurrent._flat_weights, parallel.recurrent.parameters(), strict=True))


def refused_without_values() -> None:
    """What init does not write is named, and the model is on meta as before; the same for a rank that draws
    otherwise."""
    make, plan = MODELS["llama"]
    model = on_meta(make)
    parallel = autopar.parallelize(model, Mesh(dp=2, tp=2), plan)

    def linears(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.reset_parameters()

    said = refused(RuntimeError, lambda: parallel.initialize(linears))
    assert (
        "the parameter model.embed_tokens.weight, the parameter" in said
        and "the buffer model.rotary_emb.inv_freq" in said
    ), said
    assert (
        "q_proj" not in said
        and "in init, a function of a module, or make the model with these on a real device" in said
    )
    assert all(
        t.is_meta and (is_dtensor(t) or isinstance(t, torch.Tensor))
        for t in (*parallel.parameters(), *parallel.buffers())
    )

    def scale(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.mul_(2)

    said = refused(RuntimeError, lambda: parallel.initialize(scale))
    assert "has no values yet, and the initialisation changes them with mul_; write it first" in said, said

    def otherwise(module: nn.Module) -> None:
        torch.rand(1 + (distributed.get_rank() == 2))

    said = refused(RuntimeError, lambda: parallel.initialize(otherwise))
    assert "draws other random numbers on rank 2 than on rank 0" in said, said
    assert "device='cuda', but the pieces of this process are on cpu" in refused(
        ValueError, lambda: parallel.initialize(device="cuda")
    )
    parallel.initialize()
    same(parallel, autopar_again(parallel))


def autopar_again(parallel: nn.Module) -> nn.Module:
    """The single-device model with these values, to see that they can be gathered."""
    wanted = MODELS["llama"][0]()
    with torch.no_grad():
        for (_, ours), theirs in zip(parallel.named_parameters(), wanted.parameters(), strict=True):
            theirs.copy_(whole(ours))
        for (_, ours), theirs in zip(parallel.named_buffers(), wanted.buffers(), strict=True):
            theirs.copy_(whole(ours))
    return wanted


class Counted:
    """Counts the bytes that are asked of safetensors, and the largest part."""

    def __init__(self) -> None:
        self.total = self.largest = 0

    def __enter__(self) -> Counted:
        import safetensors

        self.open = safetensors.safe_open
        safetensors.safe_open = lambda *args, **kwargs: CountedFile(self.open(*args, **kwargs), self)
        return self

    def __exit__(self, *raised: Any) -> None:
        import safetensors

        safetensors.safe_open = self.open

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        self.total += tensor.nbytes
        self.largest = max(self.largest, tensor.nbytes)
        return tensor


class CountedFile:
    def __init__(self, file: Any, counted: Counted, name: str = "") -> None:
        self.file, self.counted, self.name = file, counted, name

    def __enter__(self) -> CountedFile:
        return CountedFile(self.file.__enter__(), self.counted)

    def __exit__(self, *raised: Any) -> None:
        self.file.__exit__(*raised)

    def keys(self) -> list[str]:
        return self.file.keys()

    def get_tensor(self, name: str) -> torch.Tensor:
        return self.counted.add(self.file.get_tensor(name))

    def get_slice(self, name: str) -> CountedFile:
        return CountedFile(self.file.get_slice(name), self.counted, name)

    def get_shape(self) -> list[int]:
        return self.file.get_shape()

    def __getitem__(self, part: Any) -> torch.Tensor:
        return self.counted.add(self.file[part])


def loaded(name: str, folder: str, sizes: dict[str, int], meta: bool) -> None:
    """What ``save_pretrained`` wrote, in pieces: to the bit, and no byte more than the pieces have."""
    make, plan = MODELS[name]
    plan = plan if "tp" in sizes else "ddp"
    source = make()
    source = type(source).from_pretrained(folder, dtype=torch.float64)
    assert len(list(Path(folder).glob("*.safetensors"))) == (1 if "one" in folder else 3)
    torch.manual_seed(distributed.get_rank())
    parallel = autopar.parallelize(on_meta(make) if meta else make(), Mesh(sizes), plan)
    with Counted() as counted:
        told = parallel.load_weights(folder)
    assert not told.missing_keys and not told.unexpected_keys
    pieces = [local_of(p).numel() * 4 for p in parallel.parameters()]  # saved in float32
    assert counted.total == sum(pieces) and counted.largest <= max(pieces), (counted.total, sum(pieces))
    for (name_, ours), theirs in zip(parallel.named_parameters(), source.parameters(), strict=True):
        assert torch.equal(whole(ours), theirs), name_
    for (name_, ours), theirs in zip(parallel.named_buffers(), source.buffers(), strict=True):
        assert relative(whole(ours).to(theirs.dtype), theirs) <= 1e-6, name_
    if len(sizes) < 2:
        return
    batch = text(0)
    parallel.eval(), source.eval()
    assert relative(parallel(**batch).loss, source(**batch).loss) <= 1e-6


def bad_files(folder: str) -> None:
    """Keys and shapes, all at once; then nothing has changed. A file that one rank lacks."""
    from safetensors.torch import load_file, save_file

    make, plan = MODELS["llama"]
    rank = distributed.get_rank()
    good = load_file(Path(folder) / "model.safetensors")
    here = Path(folder).parent / f"bad{rank}.safetensors"
    bad = {**good, "extra.weight": torch.zeros(3), "model.norm.weight": torch.zeros(2, 2)}
    del bad["lm_head.weight"]
    save_file(bad, here)
    for model in (on_meta(make), make()):
        parallel = autopar.parallelize(model, Mesh(dp=2, tp=2), plan)
        load = parallel.load_weights
        before = [(p, None if p.is_meta else copy.deepcopy(p)) for p in parallel.parameters()]
        said = refused(RuntimeError, functools.partial(load, here))
        assert (
            'Unexpected key(s) in state_dict: "extra.weight".' in said
            and 'Missing key(s) in state_dict: "lm_head.weight".' in said
        ), said
        assert (
            "size mismatch for model.norm.weight: copying a param with shape torch.Size([2, 2]) from checkpoint, the "
            "shape in current model is torch.Size([16])" in said
        )
        said = refused(RuntimeError, functools.partial(load, here, strict=False))
        assert "size mismatch" in said and "Missing" not in said and "Unexpected" not in said
        for now, (p, values) in zip(parallel.parameters(), before, strict=True):
            assert now is p and (values is None or torch.equal(whole(now), whole(values)))
    del bad["model.norm.weight"]
    save_file({**bad, "model.norm.weight": good["model.norm.weight"]}, here)
    for model in (on_meta(make), make()):
        torch.manual_seed(rank)
        parallel = autopar.parallelize(model, Mesh(dp=2, tp=2), plan)
        kept = None if model.lm_head.weight.is_meta else whole(parallel.get_parameter("lm_head.weight")).clone()
        told = parallel.load_weights(here, strict=False)
        assert told.missing_keys == ["lm_head.weight"] and told.unexpected_keys == ["extra.weight"]
        for name, p in parallel.named_parameters():
            if name != "lm_head.weight":
                assert torch.equal(whole(p), good[name].double()), name
        head = whole(parallel.get_parameter("lm_head.weight"))  # on meta: initialised, alike on all ranks
        assert torch.equal(head, kept) if kept is not None else 0.005 < float(head.std()) < 0.05
    distributed.barrier()
    if rank == 2:
        here.unlink()
    said = refused((OSError, RuntimeError), lambda: parallel.load_weights(here, strict=False))
    assert ("rank 2 cannot load: FileNotFoundError" in said) == (rank != 2) and "bad2.safetensors" in said, said
    parallel(**text(0))  # and the ranks are still together


class Unsaid(nn.Module):
    """With a buffer that no file has and no initialisation writes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x) * self.scale


def unsaid_buffer(path: str) -> None:
    parallel = autopar.parallelize(on_meta(Unsaid), Mesh(dp=2, tp=2), {"*.up.weight": ("tp", None)})
    said = refused(RuntimeError, lambda: parallel.load_weights(path))
    assert "the buffer scale: on meta before, and the initialisation writes nothing to it" in said, said
    assert all(t.is_meta for t in (*parallel.parameters(), *parallel.buffers()))


def wholes(path: str | None) -> list[int]:
    """How many whole tensors there were at a time, while a model of split parameters got its values."""
    from autopar.model.initialize.writes import Writes
    from autopar.torch_private import StorageReference

    parallel = autopar.parallelize(on_meta(lambda: Residual(64, 128, 4)), Mesh(tp=4), COLUMN_ROW)
    made: list[StorageReference] = []
    counts: list[int] = []
    before = Writes._whole

    def noted(self: Writes, tensor: Any, values: bool) -> torch.Tensor:
        whole = before(self, tensor, values)
        if tensor.placements[0].is_shard():
            made.append(StorageReference(whole.untyped_storage()))
        counts.append(sum(not one.expired() for one in made))
        return whole

    Writes._whole = noted
    try:
        parallel.initialize() if path is None else parallel.load_weights(path)
    finally:
        Writes._whole = before
    return counts
