"""What ran when, drawn as bars: one panel a timeline, one lane for what computes and one for what travels."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_COLOURS = {
    "dgrad": "#b9c4d0",
    "dgrad + wgrad": "#7497bd",
    "wgrad": "#2f6db3",
    "exchange": "#3b8f5a",
    "waiting": "#d9702b",
}


class Bar(NamedTuple):
    """Something of a `kind`, one that has a colour, that took from `start` to `stop`, in milliseconds."""

    lane: str
    kind: str
    start: float
    stop: float


def write_timelines(path: Path, timelines: Mapping[str, Sequence[Bar]]) -> None:
    """Draw a panel for each timeline, all on one scale, into `path`, whose suffix says the format (.svg, .png).

    ValueError for a kind that has no colour or a bar that stops before it starts.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError("timelines need matplotlib: pip install 'moe-runtime[train]'") from error
    figure = Figure(figsize=(9.0, 0.9 + 1.05 * len(timelines)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    for panel, (name, bars) in zip(panels, timelines.items(), strict=True):
        lanes = list(dict.fromkeys(bar.lane for bar in bars))
        for bar in bars:
            if bar.kind not in _COLOURS or bar.stop < bar.start:
                raise ValueError(f"expected a kind among {', '.join(_COLOURS)} and start <= stop, got {bar}")
            panel.barh(
                lanes.index(bar.lane), bar.stop - bar.start, left=bar.start, color=_COLOURS[bar.kind], height=0.7
            )
        panel.set_yticks(range(len(lanes)), lanes)
        panel.invert_yaxis()
        panel.set_title(name, loc="left", fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("milliseconds since backward began")
    figure.legend(
        handles=[Patch(color=colour, label=kind) for kind, colour in _COLOURS.items()],
        loc="outside upper right",
        ncols=4,
    )
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
