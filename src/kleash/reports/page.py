"""Rendering of pages: escaping, theme, scripts, and a content security policy that allows only these scripts."""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import Any

from kleash.errors import printable
from kleash.extras import import_extra
from kleash.reports import formatting
from kleash.reports.drawing import to_svg
from kleash.store.atomic import write_atomically
from kleash.store.codec import encode
from kleash.store.statistics import label_of

UNSAFE_IN_SCRIPTS = re.compile("[<>&\u2028\u2029]")


def write_page(path: Path, template: str, assets: Sequence[str] = (), **variables: Any) -> Path:
    """Render ``template`` and write it to ``path`` atomically.

    Args:
        path: the HTML file.
        template: a file in ``templates/`` that extends ``shell.html``.
        assets: scripts in ``assets/`` that run at the end of the page, in this order.
        variables: those of the template; text in them is escaped.

    Returns:
        ``path``.
    """
    sources = list(map(_asset, assets))
    text = (
        _environment()
        .get_template(template)
        .render(
            **variables,
            style=_asset("style.css") + _asset("heat.css"),
            scripts=sources,
            content_policy=_content_policy(sources),
        )
    )
    # Control characters, and lone surrogates (from undecodable paths), are shown by their numbers.
    write_atomically(path, printable(text).encode("utf-8", "backslashreplace"))
    return path


def script_json(value: Any) -> str:
    """``value`` as JSON that is safe between script tags."""
    text = json.dumps(encode(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return UNSAFE_IN_SCRIPTS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _content_policy(sources: Sequence[str]) -> str:
    """A content security policy that allows these scripts, inline styles and no requests."""
    hashes = (base64.b64encode(hashlib.sha256(source.encode()).digest()).decode() for source in sources)
    script_sources = " ".join(f"'sha256-{digest}'" for digest in hashes) or "'none'"
    return (
        f"default-src 'none'; script-src {script_sources}; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


@cache
def _environment() -> Any:
    """The Jinja2 environment with autoescape and the filters of the pages.

    ``script_json`` and ``svg`` escape what they are given; their results are marked as safe in the templates.
    """
    jinja2 = import_extra("jinja2", "models")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("kleash.reports"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        visible=formatting.make_visible,
        excerpt=formatting.keep_beginning,
        ending=formatting.keep_end,
        plain=formatting.format_value,
        count=formatting.format_count,
        percent=formatting.format_percent,
        bytes=formatting.format_bytes,
        threshold=formatting.format_threshold,
        sentence=formatting.as_sentence,
        minus=partial(formatting.HYPHEN_OF_NUMBER.sub, "−"),
        statistic_label=label_of,
        script_json=script_json,
        svg=to_svg,
    )
    environment.globals.update(format_number=formatting.format_number)
    return environment


@cache
def _asset(name: str) -> str:
    """The text of a file in ``assets/``."""
    return (resources.files("kleash.reports") / "assets" / name).read_text(encoding="utf-8")
