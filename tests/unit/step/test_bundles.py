"""Messages between stages: what is unpacked is what whole tensors are cut into, whatever the Layouts at both ends."""

from __future__ import annotations

import math

import pytest
import strategies
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar import Mesh
from autopar.ir.layout import DistAttr, layout_of
from autopar.ir.record import TensorType
from autopar.runtime.lowering.bundles import ALIGNED, Bundle, Crossed
from autopar.runtime.simulation.pieces import cut

CPU = torch.device("cpu")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8)
Case = tuple[list[TensorType], list[TensorType], list[torch.Tensor]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Values with their types at both ends, which are on meshes without common ranks: equal ones, or different ones."""
    source, target = draw(strategies.worlds())
    is_alike = draw(st.integers(0, 3)) == 0
    target = source if is_alike else target
    target = Mesh(target.sizes, ranks=[rank + 1 + max(source.ranks) for rank in target.ranks])
    sources, targets, tensors = [], [], []
    for _ in range(draw(st.integers(1, 4))):
        shape = draw(strategies.shapes())
        dtype = draw(st.sampled_from(DTYPES))
        before = draw(strategies.attrs(source, shape, pending=()))
        after = before if is_alike and draw(st.booleans()) else draw(
            strategies.attrs(target, shape, pending=())
        )  # fmt: skip
        sources.append(TensorType(shape, dtype, layout_of(source, before)))
        targets.append(TensorType(shape, dtype, layout_of(target, after)))
        numbers = torch.arange(math.prod(shape)).reshape(shape)
        tensors.append((numbers % 2).bool() if dtype is torch.bool else (numbers % 100 + 1).to(dtype))
    return sources, targets, tensors


@pytest.mark.simulated
@settings(deadline=None)
@given(case=cases())
def test_what_is_unpacked(case: Case) -> None:
    sources, targets, tensors = case
    values = [Crossed.of(f"v{k}", *ends) for k, ends in enumerate(zip(sources, targets, strict=True))]
    ranks = sorted({*sources[0].mesh.ranks, *targets[0].mesh.ranks})
    bundles = {rank: Bundle(values, rank) for rank in ranks}
    old = {
        rank: [cut(t, type, type.mesh.coordinates(rank)) for t, type in zip(tensors, sources, strict=True)]
        for rank in sources[0].mesh.ranks
    }
    before = {rank: [piece.clone() for piece in pieces] for rank, pieces in old.items()}
    mail = {
        (rank, other): memory.clone()
        for rank, pieces in old.items()
        for other, memory in bundles[rank].pack(pieces).items()
    }
    for (sender, receiver), memory in mail.items():
        assert bundles[sender].sends[receiver] == bundles[receiver].receives[sender] == len(memory)
        assert len(memory) % ALIGNED == 0 and memory.dtype == torch.uint8 and sender != receiver
    for rank, bundle in bundles.items():
        assert bundle.sends.keys() == {receiver for sender, receiver in mail if sender == rank}
        assert bundle.receives.keys() == {sender for sender, receiver in mail if receiver == rank}
        if rank in targets[0].mesh:
            received = {sender: memory for (sender, receiver), memory in mail.items() if receiver == rank}
            pieces = bundle.unpack(received, CPU)
            for piece, tensor, type in zip(pieces, tensors, targets, strict=True):
                wanted = cut(tensor, type, type.mesh.coordinates(rank))
                assert piece.dtype == wanted.dtype and torch.equal(piece, wanted)
    for rank, pieces in before.items():
        assert all(map(torch.equal, pieces, old[rank])), "no piece is written"


def crossed(shape: tuple[int, ...], *dims: str, dtype: torch.dtype = torch.float32, to: str = "") -> Crossed:
    """A value whose dims are split over the axes of that name, from the ranks 0 and 1 to the ranks 2 and 3."""
    source, target = Mesh(tp=2, ranks=[0, 1]), Mesh(tp=2, ranks=[2, 3])

    def type(mesh: Mesh, names: tuple[str, ...]) -> TensorType:
        attr = DistAttr(tuple(((None, (name,) if name else ()),) for name in names), ())
        return TensorType(shape, dtype, layout_of(mesh, attr))

    return Crossed.of("v", type(source, dims), type(target, tuple(to.split(",")) if to else dims))


def test_ranks_send_to_the_same_coordinates() -> None:
    """Where both ends have one Layout: one message, which is the piece itself, and is not copied on either side."""
    bundle = Bundle([crossed((4, 4), "tp", "")], 0)
    assert bundle.sends == {2: 32} and not bundle.receives
    piece = torch.randn(2, 4)
    (message,) = bundle.pack([piece]).values()
    assert message.data_ptr() == piece.data_ptr()
    (received,) = Bundle([crossed((4, 4), "tp", "")], 2).unpack({0: message}, CPU)
    assert received.data_ptr() == piece.data_ptr() and torch.equal(received, piece)


def test_several_values_are_one_message() -> None:
    """Each begins at a multiple of 16 bytes, so that it is a view of the message, in its dtype."""
    values = [crossed((3, 2), "", "tp", dtype=torch.bfloat16), crossed((2, 4), "tp", "", dtype=torch.float64),
              crossed((2,), "tp", dtype=torch.bool)]  # fmt: skip
    bundle = Bundle(values, 1)
    assert bundle.sends == {3: 16 + 32 + 16}
    pieces = [torch.randn(3, 1, dtype=torch.bfloat16), torch.randn(1, 4, dtype=torch.float64), torch.tensor([True])]
    (message,) = bundle.pack(pieces).values()
    received = Bundle(values, 3).unpack({1: message}, CPU)
    assert [piece.data_ptr() - message.data_ptr() for piece in received] == [0, 16, 48]
    assert all(map(torch.equal, received, pieces))


def test_a_whole_value_comes_from_one_rank() -> None:
    """What all ranks of a stage hold comes from the rank with the same coordinates."""
    bundles = [Bundle([crossed((4,), "")], rank) for rank in range(4)]
    assert sorted((rank, *other) for rank in (2, 3) for other in bundles[rank].receives.items()) == [
        (2, 0, 16),
        (3, 1, 16),
    ]
    assert [len(bundle.sends) for bundle in bundles] == [1, 1, 0, 0]


def test_two_stages_of_one_rank() -> None:
    """Nothing is sent: the step hands the tensors over."""
    mesh = Mesh(tp=2)
    type = TensorType((4,), torch.float32, layout_of(mesh, DistAttr((((None, ("tp",)),),), ())))
    bundle = Bundle([Crossed.of("v", type, type)], 1)
    assert not bundle.sends and not bundle.receives and not bundle.pack([torch.randn(2)])
