"""Compare the figures of a page with the reports that they are taken from."""

import json
from pathlib import Path

import pytest
import torch
from paged_models import MESH, X, call, script, step

import autopar
from autopar.page.memory_over_time import memory_over_time
from autopar.report.memory import memory_of
from autopar.report.transfers import bytes_per_axis, priced

KEYS = ["title", "seconds", "bound", "gap", "memory", "transfers", "modules", "machine"]
H100 = "NVIDIA H100 80GB HBM3"


def test_figures_of_a_call_are_those_of_its_reports() -> None:
    parallel = call()
    figures = parallel.figures(H100)
    assert [*figures] == KEYS
    price = autopar.price(parallel.program, H100)
    assert figures["seconds"] == price.seconds and figures["machine"]["name"] == H100
    assert figures["bound"] is None and figures["gap"] is None
    assert figures["memory"] == memory_of(parallel.local(0)).peak
    received = sum(bytes_per_axis(parallel.program).values())
    assert sum(row["bytes"] for row in figures["transfers"] if row["axis"]) == received
    paid = sum(row.nanoseconds for row in price.rows if row.kind != "op")
    assert sum(row["seconds"] for row in figures["transfers"]) == pytest.approx(paid / 1e9, rel=1e-3)
    whole = figures["modules"][0]
    assert whole["module"] == "" and whole["seconds"] + whole["transfer_seconds"] == pytest.approx(price.seconds)


def test_modules_that_are_alike_are_one_row() -> None:
    rows = {row["module"]: row for row in call().figures()["modules"]}
    assert [*rows] == ["", "blocks", "blocks.0-3", "blocks.0-3.up", "blocks.0-3.down"]
    assert rows["blocks.0-3"]["count"] == 4
    assert rows["blocks.0-3.up"]["parameters"] == {"weight": "f32[64/tp 16]"}
    assert rows["blocks.0-3.down"]["result"] == "f32[8/dp 16] +tp"
    inside = sum(rows[f"blocks.0-3.{name}"]["seconds"] for name in ("up", "down"))
    assert 0 < inside < rows["blocks.0-3"]["seconds"] <= rows["blocks"]["seconds"]


def test_a_module_with_another_layout_stays_apart() -> None:
    parallel = call({"blocks.2.up.weight": (None, "tp")})
    rows = {row["module"]: row["count"] for row in parallel.figures()["modules"]}
    assert [rows[name] for name in ("blocks.0-1", "blocks.2", "blocks.3")] == [2, 1, 1]


@pytest.mark.simulated
def test_figures_of_a_searched_plan_have_its_certificate() -> None:
    parallel = call("search", machine=H100)
    figures, solution = parallel.figures(), parallel.solution
    assert (figures["seconds"], figures["bound"], figures["gap"]) == (solution.seconds, solution.bound, solution.gap)
    assert parallel.figures("cpu")["bound"] is None  # the bound is of another machine


def test_figures_of_a_step_count_all_micro_batches() -> None:
    two = step(microbatches=2)
    figures = two.figures(H100)
    assert figures["seconds"] == autopar.price(two.program, H100).seconds
    assert figures["memory"] == two.memory().peak
    times = {
        name: sum(row["times"] for row in figures["transfers"] if row["part"] == name) for name in two.program.runs
    }
    inserted = {name: sum(1 for _ in priced(program)) for name, program in two.program.programs.items()}
    assert times == {"micro": 2 * inserted["micro"], "update": inserted["update"]} and inserted["micro"] > 0
    drawn = memory_over_time(two.page_subject().memory.lifetimes)
    assert drawn is not None
    assert max(sum(point["bytes"]) for point in drawn["points"]) == two.memory().peak


def test_figures_of_stages_are_those_of_the_slots() -> None:
    staged = step(autopar.Mesh(pp=2, dp=2), microbatches=4, schedule="1f1b")
    figures = staged.figures()
    assert figures["seconds"] == staged.pipeline.simulate().makespan
    assert figures["memory"] == max(staged.memory(rank).peak for rank in range(4))
    sent = [row for row in figures["transfers"] if row["transfer"] == "send"]
    boundary = 8 // 4 * 16 * 4  # rows of a micro-batch, width, bytes
    assert [(row["part"], row["phase"], row["times"], row["bytes"]) for row in sent] == [
        ("stage 0", "forward", 4, 4 * boundary), ("stage 1", "backward", 4, 4 * boundary)
    ]  # fmt: skip
    simulated = staged.pipeline.simulate().sent
    assert sum(row["seconds"] for row in sent) == pytest.approx(sum(span.end - span.start for span in simulated))


def test_the_page_holds_the_figures_and_needs_no_network(tmp_path: Path) -> None:
    made = step(microbatches=2)
    made.page(tmp_path / "step.html")
    text = (tmp_path / "step.html").read_text()
    assert json.loads(script(text, "autopar")) == made.figures()
    assert "://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "src=" not in text and "@import" not in text and "url(" not in text


def test_text_of_a_model_cannot_end_a_script_element(tmp_path: Path) -> None:
    class Odd(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 2).sum() if "</script><b>" else x

    Odd.__name__ = "</script><b>Odd"
    autopar.parallelize(Odd(), autopar.Mesh(dp=2), example=(X,)).page(tmp_path / "odd.html")
    text = (tmp_path / "odd.html").read_text()
    assert text.count("</script>") == 3 and "<b>Odd" not in text


def test_a_page_needs_a_capture_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="nothing has been captured yet"):
        autopar.parallelize(torch.nn.Linear(4, 4), MESH, "ddp").page(tmp_path / "a.html")
    parallel = call()
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*none for the page .*; make it first"):
        parallel.page(tmp_path / "none" / "a.html")
    with pytest.raises(IsADirectoryError, match=r"is a folder; name a file in it, such as .*plan\.html"):
        parallel.page(tmp_path)
    with pytest.raises(TypeError, match=r'written to a path, such as "plan\.html", not to 3'):
        parallel.page(3)
    for option, said in (
        (
            {"alternatives": ["megatron"]},
            r"alternatives=\['megatron'\] is no list of what autopar\.page\.Alternative\(",
        ),
        ({"explained": "up"}, r"explained='up' is no list of what solution\.explain\("),
        ({"timeline": "x"}, r"timeline='x' is no timeline; give what step\.timeline\(batch\) returned"),
    ):
        with pytest.raises(TypeError, match=said):
            parallel.page(tmp_path / "a.html", **option)
    staged = autopar.parallelize(torch.nn.Sequential(torch.nn.Linear(16, 16)), autopar.Mesh(pp=2), example=(X,))
    with pytest.raises(RuntimeError, match=r"only a training step has programs with costs there; take step\.page"):
        staged.page(tmp_path / "a.html")
