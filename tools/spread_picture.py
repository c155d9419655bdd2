"""The picture of docs/leash_study.md: spreads with their intervals, and frontiers, on linear axes."""

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from math import floor, log10
from typing import Any

from svg_charts import COLOURS, INK, RULE, Point, page, text

Box = tuple[float, float, float, float]
Place = Callable[[float, float], Point]
NAMES = {"sequence": "scope sequence", "token": "scope token"}


def picture(title: str, spreads: Mapping[str, Any], points: Sequence[Mapping[str, Any]]) -> str:
    """The picture with both panels; either may be empty."""
    parts = [text(16, 26, title, weight=600, size=14)]
    if spreads:
        parts += intervals((60.0, 78.0, 270.0, 260.0), "standard deviation of the reached KL, nats", spreads)
    if points:
        parts += curves((390.0, 78.0, 720.0, 260.0), "reward against KL (nats per response)", points)
    return page(760, 320, title, parts)


def intervals(box: Box, title: str, spreads: Mapping[str, Any]) -> list[str]:
    """The panel of spreads: a dot with its interval for each estimator."""
    top = max(figure["ci95"][1] for figure in spreads.values())
    place, parts = frame(box, title, len(spreads), top, across=False)
    for number, ((name, figure), colour) in enumerate(zip(spreads.items(), cycle(COLOURS), strict=False)):
        low, high = figure["ci95"]
        x, y = place(number + 0.5, figure["value"])
        ends = [place(number + 0.5, end)[1] for end in (low, high)]
        parts += [
            line((x, ends[0]), (x, ends[1]), colour, 2),
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"/>',
            text(x, box[3] + 19, name, anchor="middle", colour=colour, weight=600),
        ]
    return parts


def curves(box: Box, title: str, points: Sequence[Mapping[str, Any]]) -> list[str]:
    """The panel of frontiers: a line through the points of each scope, with both intervals."""
    right = max(upper(point["kl"]) for point in points)
    top = max(upper(point["reward"]) for point in points)
    place, parts = frame(box, title, right, top, across=True)
    for number, (scope, colour) in enumerate(zip(NAMES, COLOURS, strict=False)):
        scope_points = sorted(
            (point for point in points if point["scope"] == scope), key=lambda point: point["kl"]["value"]
        )
        path = " ".join(
            "{:.1f},{:.1f}".format(*place(point["kl"]["value"], point["reward"]["value"]))
            for point in scope_points
        )
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for point in scope_points:
            parts += cross(place, point, colour)
        parts.append(
            text(box[2] - 8, box[3] - 26 + 17 * number, NAMES[scope], anchor="end", colour=colour, weight=600)
        )
    return parts


def cross(place: Place, point: Mapping[str, Any], colour: str) -> list[str]:
    """A point with its two intervals."""
    kl, reward = point["kl"]["value"], point["reward"]["value"]
    x, y = place(kl, reward)
    parts = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>']
    for name, ends in (("kl", lambda v: place(v, reward)), ("reward", lambda v: place(kl, v))):
        if point[name]["ci95"] is not None:
            start, end = (ends(max(value, 0.0)) for value in point[name]["ci95"])
            parts.append(line(start, end, colour, 1))
    return parts


def line(start: Point, end: Point, colour: str, width: float) -> str:
    """A straight line."""
    ends = f'x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width:g}"/>'


def frame(box: Box, title: str, right: float, top: float, *, across: bool) -> tuple[Place, list[str]]:
    """The function from numbers to positions in the box, and its rules and ticks from 0."""
    x0, y0, x1, y1 = box
    top, right = 1.04 * top, right * (1.04 if across else 1)

    def place(x: float, y: float) -> Point:
        return x0 + (x1 - x0) * x / right, y1 - (y1 - y0) * y / top

    parts = [text(x0 - 36, y0 - 16, title, weight=600)]
    for value in ticks(top):
        y = place(0, value)[1]
        parts.append(line((x0, y), (x1, y), RULE, 1))
        parts.append(text(x0 - 8, y + 4, f"{value:g}", anchor="end"))
    for value in ticks(right) if across else ():
        x = place(value, 0)[0]
        parts.append(line((x, y1), (x, y1 + 5), INK, 1))
        parts.append(text(x, y1 + 19, f"{value:g}", anchor="middle"))
    return place, parts


def ticks(top: float) -> list[float]:
    """Round numbers from 0 to ``top``, at most six."""
    power = 10.0 ** floor(log10(top))
    step = next(power * x for x in (0.1, 0.2, 0.5, 1, 2, 5, 10) if top / (power * x) <= 5)
    return [round(step * n, 10) for n in range(int(top / step) + 1)]


def upper(figure: Mapping[str, Any]) -> float:
    """The upper end of an interval; the number itself if there is no interval."""
    return figure["value"] if figure["ci95"] is None else figure["ci95"][1]
