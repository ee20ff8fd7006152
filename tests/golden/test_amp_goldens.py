"""What the golden files of mixed precision say of its casts. ``test_goldens`` compares the files."""

from __future__ import annotations

from goldens import GOLDEN, SEPARATOR


def halves(name: str) -> tuple[str, str, str]:
    before, asked, explicit = (GOLDEN / "amp" / f"{name}.txt").read_text().split(SEPARATOR)
    return before, asked, explicit


def test_weights_are_gathered_narrow() -> None:
    lines = [
        line.split(" = ") for line in halves("gather")[2].splitlines() if "all_gather(" in line or "reduce" in line
    ]
    assert lines and all(" : bf16[" in left for left, _ in lines)


def test_one_cast_for_two_uses() -> None:
    assert halves("two_uses")[2].count("= cast(exp, bf16)") == 1
