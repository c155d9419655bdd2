"""Small charts as SVG text; deterministic, readable on light and dark pages."""

from collections.abc import Mapping, Sequence
from html import escape
from itertools import cycle
from math import ceil, floor, log10

COLOURS = ("#0969da", "#bc4c00", "#8250df", "#57606a")
INK, RULE, GROUND = "#1f2328", "#d0d7de", "#ffffff"
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
Point = tuple[float, float]


def bars(title: str, rows: Sequence[tuple[str, float, bool]], mark: tuple[float, str]) -> str:
    """Horizontal bars from 0; rows with True are highlighted; a dotted line marks a value."""
    left, width, step = 270, 360, 26
    top = max(value for _, value, _ in rows)
    height = 70 + step * len(rows)
    at = left + width * mark[0] / top
    parts = [
        text(16, 26, title, weight=600, size=14),
        text(at, 46, mark[1], anchor="middle", size=11),
    ]
    values: list[str] = []
    for number, (label, value, ours) in enumerate(rows):
        y, end, weight = 58 + step * number, left + width * value / top, 600 if ours else 400
        colour = COLOURS[0] if ours else "#8c959f"
        parts += [
            text(left - 8, y + 14, label, anchor="end", weight=weight),
            f'<rect x="{left}" y="{y}" width="{end - left:.1f}" height="18" rx="2" fill="{colour}"/>',
        ]
        values.append(text(end + 6, y + 14, f"{value:.2f}", weight=weight, on_ground=True))
    line = f'<line x1="{at:.1f}" y1="52" x2="{at:.1f}" y2="{height - 12}" stroke="{INK}" stroke-dasharray="2 3"/>'
    return page(700, height, title, [*parts, line, *values])


def lines(title: str, across: str, series: Mapping[str, Sequence[Point]], size: Point = (700, 330)) -> str:
    """Lines on logarithmic axes, each labelled at its end; the ticks on the x axis are those of the points."""
    wide, high = size
    points = [point for line in series.values() for point in line]
    low, top = (turn(log10(side(y for _, y in points))) for turn, side in ((floor, min), (ceil, max)))
    xs = sorted({x for x, _ in points})
    frame = (64.0, 48.0, wide - 190.0, high - 54.0)

    def place(point: Point) -> Point:
        x0, y0, x1, y1 = frame
        along = log10(point[0] / xs[0]) / (log10(xs[-1] / xs[0]) or 1)
        up = (log10(point[1]) - low) / ((top - low) or 1)
        return x0 + (x1 - x0) * along, y1 - (y1 - y0) * up

    parts = [text(16, 26, title, weight=600, size=14), *axes(xs, range(low, top + 1), place, frame, across)]
    ends = spread([place(line[-1])[1] for line in series.values()])
    for (label, line), colour, end in zip(series.items(), cycle(COLOURS), ends, strict=False):
        drawn = [place(point) for point in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in drawn)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in drawn]
        parts.append(text(drawn[-1][0] + 12, end + 4, label, colour=colour, weight=600))
    return page(wide, high, title, parts)


def axes(xs: Sequence[float], powers: range, place, frame: tuple[float, ...], across: str) -> list[str]:
    """The axes: a horizontal rule for each power of ten, a tick for each x."""
    x0, _, x1, y1 = frame
    parts = []
    for power in powers:
        y = place((xs[0], 10.0**power))[1]
        parts.append(f'<line x1="{x0}" y1="{y:.1f}" x2="{x1}" y2="{y:.1f}" stroke="{RULE}"/>')
        parts.append(text(x0 - 8, y + 4, power_of_ten(power), anchor="end"))
    positions = [place((x, 10.0 ** powers[0]))[0] for x in xs]
    for x, at, anchor in zip(xs, positions, label_anchors(positions), strict=True):
        parts.append(f'<line x1="{at:.1f}" y1="{y1}" x2="{at:.1f}" y2="{y1 + 5}" stroke="{INK}"/>')
        parts.append(text(at, y1 + 19, tick(x), anchor=anchor))
    return [*parts, text((x0 + x1) / 2, y1 + 42, across, anchor="middle")]


def label_anchors(places: Sequence[float], distance: float = 60.0) -> list[str]:
    """SVG text anchors of labels at these positions: middle, or outwards for two labels that are close."""
    anchors = ["middle"] * len(places)
    for left in range(len(places) - 1):
        if places[left + 1] - places[left] < distance:
            anchors[left : left + 2] = ["end", "start"]
    return anchors


def spread(heights: Sequence[float], distance: float = 16.0) -> list[float]:
    """The heights, moved down so far that labels do not overlap."""
    positions, last = dict[int, float](), -1e9
    for index in sorted(range(len(heights)), key=lambda i: heights[i]):
        last = positions[index] = max(heights[index], last + distance)
    return [positions[index] for index in range(len(heights))]


def power_of_ten(power: int) -> str:
    """1 to 10000 in digits, other powers of ten with an exponent."""
    return str(10**power) if 0 <= power <= 4 else "10" + str(power).translate(SUPERSCRIPTS)


def tick(x: float) -> str:
    """The label of a tick."""
    return f"{x:,.0f}".replace(",", " ") if x >= 1 else f"{x:.1e}".replace("e-0", "e-").replace(".0e", "e")


def text(
    x: float,
    y: float,
    words: str,
    *,
    anchor: str = "start",
    weight: int = 400,
    size: int = 12,
    colour: str = INK,
    on_ground: bool = False,
) -> str:
    """One line of text; ``on_ground`` adds a white outline that hides what is drawn behind it."""
    halo = f' stroke="{GROUND}" stroke-width="4" paint-order="stroke"' if on_ground else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" '
        f'font-size="{size}" fill="{colour}"{halo}>{escape(words)}</text>'
    )


def page(wide: float, high: float, title: str, parts: Sequence[str]) -> str:
    """The whole SVG document, on a white background."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:g} {high:g}" width="{wide:g}" height="{high:g}" '
        f'role="img" font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">'
    )
    ground = f'<rect width="{wide:g}" height="{high:g}" rx="6" fill="{GROUND}"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", ground, *parts, "</svg>"]) + "\n"
