"""The measurements of `attention.py` as a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from contestants import CORE_DEFAULT, FA4_EAGER, FLEX, OURS

# Ours are filled, the others open: what is drawn on top of each other stays readable.
MARKERS = {
    OURS["fa4"]: ("o", "tab:blue", True),
    OURS["cudnn"]: ("s", "tab:green", True),
    FA4_EAGER: ("o", "tab:blue", False),
    "core cuDNN": ("s", "tab:green", False),
    "core flash": ("^", "tab:orange", False),
    "core efficient": ("v", "tab:brown", False),
    CORE_DEFAULT: ("x", "black", True),
    FLEX: ("D", "tab:purple", False),
}
SLOWEST = 8.0  # times the fastest; what is slower stands at the edge


def write(data: dict[str, Any], path: Path) -> str:
    """Draw each time relative to the fastest of its row; say what was done."""
    try:
        import matplotlib
    except ImportError:
        return (
            f"No matplotlib: {path} is not written. pip install matplotlib, then --read the JSON."
        )
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    passes = {p: [row for row in data["rows"] if row["pass"] == p] for p in ("fwd", "fwd+bwd")}
    passes = {p: rows for p, rows in passes.items() if rows}
    height = 2 + 0.21 * max(map(len, passes.values()), default=1)
    figure, axes = pyplot.subplots(
        1, max(len(passes), 1), figsize=(17, height), squeeze=False, layout="constrained"
    )
    for axis, (passed, rows) in zip(axes[0], passes.items(), strict=False):
        for name in data["contestants"]:
            points = [
                (min(row["us"][name] / min(row["us"].values()), SLOWEST), place)
                for place, row in enumerate(rows)
                if name in row["us"]
            ]
            if not points:
                continue
            marker, color, filled = MARKERS[name]
            face = {} if marker == "x" else {"facecolors": color if filled else "none"}
            edge = {"color": color} if marker == "x" else {"edgecolors": color}
            axis.scatter(*zip(*points, strict=True), 34, marker=marker, label=name, **face, **edge)
        axis.set_title(f"{passed}: time relative to the fastest")
        axis.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=8)
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.set_xscale("log")
        axis.set_xlim(0.97, SLOWEST * 1.05)
        axis.xaxis.set_major_locator(FixedLocator([1, 1.1, 1.25, 1.5, 2, 3, 5, SLOWEST]))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.grid(alpha=0.3)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(MARKERS))
    machine = data["machine"]
    figure.suptitle(
        f"Attention, bfloat16, {machine['gpu']}; torch {machine['torch']}, cuDNN "
        f"{machine.get('cudnn', '')}, FA4 {machine.get('flash-attn-4', '')}"
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return f"{path} is written."
