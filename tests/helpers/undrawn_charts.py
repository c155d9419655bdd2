"""Pages without charts, which take three quarters of the time of a small measurement."""

from kleash.reports import drawing, page

WAYS = {True: drawing.to_svg, False: lambda chart: "<svg></svg>"}


def draw_charts(is_wanted: bool) -> None:
    """Draw the charts of the pages that this process writes, or put an empty picture in the place of each."""
    environment = page._environment()
    if environment.filters["svg"] is not WAYS[is_wanted]:
        environment.filters["svg"] = WAYS[is_wanted]
        environment.cache.clear()  # of compiled templates, which keep their filters
