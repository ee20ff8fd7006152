"""Devices: models without memory, mixtures, and an accelerator where there is one."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from equality import TOLERANCE, relative
from models import COLUMN_ROW, Block, Language
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar import Mesh
from autopar.capture import trace as capturing

LLAMA = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, vocab_size=32, max_position_embeddings=64)  # fmt: skip
PROJECTIONS = {"*.[qkv]_proj.weight": ("tp",), "*.o_proj.weight": (None, "tp")}


def llama() -> nn.Module:
    return LlamaForCausalLM._from_config(LLAMA, attn_implementation="eager")


class Made(nn.Module):
    """Makes tensors where its input is: filled, counted, from numbers, like another; and has a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, str]:
        made = torch.arange(4, device=x.device) + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)
        y = self.w(x) * self.scale + made + x.new_ones(4) + torch.zeros_like(x) + torch.empty_like(x).fill_(2)
        return y + torch.full((4,), 3.0, device=self.w.weight.device), x.device.type


MODELS = {"mlp": (Block, lambda: (torch.randn(4, 8),)), "made": (Made, lambda: (torch.randn(4, 4),)),
          "llama": (llama, lambda: (torch.zeros(4, 6, dtype=torch.long),))}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_on_meta_all_but_running(name: str) -> None:
    """The program is that of the same model with values: meta is no device to plan for."""
    model, args = MODELS[name]
    plan = {"mlp": COLUMN_ROW, "made": {"w.weight": ("tp",)}, "llama": PROJECTIONS}[name]
    with torch.device("meta"):
        empty, nothing = model(), args()
    parallel = autopar.parallelize(empty, Mesh(dp=2, tp=2), plan, example=nothing)
    assert all(p.is_meta for p in (*empty.parameters(), *nothing))
    parallel.local(3).verify()
    if torch.accelerator.is_available():
        return
    assert str(parallel.program) == str(autopar.parallelize(model(), Mesh(dp=2, tp=2), plan, example=args()).program)
    first = next(name for name, _ in empty.named_parameters())
    with pytest.raises(ValueError, match=f"{first} is on the meta device and has no values"):
        parallel.simulate(*nothing)


def test_some_on_meta() -> None:
    with torch.device("meta"):
        empty, nothing = Made(), torch.randn(4, 4)
    parallel = autopar.parallelize(empty, Mesh(dp=2), "ddp", example=(torch.randn(4, 4),))
    with pytest.raises(ValueError, match=r"w\.weight is on the meta device"):
        parallel.simulate(torch.randn(4, 4))
    model = Made()
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp", example=(nothing,))
    with pytest.raises(ValueError, match=r"x is on the meta device"):
        parallel.simulate(nothing)
    x = torch.randn(4, 4)
    assert relative(parallel.simulate(x)[0], model(x)[0]) <= 1e-6


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Captures from meta alone are for an accelerator; it need not be there, as long as there is no backward."""
    monkeypatch.setattr(capturing, "_device", lambda tensors: torch.device("cuda:0"))
    with torch.no_grad():
        yield


def test_no_device_is_assumed(elsewhere: None) -> None:
    """What a step makes it makes on the device that the capture is for; constants go there."""
    with torch.device("meta"):
        program = autopar.parallelize(Made(), Mesh(dp=2), "ddp", example=(torch.randn(4, 4),)).program
        language = autopar.parallelize(
            Language(), Mesh(dp=2), "ddp", example=(torch.zeros(4, 3, dtype=torch.long),) * 2
        ).program
    devices = {
        str(n.kwargs["device"]) for p in (program, language) for n in p.nodes if n.kwargs.get("device") is not None
    }
    assert devices == {"cuda:0"}
    assert "cpu" not in str(program) + str(language) and "'cuda')" in str(program)
    (constant,) = [n for n in program.nodes if n.op == "get_attr"]
    assert [user.kwargs.get("device") for user in constant.users] == [torch.device("cuda:0")]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", MODELS)
def test_on_cuda(name: str) -> None:
    model, args = MODELS[name]
    ours = model().double().cuda()
    theirs = copy.deepcopy(ours)
    given = tuple(a.double().cuda() if a.is_floating_point() else a.cuda() for a in args())
    plan = {"mlp": COLUMN_ROW, "made": None, "llama": PROJECTIONS}[name]
    outputs, expected = autopar.parallelize(ours, Mesh(dp=2, tp=2), plan).simulate(*given), theirs(*given)
    y, z = (
        (outputs.logits, expected.logits)
        if name == "llama"
        else (outputs, expected)
        if name == "mlp"
        else (outputs[0], expected[0])
    )
    assert y.is_cuda and relative(y, z) <= TOLERANCE
    y.square().sum().backward()
    z.square().sum().backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert relative(a.grad, b.grad) <= TOLERANCE
