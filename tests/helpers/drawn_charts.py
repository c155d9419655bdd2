"""What Matplotlib draws of a chart, read from its artists."""

from typing import Any

from kleash.reports.drawing import Chart, chart_figure, matplotlib_style


def drawn(chart: Chart | None) -> list[Any]:
    """The axes of a chart, from top to bottom, after a layout."""
    assert chart is not None
    with matplotlib_style("test") as make_figure:
        figure = chart_figure(make_figure, chart)
        figure.draw_without_rendering()
    return list(figure.axes)


def dots(axes: Any) -> list[list[tuple[float, float]]]:
    """The points of each series of dots."""
    return [
        [(float(x), float(y)) for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)]
        for line in axes.lines
        if line.get_linestyle() == "None"
    ]


def intervals(axes: Any) -> list[list[tuple[float, float]]]:
    """The ends of the interval of each dot of each series, along the axis of the values."""
    ends = []
    for collection in axes.collections:
        if hasattr(collection, "get_segments"):
            segments = collection.get_segments()
            along = 0 if all(start[1] == stop[1] for start, stop in segments) else 1
            ends.append([(float(start[along]), float(stop[along])) for start, stop in segments])
    return ends


def curves(axes: Any) -> dict[str, tuple[list[float], list[float]]]:
    """x and y of each curve, by its label in the legend; of one without a label, by the axes' name for it."""
    return {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
        for line in axes.lines
        if line.get_linestyle() != "None" and len(line.get_xdata()) != 2
    }


def bands(axes: Any) -> list[tuple[list[float], list[float]]]:
    """The lower and the upper edge of each band."""
    edges = []
    for collection in axes.collections:
        if not hasattr(collection, "get_segments"):
            # corner, lower, corner, upper, end
            heights = [float(y) for _, y in collection.get_paths()[0].vertices]
            points = (len(heights) - 3) // 2
            edges.append((heights[1 : 1 + points], heights[2 + points : -1][::-1]))
    return edges


def ticks(axis: Any) -> list[str]:
    """The texts at the ticks within the limits of an axis."""
    low, high = sorted(axis.get_view_interval())
    return [
        label.get_text()
        for place, label in zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=True)
        if low <= place <= high
    ]


def legend(axes: Any) -> list[str]:
    """The labels in the legend."""
    return [] if axes.get_legend() is None else [text.get_text() for text in axes.get_legend().get_texts()]
