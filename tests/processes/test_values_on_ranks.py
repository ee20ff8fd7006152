"""Numbers that are read from DTensors, and values that are written to them, are those of one device, or refused."""

from __future__ import annotations

import pytest
import values_on_ranks
from processes import ranks
from values_on_ranks import PAIR

MESHES = [({"dp": 2}, "fsdp"), ({"tp": 2}, PAIR), ({"dp": 2}, "ddp")]
CALL = "call (x float64[4, 8]) in train"
DIFFERENT = (
    "the ranks make different calls\n    rank 0: {}\n    rank 1: {}\n  values_on_ranks.py:{}\n  it takes the values of "
    "all ranks; call it on all of them, and use the result where you want"
)
DIFFER = (
    "ranks 0 and 1 hold different values of {}, which must be equal on these ranks: it was written since the last "
    "call{}\n  write the same on all ranks: functions of torch.nn.init draw one device's numbers if all ranks call "
    "them, parallel.load_state_dict and parallel.initialize() set the same values, and so does what is written to the "
    "model before parallelize"
)


@pytest.mark.parametrize(("sizes", "plan"), MESHES, ids=str)
def test_numbers_that_are_read(sizes: dict[str, int], plan: object) -> None:
    ranks(2).run(values_on_ranks.read, sizes, plan)


@pytest.mark.parametrize(("sizes", "plan"), MESHES, ids=str)
def test_random_numbers_that_are_written(sizes: dict[str, int], plan: object) -> None:
    (said, _) = ranks(2).run(values_on_ranks.drawn, sizes, plan)
    assert without_line(said) == (
        "t_() turns a tensor on the mesh around in place, as torch.nn.init.orthogonal_ does for more columns than "
        "rows\n    values_on_ranks.py:  said = refused(NotImplementedError, lambda: nn.init.orthogonal_(wide))\n  "
        "write parameters with parallel.initialize(init), a function of a module as for apply, or before parallelize"
    )


@pytest.mark.parametrize(("sizes", "plan"), MESHES, ids=str)
def test_elements_that_are_written(sizes: dict[str, int], plan: object) -> None:
    (said, _) = ranks(2).run(values_on_ranks.elements, sizes, plan)
    if plan != "ddp":
        assert len(said) == len(values_on_ranks.LOST)
        assert without_line(said[0]) == (
            "zero_ writes to a part of a tensor that is split over ranks, but DTensor has gathered this part: the "
            "tensor would not change\n    values_on_ranks.py:  lambda w: w[0].zero_(),\n  write by an index on all "
            "ranks, as in weight[0] = 2 * weight[0]"
        )


def test_copies_that_differ() -> None:
    (said, _) = ranks(2).run(values_on_ranks.copied)
    lines = said[0].splitlines()
    assert lines[0] == "the ranks make different calls"
    assert lines[1].startswith("    rank 0: copy a whole tensor with the digest ") and lines[1][:11] != lines[2][:11]
    assert lines[3].endswith("said = [refused(RuntimeError, lambda: weight.copy_(other))]")
    remedy = (
        "copy the same whole tensor on all ranks; what is for this rank's piece alone is copied into weight.to_local()"
    )
    assert lines[4:] == [f"  {remedy}"]
    assert "must match the existing size" in said[1]


def test_data_that_is_refused() -> None:
    (said, _) = ranks(2).run(values_on_ranks.given_data)
    line = "values_on_ranks.py:  weight.data = value"
    remedy = (
        "write values of the same shape with torch.no_grad(): p.copy_(value); another shape, dtype or device is given "
        "to the model before parallelize"
    )
    another = "a tensor on the mesh is given .data of another"
    assert list(map(without_line, said[:3])) == [
        f"{another} shape: [3], and it has [12, 8]\n    {line}\n  {remedy}",
        f"{another} dtype: torch.float32, and it has torch.float64\n    {line}\n  {remedy}",
        f"{another} shape: [1, 8], and it has [12, 8]\n    {line}\n  {remedy}",
    ]
    assert said[3].startswith(f"{another} mesh: ") and said[3].endswith("\n  give it value.full_tensor()")
    assert said[4].startswith("the ranks make different calls") and "weight.to_local()" in said[4]


def test_two_axes() -> None:
    ranks(4).run(values_on_ranks.read, {"dp": 2, "tp": 2}, PAIR)
    ranks(4).run(values_on_ranks.drawn, {"dp": 2, "tp": 2}, PAIR)


def test_values_on_stages() -> None:
    ranks(2).run(values_on_ranks.on_stages)


def without_line(said: str) -> str:
    """The text without the number of the quoted line."""
    before, name, after = said.partition("values_on_ranks.py:")
    return before + name + after.lstrip("0123456789")


def test_a_number_that_one_rank_reads() -> None:
    every = ranks(2).run(values_on_ranks.read_on_one_rank)
    line = "  said = refused(RuntimeError, lambda: norm.item())"
    said = DIFFERENT.format("read a number of a tensor that is split or pending over ranks", CALL, line)
    assert [without_line(text) for text in every] == [said, said]


def test_writes_between_calls() -> None:
    every = ranks(2).run(values_on_ranks.written, "ddp")
    line = "  said.append(refused(RuntimeError, lambda: bias.normal_()))"
    said = [
        DIFFER.format("0.up.bias", ""),
        DIFFER.format("0.up.bias", ""),
        DIFFER.format("0.down.weight", ", on rank 0 alone"),
        DIFFER.format("0.up.bias", ""),
        DIFFER.format("0.up.bias", ", on rank 1 alone"),
        DIFFER.format("0.up.weight", ", on rank 1 alone"),
        DIFFERENT.format("normal_ of a tensor on the mesh", CALL, line),
    ]
    assert [[without_line(text) for text in texts] for texts in every] == [said, said]


def test_nothing_is_exchanged_without_a_write() -> None:
    assert ranks(2).run(values_on_ranks.exchanges) == [[0, 2, 0]] * 2
