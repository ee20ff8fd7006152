"""Save and load the states of models on processes, and make their values those of the first rank."""

from __future__ import annotations

import copy
import tempfile

import torch
from calls_of_models import MESH
from equality import relative
from error_texts import refused
from loops import text, whole
from models import COLUMN_ROW, Block
from torch import distributed, nn
from transformers_models import gpt2, llama

import autopar
from autopar import Mesh


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


def loaded_values_of_the_first_rank() -> None:
    """As those of a model that is put on the mesh."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), nn.BatchNorm1d(8))
    parallel = autopar.parallelize(copy.deepcopy(model), MESH, {"*.up.weight": ("tp", None)})
    scale = 1 + distributed.get_rank()
    parallel.load_state_dict({name: value * scale for name, value in model.state_dict().items()})
    for name, value in parallel.state_dict().items():
        assert torch.equal(whole(value), model.state_dict()[name]), name
