"""The shell that every page shares: escaping, theme, scripts, and a policy that lets nothing else run."""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kleash.errors import MissingExtraError
from kleash.extras import import_extra
from kleash.records import write_atomically
from kleash.records.codec import encode
from kleash.records.statistics import label_of
from kleash.reports import formatting

FORBIDDEN_IN_SCRIPTS = {
    "<": "\\u003c",
    ">": "\\u003e",
    "&": "\\u0026",
    "\u2028": "\\u2028",
    "\u2029": "\\u2029",
}


def write_page(
    path: Path,
    template: str,
    context: Mapping[str, Any],
    scripts: Sequence[str],
    *,
    templates: Path | None = None,
) -> Path:
    """Render ``template`` and write it to ``path``, whole or not at all.

    Args:
        path: the HTML file.
        template: a file in ``templates/`` that extends ``shell.html``.
        context: what the template shows; text in it is escaped.
        scripts: files in ``assets/`` that run at the end of the page, in this order; "plotly" is Plotly.
        templates: a folder in which ``template`` is looked up first.
    """
    sources = [_plotly() if name == "plotly" else _asset(name) for name in scripts]
    markup = import_extra("markupsafe", "models").Markup
    text = (
        _environment(templates)
        .get_template(template)
        .render(
            **context,
            style=markup(_asset("style.css") + _asset("heat.css")),
            scripts=[markup(source) for source in sources],
            content_policy=_content_policy(sources),
        )
    )
    # What is no Unicode text (half of a surrogate pair in a path) is shown as its number.
    write_atomically(path, text.encode("utf-8", "backslashreplace"))
    return path


def script_json(value: Any) -> str:
    """``value`` as JSON that can stand between script tags, whatever text is in it."""
    text = json.dumps(encode(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character, escaped in FORBIDDEN_IN_SCRIPTS.items():
        text = text.replace(character, escaped)
    return text


def _content_policy(sources: Sequence[str]) -> str:
    """What the browser may do with the page: run these scripts and no others, and fetch nothing."""
    digests = (base64.b64encode(hashlib.sha256(source.encode()).digest()).decode() for source in sources)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


@cache
def _environment(templates: Path | None = None) -> Any:
    jinja2 = import_extra("jinja2", "models")
    loaders = [jinja2.PackageLoader("kleash.reports")]
    if templates is not None:
        loaders.insert(0, jinja2.FileSystemLoader(templates))
    markup = import_extra("markupsafe", "models").Markup
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(loaders),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        visible=formatting.visible,
        excerpt=formatting.excerpt,
        ending=formatting.ending,
        plain=formatting.plain,
        count=formatting.count,
        percent=formatting.percent,
        threshold=formatting.threshold,
        sentence=formatting.sentence,
        statistic_label=label_of,
        script_json=lambda value: markup(script_json(value)),
    )
    environment.globals.update(shown=formatting.shown)
    return environment


@cache
def _asset(name: str) -> str:
    return (resources.files("kleash.reports") / "assets" / name).read_text(encoding="utf-8")


@cache
def _plotly() -> str:
    """Plotly's own script, from the installed package; importing the package itself is not needed."""
    found = find_spec("plotly")
    if found is None or not found.submodule_search_locations:
        raise MissingExtraError("plotly is not installed; run: pip install 'kleash[models]'")
    path = Path(found.submodule_search_locations[0]) / "package_data" / "plotly.min.js"
    # A browser reads every line break as \n, and what it reads must have the digest that is promised.
    return path.read_text(encoding="utf-8")
