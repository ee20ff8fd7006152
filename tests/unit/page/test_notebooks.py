"""Check what notebooks show, and that reports print as tables where their name alone is typed."""

import pytest
from paged_models import call, step

import autopar
from autopar.notebook import as_html


def test_reports_are_tables_where_their_name_alone_is_typed() -> None:
    parallel, made = call(), step(microbatches=2)
    for report in (parallel.reports, parallel.transfers, parallel.transfers.lines, parallel.communication,
                   made.memory(), autopar.price(parallel.program, "cpu")):  # fmt: skip
        assert repr(report) == str(report) and "┃" in repr(report)


def test_reports_and_programs_are_html_in_notebooks() -> None:
    parallel, made = call(), step(microbatches=2)
    staged = step(autopar.Mesh(pp=2, dp=2), microbatches=4, schedule="1f1b")
    for shown in (parallel.program, parallel.reports, parallel.transfers, parallel.communication, made.memory(),
                  made.program, made.local(0), staged.pipeline, staged.pipeline.schedule, staged.memory()):  # fmt: skip
        text = shown._repr_html_()
        assert text.startswith("<pre") and text.endswith("</pre>")
    assert ">/tp</span>" in parallel.program._repr_html_() and ">+tp</span>" in parallel.program._repr_html_()


def test_a_program_in_a_notebook_is_its_text() -> None:
    import html
    import re

    program = call().program
    assert html.unescape(re.sub(r"<.*?>", "", program._repr_html_())) == str(program)
    assert as_html("a < b [x/dp]") == as_html("a < b [x/dp]").replace("<span", "")  # no program, so no colours
    assert "&lt;" in as_html("a < b")


@pytest.mark.parametrize("make", [call, step])
def test_a_model_in_a_notebook_is_the_table_of_its_modules(make: object) -> None:
    text = make()._repr_html_()  # type: ignore[operator]
    assert "bytes of a rank at the peak</p>" in text
    assert "<td>blocks.0-3.up</td>" in text and "weight <code>f32[64/tp 16]</code>" in text
    assert autopar.parallelize(call().module, autopar.Mesh(dp=2), "ddp")._repr_html_().startswith("<pre")


@pytest.mark.simulated
def test_a_searched_plan_in_a_notebook_has_its_bound() -> None:
    parallel = call("search", machine="NVIDIA H100 80GB HBM3")
    assert f"bytes of a rank at the peak, bound {parallel.solution.bound * 1e3:.3f} ms</p>" in parallel._repr_html_()
