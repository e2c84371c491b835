"""report.png: loss, schedule, gradient norm, throughput and expert balance of one run on one page.

Drawn on a `Figure` of its own (no pyplot, so no global state and no display). What a file does not hold is left out of
the picture, not invented.
"""

# S steps   C columns of the heat map   L MoE layers   E experts of a layer

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_runtime.report.read import ExpertLoad, Metrics, read_load, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

REPORT_FILE = "report.png"

_BLUE, _ORANGE, _GREEN = "#2f6db3", "#d9702b", "#3b8f5a"
_MAX_HEAT_COLUMNS = 600
_FINAL_STEPS = 10
_SMOOTH_FROM = 40  # fewer points than this are drawn as they are
_DPI = 110
_HEADER_INCHES = 0.75


def write_report(run_dir: Path) -> Path:
    """Draw the run in `run_dir` into its report.png and return that path; only files of the folder are read.

    ValueError where the folder holds no steps; ImportError names the extra that brings matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("report.png needs matplotlib: pip install 'moe-runtime[train]'") from error
    metrics, load = read_metrics(run_dir), read_load(run_dir)
    figure = Figure(figsize=(13.0, 12.5 if load is not None else 8.0), facecolor="white")
    FigureCanvasAgg(figure)
    _draw(figure, metrics, load, title=run_dir.resolve().name)
    path = run_dir / REPORT_FILE
    partial = path.with_name(path.name + ".partial")
    figure.savefig(partial, format="png", dpi=_DPI)
    partial.replace(path)
    return path


def _draw(figure: "Figure", metrics: Metrics, load: ExpertLoad | None, *, title: str) -> None:
    heights = [1.0, 1.0, 0.9] if load is None else [1.0, 1.0, 0.95, 1.05]
    grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
    inches = figure.get_figheight()
    top = 1.0 - _HEADER_INCHES / inches
    figure.set_layout_engine("constrained", rect=(0, 0, 1, top), w_pad=0.12, h_pad=0.12, hspace=0.04, wspace=0.04)
    figure.text(0.015, 1.0 - 0.12 / inches, title, fontsize=17, fontweight="bold", va="top")
    figure.text(0.015, 1.0 - 0.48 / inches, _summary(metrics), fontsize=10.5, color="#444444", va="top")
    _draw_loss(figure.add_subplot(grid[0:2, 0]), metrics)
    _draw_curve(figure.add_subplot(grid[0, 1]), metrics, "lr", "Learning rate", "learning rate", _GREEN)
    _draw_curve(
        figure.add_subplot(grid[1, 1]), metrics, "grad_norm", "Gradient norm before clipping", "L2 norm", _ORANGE
    )
    throughput = grid[2, 0] if load is not None else grid[2, :]
    _draw_throughput(figure.add_subplot(throughput), metrics)
    if load is not None:
        _draw_final_load(figure, figure.add_subplot(grid[2, 1]), load)
        _draw_load_history(figure, figure.add_subplot(grid[3, :]), load)


def _summary(metrics: Metrics) -> str:
    """One line: steps, losses, throughput, peak memory."""
    parts = [f"steps {metrics.step_S[0]} to {metrics.step_S[-1]}"]
    for name, words in (("loss", "loss"), ("val_loss", "validation loss")):
        _, values = metrics.measured(name)
        if len(values):
            parts.append(f"{words} {values[0]:.3f} → {values[-1]:.3f}")
    _, speed = metrics.measured("tokens_per_second")
    if len(speed):
        parts.append(f"median {np.median(speed):,.0f} tokens/s")
    _, memory = metrics.measured("memory_bytes")
    if len(memory):
        parts.append(f"peak memory {memory.max() / 2**30:.2f} GiB")
    return "   ·   ".join(parts)


def _draw_loss(axes: "Axes", metrics: Metrics) -> None:
    step, loss = metrics.measured("loss")
    _line(axes, step, loss, _BLUE, "training")
    step, loss = metrics.measured("val_loss")
    if len(loss):
        axes.plot(step, loss, "o-", color=_ORANGE, markersize=5, linewidth=1.6, label="validation", zorder=4)
    values_S = metrics.columns.get("loss", np.zeros(1))
    if num_lost := int(np.sum(~np.isfinite(values_S))):
        text = f"not a finite number in {num_lost} of {len(values_S)} steps"
        axes.text(0.02, 0.03, text, color="#b3261e", transform=axes.transAxes)
    _finish(axes, "Loss", "nats / token")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)


def _draw_curve(axes: "Axes", metrics: Metrics, name: str, title: str, unit: str, color: str) -> None:
    step, values = metrics.measured(name)
    if name == "lr":  # a schedule has no noise to smooth
        axes.plot(step, values, color=color, linewidth=2.0, marker="o" if len(values) == 1 else None)
    else:
        _line(axes, step, values, color, title)
    finite = values[np.isfinite(values)]
    # A curve over several decades is unreadable on a linear axis.
    if len(finite) and finite.min() > 0 and finite.max() > 50 * finite.min() and name != "lr":
        axes.set_yscale("log")
    if name == "lr":
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
        axes.set_ylim(bottom=0)
    _finish(axes, title, unit)


def _draw_throughput(axes: "Axes", metrics: Metrics) -> None:
    step, speed = metrics.measured("tokens_per_second")
    _line(axes, step, speed, _BLUE, "tokens/s")
    if len(speed):
        median = float(np.median(speed))
        axes.axhline(median, color="black", linewidth=1.0, linestyle="--", zorder=4, label=f"median {median:,.0f}")
        axes.legend(frameon=False, loc="lower right")
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    _finish(axes, "Throughput, all ranks", "tokens / s")


def _draw_final_load(figure: "Figure", axes: "Axes", load: ExpertLoad) -> None:
    """Load of each expert over its layer's mean, averaged over the last steps: 1 (white) is balance."""
    from matplotlib.colors import TwoSlopeNorm

    last = load.load_SLE[-_FINAL_STEPS:]
    tokens_LE = last.sum(axis=0, dtype=np.float64)
    ratio_LE = _over_mean(tokens_LE)
    norm = TwoSlopeNorm(1.0, vmin=0.0, vmax=max(2.0, float(ratio_LE.max())))
    image = axes.imshow(ratio_LE, aspect="auto", interpolation="nearest", cmap="RdBu_r", norm=norm, origin="lower")
    _colorbar(figure, axes, image, "load / layer mean")
    _integer_ticks(axes.xaxis)
    _integer_ticks(axes.yaxis)
    axes.set_xlabel("expert")
    axes.set_ylabel("MoE layer")
    num_steps = len(last)
    _title(axes, f"Expert load, last {num_steps} steps" if num_steps > 1 else "Expert load, last step")


def _draw_load_history(figure: "Figure", axes: "Axes", load: ExpertLoad) -> None:
    """Busiest expert over the mean, by layer and step: 1 is balance, E one expert with every token."""
    ratio_LC = _imbalance(load.load_SLE, _MAX_HEAT_COLUMNS)
    first, last = int(load.step_S[0]), int(load.step_S[-1])
    extent = (first - 0.5, last + 0.5, -0.5, ratio_LC.shape[0] - 0.5)
    top = max(1.5, float(np.quantile(ratio_LC, 0.995)))
    image = axes.imshow(
        ratio_LC,
        aspect="auto",
        interpolation="nearest",
        cmap="magma_r",
        vmin=1.0,
        vmax=top,
        origin="lower",
        extent=extent,
    )
    _colorbar(figure, axes, image, "busiest expert / mean", extend="max" if ratio_LC.max() > top else "neither")
    _integer_ticks(axes.xaxis)
    _integer_ticks(axes.yaxis)
    axes.set_xlabel("step")
    axes.set_ylabel("MoE layer")
    _title(axes, "Expert imbalance by layer and step (1 = every expert gets the same number of tokens)")


def _imbalance(load_SLE: np.ndarray, max_columns: int) -> np.ndarray:
    """[L, C] max/mean over experts, averaged over equal runs of steps where there are more steps than columns."""
    num_steps = len(load_SLE)
    edges = np.linspace(0, num_steps, min(num_steps, max_columns) + 1).astype(int)
    runs = itertools.pairwise(edges)
    return np.stack([_over_mean(load_SLE[start:end]).max(axis=-1).mean(axis=0) for start, end in runs], axis=1)


def _over_mean(load: np.ndarray) -> np.ndarray:
    """load / its mean over the last dim (experts); 1 where a layer saw no token."""
    mean = np.broadcast_to(load.mean(axis=-1, keepdims=True), load.shape)
    return np.divide(load, mean, out=np.ones(load.shape), where=mean > 0)


# ---- shared looks ----


def _line(axes: "Axes", step: np.ndarray, values: np.ndarray, color: str, label: str) -> None:
    """The curve; many points are drawn pale under their running mean."""
    if not len(values):
        return
    if len(values) < _SMOOTH_FROM:
        axes.plot(step, values, color=color, linewidth=1.8, label=label, marker="o" if len(values) == 1 else None)
        return
    axes.plot(step, values, color=color, linewidth=0.8, alpha=0.35)
    axes.plot(step, _running_mean(values), color=color, linewidth=2.0, label=label)


def _running_mean(values: np.ndarray) -> np.ndarray:
    """Centered mean over about a fortieth of the run, over fewer points at both ends; infinities are left out."""
    half = max(1, len(values) // 80)
    finite = np.isfinite(values)
    sums = np.concatenate(([0.0], np.cumsum(np.where(finite, values, 0.0))))
    counts = np.concatenate(([0], np.cumsum(finite)))
    position = np.arange(len(values))
    start, end = np.maximum(position - half, 0), np.minimum(position + half + 1, len(values))
    count = counts[end] - counts[start]
    return np.divide(sums[end] - sums[start], count, out=np.full(len(values), np.nan), where=count > 0)


def _finish(axes: "Axes", title: str, unit: str) -> None:
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    axes.grid(True, color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.margins(x=0.01)
    _integer_ticks(axes.xaxis)
    _title(axes, title)


def _title(axes: "Axes", title: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")


def _integer_ticks(axis: "Axis") -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, nbins=9, steps=[1, 2, 4, 5, 8, 10]))


def _colorbar(figure: "Figure", axes: "Axes", image: Any, label: str, *, extend: str = "neither") -> None:
    bar = figure.colorbar(image, ax=axes, pad=0.015, extend=extend)
    bar.set_label(label)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
