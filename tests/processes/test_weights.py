"""A model on meta gets its values on processes: initialised as a single device's, or read from safetensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import weights
import wrapped
from models import Residual
from processes import ranks
from safetensors.torch import load_file, save_file
from torch import nn
from transformers_models import batch
from weights import MESHES, MODELS, Odd, Unsaid, on_meta, same, single

import autopar
from autopar import Mesh
from autopar.ir.boxes import box_of, slices_of
from autopar.ir.layout import DistAttr, Layout

INITIALIZED = [
    *((name, "own", "dp2 tp2") for name in ("mlp uneven", "llama tied")),
    ("llama uneven", "own", "tp4"),
    ("llama", "own", "dp4"),
    ("mlp", "function", "dp4"),
    ("gpt2", "function", "tp4"),
]
MORE_INITIALIZED = [
    pytest.param(name, init, mesh, marks=pytest.mark.sweep("it runs on another mesh, and on this one others run"))
    for name, init in [*((name, "own") for name in MODELS), ("mlp", "function"), ("gpt2", "function")]
    for mesh in MESHES
    if (name, init, mesh) not in INITIALIZED
]


@pytest.mark.parametrize(("name", "init", "mesh"), [*INITIALIZED, *MORE_INITIALIZED])
def test_initialize(name: str, init: str, mesh: str) -> None:
    ranks(4).run(weights.initialized, name, init, MESHES[mesh])


@pytest.mark.parametrize("sizes", [{"dp": 2, "tp": 2}, {"dp": 1, "tp": 4}], ids=str)
def test_odd_ways(sizes: dict[str, int]) -> None:
    ranks(4).run(weights.odd_ways, sizes)


def test_refused_without_values() -> None:
    ranks(4).run(weights.refused_without_values)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``save_pretrained`` writes of each model: one file, and three."""
    root = tmp_path_factory.mktemp("saved")
    for name in ("llama", "llama tied", "gpt2"):
        torch.manual_seed(3)
        model = MODELS[name][0]().float()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
        model.save_pretrained(root / f"{name} one")
        size = sum(p.numel() * 4 for p in model.parameters())
        for limit in range(size // 2, size // 4, -64):
            model.save_pretrained(root / f"{name} shards", max_shard_size=limit)
            if len(list((root / f"{name} shards").glob("*.safetensors"))) == 3:
                break
    return root


LOADED = [("llama", "shards", "tp4"), ("llama tied", "one", "dp4"), ("gpt2", "shards", "dp2 tp2")]
MORE_LOADED = [
    pytest.param(name, kind, mesh, marks=pytest.mark.sweep("it runs on another mesh, and on this one others run"))
    for name in ("llama", "llama tied", "gpt2")
    for kind in ("one", "shards")
    for mesh in MESHES
    if (name, kind, mesh) not in LOADED
]


@pytest.mark.parametrize(("name", "kind", "mesh"), [*LOADED, *MORE_LOADED])
def test_load(name: str, kind: str, mesh: str, folders: Path) -> None:
    empty = kind == "shards" or name == "llama"
    ranks(4).run(weights.loaded, name, str(folders / f"{name} {kind}"), MESHES[mesh], empty)


def test_bad_files(folders: Path) -> None:
    ranks(4).run(weights.bad_files, str(folders / "llama one"))


def test_a_buffer_that_nothing_gives(tmp_path: Path) -> None:
    save_file(Unsaid().state_dict(), tmp_path / "model.safetensors")
    ranks(4).run(weights.unsaid_buffer, str(tmp_path))


def test_one_whole_tensor_at_a_time(tmp_path: Path) -> None:
    assert all(max(counts) == 1 and len(counts) == 16 for counts in ranks(4).run(weights.wholes, None))
    save_file(Residual(64, 128, 4).state_dict(), tmp_path / "model.safetensors")
    assert ranks(4).run(weights.wholes, str(tmp_path)) == [[]] * 4


# -- in a process that is alone


@pytest.mark.parametrize(
    ("name", "mesh"),
    [*((name, Mesh(dp=2, tp=2)) for name in MODELS), ("mlp", Mesh(dp=1)), ("llama tied", Mesh(dp=1))],
    ids=str,
)
def test_alone(name: str, mesh: Mesh) -> None:
    make, plan = MODELS[name]
    parallel = autopar.parallelize(on_meta(make), mesh, plan if "tp" in mesh.names else None)
    torch.manual_seed(weights.SEED)
    parallel.initialize()
    wanted = single(make, "own")
    same(parallel, wanted)
    call = parallel if mesh.size == 1 else parallel.simulate
    given = {"x": torch.randn(4, 8 if name == "mlp" else 5)} if "mlp" in name else batch()
    ours, theirs = call(**given), wanted(**given)
    torch.testing.assert_close(*((o if isinstance(o, torch.Tensor) else o.loss) for o in (ours, theirs)))


def test_alone_in_odd_ways() -> None:
    parallel = autopar.parallelize(on_meta(Odd), Mesh(dp=2, tp=2), weights.ODD_PLAN)
    torch.manual_seed(weights.SEED)
    parallel.initialize()
    same(parallel, single(Odd, "own"))


@pytest.mark.parametrize("name", ["llama tied", "gpt2"])
def test_load_alone(name: str, folders: Path) -> None:
    make, plan = MODELS[name]
    parallel = autopar.parallelize(on_meta(make), Mesh(dp=2, tp=2), plan)
    parallel.load_weights(str(folders / f"{name} shards"))
    wanted = type(parallel.module).from_pretrained(folders / f"{name} one", dtype=torch.float64)
    for (where, ours), theirs in zip(parallel.named_parameters(), wanted.parameters(), strict=True):
        assert torch.equal(ours, theirs), where
    given = batch()
    torch.testing.assert_close(parallel.simulate(**given).loss, wanted(**given).loss)


def test_values_that_are_there_stay() -> None:
    """What is not on meta is initialised where it lies."""
    model = on_meta(Odd)
    model.table = torch.ones(7, 3)
    model.forward = lambda: None
    table = model.table
    autopar.parallelize(model, Mesh(dp=2)).initialize()
    assert model.table is table and table[0, 1] == 1 and table[6, 2] == 20


def test_ties_that_init_does_not_make() -> None:
    """The tensor was written under each of its names; the last one counts, as on a model that is tied all the time."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
            self.second.weight = self.first.weight

    model, wanted = on_meta(Tied), Tied()
    parallel = autopar.parallelize(model, Mesh(dp=2))
    torch.manual_seed(1)
    parallel.initialize()
    torch.manual_seed(1)
    for module in wanted.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    assert model.first.weight is model.second.weight and torch.equal(model.first.weight, wanted.first.weight)


def test_bad_init() -> None:
    parallel = autopar.parallelize(on_meta(lambda: nn.Linear(4, 4)), Mesh(dp=2))
    with pytest.raises(TypeError, match="init is a function of a module"):
        parallel.initialize("normal")
    with pytest.raises(ValueError, match="device='meta' has no storage"):
        parallel.initialize(device="meta")

    def shorter(module: nn.Module) -> None:
        module.reset_parameters()
        module.bias = nn.Parameter(torch.zeros(3))

    with pytest.raises(
        RuntimeError,
        match=r"the parameter bias is \[4\], and the initialisation puts a tensor \[3\] on cpu in its place",
    ):
        parallel.initialize(shorter)
    assert parallel.weight.is_meta and parallel.bias.is_meta


def test_what_is_no_safetensors_file(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    parallel = autopar.parallelize(model, Mesh(dp=2))
    for kind in (".bin", ".pt"):
        torch.save(model.state_dict(), tmp_path / f"pytorch_model{kind}")
        with pytest.raises(ValueError, match=f"pytorch_model{kind} is a pickle, which can run code and is not read"):
            parallel.load_weights(tmp_path / f"pytorch_model{kind}")
    with pytest.raises(ValueError, match=r"has pytorch_model.bin, pytorch_model.pt, and no safetensors"):
        parallel.load_weights(tmp_path)
    with pytest.raises(FileNotFoundError, match="neither a file nor a folder"):
        parallel.load_weights(tmp_path / "nothing")
    (tmp_path / "cut.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    with pytest.raises(ValueError, match=r"cut.safetensors is no safetensors file, or is cut off"):
        parallel.load_weights(tmp_path / "cut.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for wrong, said in [
        ("[]", 'has no "weight_map"'),
        (json.dumps({"weight_map": {"weight": "../weights.safetensors"}}), "which is no safetensors file beside it"),
        (json.dumps({"weight_map": {"weight": "pytorch_model.bin"}}), "which is no safetensors file beside it"),
        (
            json.dumps({"weight_map": {"weight": "absent.safetensors"}}),
            "absent.safetensors is missing, which model.safetensors.index.json names",
        ),
        (
            json.dumps({"weight_map": {"weight": "there.safetensors"}}),
            "says that weight is in there.safetensors, which has no such tensor",
        ),
    ]:
        save_file({"bias": torch.zeros(4)}, tmp_path / "there.safetensors")
        index.write_text(wrong)
        with pytest.raises((ValueError, FileNotFoundError), match=said):
            parallel.load_weights(tmp_path)


def test_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = autopar.parallelize(nn.Linear(4, 4), Mesh(dp=2))
    save_file(parallel.state_dict(), tmp_path / "model.safetensors")
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install 'autopar\[llm\]'"):
        parallel.load_weights(tmp_path)


def test_dtypes_and_scalars(tmp_path: Path) -> None:
    """Converted as ``copy_`` does; a batch norm's count has no dims."""
    source, model = nn.BatchNorm1d(6), nn.BatchNorm1d(6).double()
    nn.init.normal_(source.weight)
    source.num_batches_tracked += 7
    save_file(
        {name: t.bfloat16() if t.is_floating_point() else t for name, t in source.state_dict().items()},
        tmp_path / "file.safetensors",
    )
    autopar.parallelize(model, Mesh(dp=2), {"weight": ("dp",)}).load_weights(tmp_path / "file.safetensors")
    assert torch.equal(model.weight, source.weight.bfloat16().double()) and model.num_batches_tracked == 7
    assert load_file(tmp_path / "file.safetensors")["weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("attr",
                         [DistAttr.split("dp", None), DistAttr.split(None, ("dp", "tp")), DistAttr.split("tp", "dp"),
                                  DistAttr((((None, ()),), ((3, ()), (4, ("tp",))))),
                                  DistAttr((((5, ("dp",)), (2, ("tp",))), ((None, ()),))),
                                  DistAttr((((2, ("dp",)), (5, ("tp",))), ((2, ("cp",)), (3, ()), (2, ("cp",)))))],
                         ids=str)  # fmt: skip
def test_parts(attr: DistAttr) -> None:
    """What the parts bring together is what ``cut`` cuts."""
    from autopar.runtime.simulation.pieces import _window

    class Type:
        shape = (10, 12)

    Type.attr = attr
    mesh, whole = Mesh(dp=2, tp=2, cp=2), torch.arange(120).view(10, 12)
    for rank in mesh.ranks:
        at = mesh.coordinates(rank)
        piece = torch.full(attr.local_shape((10, 12), mesh, at), -1)
        for there, here in slices_of(box_of(Layout(mesh, attr), (10, 12), rank)):
            assert all((piece[here] == -1).flatten().tolist())
            piece[here] = whole[there]
        assert torch.equal(piece, _window(whole, Type, attr.local_parts((10, 12), mesh, at)).reshape(piece.shape))


@pytest.mark.skipif(not wrapped.HAS_PEFT, reason="PEFT is not installed")
def test_adapters_with_saved_modules(tmp_path: Path) -> None:
    for k, (plan, options) in enumerate(
        [
            ("ddp", {"modules_to_save": ["lm_head"]}),
            ("fsdp", {"modules_to_save": ["lm_head", "embed_tokens"]}),
            ("fsdp", {"modules_to_save": ["input_layernorm"], "bias": "lora_only", "use_dora": True}),
        ]
    ):
        ranks(2).run(wrapped.saved_adapters, str(tmp_path / str(k)), plan, options)
