"""Plot ``bench_reshard``: seconds over inserted ops, a line a mode."""

from __future__ import annotations

from pathlib import Path

import numpy as np

LOOKS = {  # how it is called, color, marker, and how far above it its figures stand
    "sync": ("a commit an operation", "#b5402f", "s", 8),
    "per-reshard": ("a commit a reshard", "#c98a1b", "^", -15),
    "batched": ("one commit", "#1f6f8b", "o", 8),
}


def plot(points: dict[str, list[tuple[int, float]]], layers: list[int], path: Path) -> None:
    """``points``: mode → (inserted ops, seconds), one for each of ``layers``."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("the plot needs matplotlib: pip install -e '.[profile]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.2, 4.6), dpi=120)
    for mode, (what, color, marker, above) in LOOKS.items():
        if mode not in points:
            continue
        inserted, seconds = map(np.array, zip(*points[mode], strict=True))
        slope = f": exponent {np.polyfit(np.log(inserted), np.log(seconds), 1)[0]:.2f}" if len(inserted) > 1 else ""
        axes.plot(inserted, seconds, color=color, marker=marker, label=what + slope)
        for x, y in {(inserted[0], seconds[0]), (inserted[-1], seconds[-1])}:
            axes.annotate(
                _time(y), (x, y), textcoords="offset points", xytext=(0, above), ha="center", fontsize=8, color=color
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.margins(x=0.08, y=0.12)
    ticks = [x for x, _ in next(iter(points.values()))]
    axes.set_xticks(ticks, [f"{x}\n{n} layers" for x, n in zip(ticks, layers, strict=True)])
    axes.minorticks_off()
    axes.grid(color="0.9")
    axes.set_xlabel("inserted ops")
    axes.set_ylabel("seconds")
    axes.set_title("reshard on Llama-2-7B, forward and backward, dp=2 tp=2", fontsize=10)
    axes.legend(frameon=False, fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
