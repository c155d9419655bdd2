"""Pages without charts, which take three quarters of the time of a small measurement."""

from kleash.reports import drawing, page


def draw_charts(is_wanted: bool) -> None:
    """Draw the charts of the pages that this process writes, or put an empty picture in the place of each."""
    environment = page._environment()
    environment.filters["svg"] = drawing.to_svg if is_wanted else lambda chart: "<svg></svg>"
    environment.cache.clear()  # of compiled templates, which keep their filters
