"""Pictures of measurements."""

from collections.abc import Sequence
from pathlib import Path

from raggedmoe.bench.contender import OURS, PEER
from raggedmoe.bench.run import Result

TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


def plot_results(results: Sequence[Result], title: str, path: Path) -> None:
    """Draw for each case bars of each contender's share of the limit, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    bars = [r for r in results if r.role in (OURS, PEER) and r.seconds and r.of_limit]
    cases = list(dict.fromkeys(f"{r.case}, {r.dtype}" for r in bars))
    contenders = list(dict.fromkeys(r.contender for r in bars))
    height_inches = 1.8 + 0.17 * len(cases) * (len(contenders) + 1)
    figure, axes = plt.subplots(figsize=(11, height_inches), layout="constrained")
    height = 0.8 / max(len(contenders), 1)
    for i, contender in enumerate(contenders):
        mine = [r for r in bars if r.contender == contender]
        places = [cases.index(f"{r.case}, {r.dtype}") + i * height - 0.4 + height / 2 for r in mine]
        drawn = axes.barh(places, [r.of_limit or 0 for r in mine], height, label=contender)
        labels = [f"{r.of_limit:.2f}  ({1e3 * (r.seconds or 0):.1f} ms)" for r in mine]
        axes.bar_label(drawn, labels, padding=3, fontsize=7)
    axes.axvline(1, color="black", linewidth=1, zorder=0)
    axes.set_xscale("log")
    axes.set_xlim(right=5)
    axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.minorticks_off()
    axes.set_yticks(range(len(cases)), cases)
    axes.invert_yaxis()
    axes.set_xlabel("share of the limit: the fastest dense matmuls of the same FLOPs, or reading the weights once")
    axes.set_title(title, fontsize=9, wrap=True)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=min(len(contenders), 4))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
