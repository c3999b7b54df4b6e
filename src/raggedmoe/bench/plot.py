"""Pictures of measurements."""

from pathlib import Path

from raggedmoe.bench.cases import LIMIT, Timing


def plot_timings(timings: list[Timing], title: str, path: Path) -> None:
    """Draw bars of each contender's share of the limit, case by case, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    bars = [t for t in timings if t.contender not in (LIMIT, "reading the weights")]
    cases = list(dict.fromkeys(f"{t.case}, {t.dtype}" for t in bars))
    contenders = list(dict.fromkeys(t.contender for t in bars))
    figure, axes = plt.subplots(figsize=(11, 1.2 + 0.22 * len(cases) * (len(contenders) + 1)), layout="constrained")
    height = 0.8 / max(len(contenders), 1)
    for i, contender in enumerate(contenders):
        mine = [t for t in bars if t.contender == contender]
        places = [cases.index(f"{t.case}, {t.dtype}") + i * height - 0.4 + height / 2 for t in mine]
        drawn = axes.barh(places, [t.of_limit for t in mine], height, label=contender)
        labels = [f"{t.of_limit:.2f}  ({t.seconds * 1e3:.1f} ms)" for t in mine]
        axes.bar_label(drawn, labels, padding=3, fontsize=8)
    axes.axvline(1, color="black", linewidth=1, zorder=0)
    axes.set_xscale("log")
    axes.set_xlim(right=5)
    ticks = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(cases)), cases)
    axes.invert_yaxis()
    axes.set_xlabel("share of the limit (dense matmuls of the same useful FLOPs and type; a copy for row moves)")
    axes.set_title(title)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=min(len(contenders), 5))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
