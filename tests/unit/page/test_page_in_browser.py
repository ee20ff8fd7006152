"""Open pages in a headless browser, as wide as a laptop and as a phone."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from paged_models import call, step

import autopar

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium: apt-get install chromium")

REASON = "the plan splits 4096 of blocks.0.up over tp twice, and the mesh has no axis fsdp; name one"
LOOK = """
const inside = document.getElementById("page").contentDocument, root = inside.documentElement;
const wide = [...inside.body.querySelectorAll("*")].filter(e => !e.closest(".scroll, pre, svg, nav")
  && e.getBoundingClientRect().right > WIDTH + 1).map(e => e.className || e.tagName);
const canvas = inside.querySelector("canvas"), pen = canvas && canvas.getContext("2d");
const painted = pen ? pen.getImageData(0, 0, canvas.width, canvas.height).data.some(v => v) : null;
document.body.dataset.found = JSON.stringify({
  drawn: root.dataset.drawn, wide, painted, scrolls: root.scrollWidth,
  sections: [...inside.querySelectorAll("h2")].map(e => e.textContent),
  phases: [...inside.querySelectorAll("#memory svg text[text-anchor=middle]")].map(e => e.textContent),
  letters: Math.min(...[...inside.querySelectorAll("#memory svg text")].map(e => e.getBoundingClientRect().height)),
  dashes: inside.querySelectorAll("#memory svg line").length,
  reasons: [...inside.querySelectorAll("#plans tr.below div")].map(
    e => [e.textContent, e.getBoundingClientRect().width]),
  hints: [...inside.querySelectorAll("#transfers .hint")].map(e => !e.hidden),
  sources: [...inside.querySelectorAll(".tree .moved .soft")].map(e => e.textContent),
  about: [...inside.querySelectorAll("#cards, #timeline")].map(e => e.textContent).join(" "),
  ticks: Number(canvas?.dataset.ticks),
  rows: inside.querySelectorAll("#transfers tbody tr").length, grids: inside.querySelectorAll("svg.grid").length,
  modules: [...inside.querySelectorAll(".tree .name")].map(e => e.textContent),
});
"""


def look(page: Path, width: int) -> dict[str, Any]:
    """Open a page in a frame of this width, and return what is seen."""
    inner = html.escape(page.read_text())
    frame = f'<iframe id="page" style="width:{width}px;height:900px;border:0" srcdoc="{inner}"></iframe>'
    script = LOOK.replace("WIDTH", str(width))
    outer = page.with_suffix(f".{width}.html")
    outer.write_text(f"<body>{frame}<script>onload = () => setTimeout(() => {{{script}}}, 300)</script></body>")
    assert BROWSER is not None
    done = subprocess.run(
        [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=4000", "--dump-dom",
         f"--user-data-dir={page.parent / 'profile'}", "--window-size=1300,1000", outer.as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    found = re.search(r'data-found="(.*?)"', done.stdout)
    assert found is not None, done.stderr[-2000:]
    return json.loads(html.unescape(found[1]))


@needs_browser
@pytest.mark.long
@pytest.mark.parametrize("width", [1280, 390], ids=["laptop", "phone"])
def test_a_page_is_drawn_without_errors_and_fits(width: int, tmp_path: Path) -> None:
    made = step(microbatches=2)
    other = autopar.page.Alternative("fsdp+tp", None, note=REASON)
    made.page(tmp_path / "step.html", alternatives=[other])
    seen = look(tmp_path / "step.html", width)
    assert seen["drawn"] == "yes" and seen["painted"] is True  # the script has come to its end
    assert seen["wide"] == [] and seen["scrolls"] <= width
    assert seen["rows"] == len(made.figures()["transfers"]) > 0
    assert seen["modules"] == ["the model", "blocks", "0-3", "up", "down"] and seen["grids"] >= 6
    assert seen["phases"][:2] == ["forward", "backward"] and seen["dashes"] <= 3 and seen["letters"] >= 9
    ((said, wide),) = seen["reasons"]
    assert said == REASON and 200 < wide < width
    assert seen["hints"] == [width == 390]
    assert seen["ticks"] == (4 if width == 1280 else 2)
    prices = [f"{seconds * 1e3:.3f} ms" for seconds in (made.figures()["seconds"], made.communication.makespan)]
    assert f"{prices[0]}a step of 2 micro-batches on cpu, its ops and transfers added up" in seen["about"]
    assert f"{prices[1]}the same in the order of the timeline" in seen["about"]
    assert (
        f"The price of the plan, {prices[0]}, adds up its ops and transfers one after the other; here" in seen["about"]
    )
    assert {"The model and its layouts", "Transfers", "Memory of a rank", "Timeline", "Passes"} <= {*seen["sections"]}


@needs_browser
@pytest.mark.long
def test_pages_of_searches_and_stages_are_drawn(tmp_path: Path) -> None:
    call("search", machine="NVIDIA H100 80GB HBM3").page(tmp_path / "search.html")
    seen = look(tmp_path / "search.html", 1280)
    assert seen["drawn"] == "yes" and "The plan and its alternatives" in seen["sections"]
    step(autopar.Mesh(pp=2, dp=2), microbatches=4, schedule="zb-h1").page(tmp_path / "stages.html")
    seen = look(tmp_path / "stages.html", 1280)
    assert seen["drawn"] == "yes" and seen["painted"] is True and "Slots of the pipeline" in seen["sections"]
