"""Curves of simulated settings as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from aiak_ext.analysis.simulate import Result


def plot_results(results: Sequence[Result], path: str | Path) -> None:
    """Write useful time, waiting and padding over the number of ranks, one curve per lever setting, as an image.

    Args:
        results: Simulated settings.
        path: File to write; its suffix gives the format.
    """
    from matplotlib.figure import Figure  # here: importing it takes a second, and most commands draw nothing

    curves: dict[str, list[Result]] = {}
    for result in results:
        label = result.setting.lever + (f" ({result.setting.detail})" if result.setting.detail else "")
        curves.setdefault(f"{label}, micro batch {result.setting.micro_batch_size}", []).append(result)
    figure = Figure(figsize=(15, 5), layout="constrained")
    for axes, name in zip(figure.subplots(1, 3), ("useful", "waiting", "padding")):
        for label, curve in curves.items():
            points = sorted((one.setting.num_ranks, getattr(one.figures, name)) for one in curve)
            axes.plot(*zip(*points), marker="o", label=label)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("data-parallel ranks")
        axes.set_ylabel(f"{name} (share)")
        axes.set_ylim(0, 1.02)
        axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize="small")
    figure.savefig(Path(path), dpi=110)
