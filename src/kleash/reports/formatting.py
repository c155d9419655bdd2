"""Formatting of numbers, untrusted text and commands for reports and the terminal."""

import math
import re
import shlex
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass
from functools import lru_cache
from itertools import takewhile
from typing import Any

from kleash.estimate import Estimate
from kleash.jobs import MeasureJob
from kleash.jobs.option_groups import in_order_of_help
from kleash.store import Measurement
from kleash.store.codec import encode
from kleash.store.summary import cells

NAMED_CHARACTERS = {"\n": "⏎", "\t": "⇥"}
UNKNOWN = "–"
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
HYPHEN_OF_NUMBER = re.compile(r"(?<![\w.-])-(?=\d|inf\b)")
"""The hyphen of a negative number in a sentence, for which pages have a minus sign."""
BYTE_UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"), (1, "bytes"))
JOINERS = "\u200c\u200d"
"""Invisible characters that join others in emoji and Persian words: shown as they are inside other text."""


@dataclass(frozen=True, kw_only=True)
class FormattedNumber:
    """A number as text: value, standard error and interval to the same digits."""

    value: str
    error: str
    interval: str
    unit: str
    warnings: tuple[str, ...]


def format_number(number: Estimate) -> FormattedNumber:
    """``number`` as a page shows it; probabilities in percent."""
    value, interval, error, unit = cells(number)
    return FormattedNumber(
        value=typographic(value),
        error=typographic(error) if error else UNKNOWN,
        interval=" to ".join(map(typographic, interval.split(" to "))) if interval else UNKNOWN,
        unit=unit,
        warnings=number.warnings,
    )


def format_with_interval(number: Estimate) -> str:
    """A number with its 95 % interval: "0.218 (0.199 to 0.237)"."""
    text = format_number(number)
    return text.value if text.interval == UNKNOWN else f"{text.value} ({text.interval})"


def typographic(text: str) -> str:
    """A formatted number with a minus sign, ∞, and powers of ten as superscripts."""
    if text.lstrip("-") in ("inf", "nan"):
        return {"inf": "∞", "-inf": "−∞"}.get(text, "NaN")
    mantissa, _, exponent = text.partition("e")
    power = f" × 10{str(int(exponent)).translate(SUPERSCRIPTS)}" if exponent else ""
    return mantissa.replace("-", "−") + power


def format_value(value: float, digits: int = 3) -> str:
    """A number without an error, to ``digits`` significant digits."""
    if not math.isfinite(value) or value == 0:
        return typographic(f"{value:g}")
    scientific = f"{value:.{digits - 1}e}"
    power = int(scientific.partition("e")[2])
    if -5 < power < 6:
        return typographic(f"{value:.{max(0, digits - 1 - power)}f}")
    return typographic(scientific)


def format_bytes(size: float | None, *, is_round: bool = False) -> str:
    """A number of bytes in words, such as "4.90 GB"; a round one as "1.5 GB"; "–" if it is None."""
    if size is None:
        return UNKNOWN
    unit_bytes, unit = next((row for row in BYTE_UNITS if size >= row[0]), BYTE_UNITS[-1])
    return f"{(format_threshold if is_round or unit_bytes == 1 else format_value)(size / unit_bytes)} {unit}"


def format_duration(seconds: float | int) -> str:
    """A duration in words: "40 s", "12 min", "3.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def format_threshold(value: float) -> str:
    """A round number without trailing zeros."""
    return typographic(f"{value:g}")


def format_count(value: int) -> str:
    """A whole number with narrow spaces between thousands."""
    return with_narrow_spaces(f"{value:,}")


def with_narrow_spaces(text: str) -> str:
    """A text with narrow spaces in place of the commas between thousands."""
    return re.sub(r"(?<=\d),(?=\d)", "\u202f", text)


def format_percent(value: float) -> str:
    """A share in percent, to three significant digits."""
    return f"{format_value(100 * value)}\u202f%"


def as_sentence(text: str) -> str:
    """``text`` with a capital first letter and a full stop."""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?", ":")) else ".")


@lru_cache(maxsize=65536)
def make_visible(text: str) -> str:
    """``text`` with its invisible characters shown: spaces at the ends, line breaks, controls.

    An empty token is ∅. A combining mark at the beginning stands on a dotted circle. A character without a glyph is
    shown by its number, ⟨U+202E⟩.
    """
    if not text:
        return "∅"
    only_joiners = all(character in JOINERS for character in text)
    inner = "".join(_visible_character(character, only_joiners) for character in text.strip(" "))
    if inner and unicodedata.category(inner[0]).startswith("M"):
        inner = "◌" + inner
    if not inner:
        return "␣" * len(text)
    left, right = len(text) - len(text.lstrip(" ")), len(text) - len(text.rstrip(" "))
    return "␣" * left + inner + "␣" * right


def _visible_character(character: str, only_joiners: bool) -> str:
    """The character, or its name or code point in brackets if a reader would not see it."""
    if character in NAMED_CHARACTERS:
        return NAMED_CHARACTERS[character]
    if character == " " or (character in JOINERS and not only_joiners):
        return character
    is_invisible = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zs", "Zl", "Zp")
    return f"⟨U+{ord(character):04X}⟩" if is_invisible else character


def keep_end(text: str, length: int = 24) -> str:
    """The last ``length`` characters of a name, made visible, after … if it was longer; paths differ at their ends."""
    text = make_visible(text)
    return text if len(text) <= length else "…" + text[1 - length :]


def short_names(names: Sequence[str], length: int = 24) -> list[str]:
    """The end of each name, as ``keep_end``; of names with one end, the end before what these have in common.

    The whole names if two would still look alike.
    """
    ends = [keep_end(name, length) for name in names]
    alike = {end: [name for name, other in zip(names, ends, strict=True) if other == end] for end in ends}
    shared = {end: shared_end(group) if len(set(group)) > 1 else 0 for end, group in alike.items()}
    shown = [
        keep_end(f"{name[: -shared[end]]}…", length) if shared[end] else end
        for name, end in zip(names, ends, strict=True)
    ]
    return shown if len(set(shown)) == len(set(names)) else list(map(make_visible, names))


def shared_end(names: Sequence[Sequence[str]]) -> int:
    """How many of the last characters, or other elements, all have in common."""
    columns = zip(*(name[::-1] for name in names), strict=False)
    return len(list(takewhile(lambda column: len(set(column)) == 1, columns)))


def keep_beginning(text: str, length: int = 240) -> str:
    """The first ``length`` characters of ``text``, made visible, followed by … if it was longer."""
    beginning = make_visible(text[:length])
    return beginning if len(text) <= length else beginning.rstrip("␣ ") + " …"


def measure_command(job: Mapping[str, Any]) -> str:
    """The command that repeats a measurement.

    Args:
        job: the settings of its ``MeasureJob``.
    """
    return command_line(("kleash", "measure"), in_order_of_help(MeasureJob), job)


def repeating_command(measurement: Measurement) -> str:
    """The command that repeats a measurement; POLICY and REFERENCE are folders for models that were in memory."""
    saved = {role: role.upper() for role, model in measurement.models.items() if model.storage == "in memory"}
    return measure_command({**measurement.job, **saved})


def command_line(command: Sequence[str], options: Sequence[Field[Any]], settings: Mapping[str, Any]) -> str:
    """A command with the options that differ from their defaults, quoted for a shell.

    Args:
        command: its words.
        options: the fields of its job; ``resume`` is left out.
        settings: a value for each option; options without one have their default.
    """
    words = list(command)
    for option in options:
        value = settings.get(option.name, option.default)
        if encode(value) == encode(option.default) or option.name == "resume":
            continue
        name = option.name.replace("_", "-")
        words.append(f"--no-{name}" if value is False else f"--{name}")
        if isinstance(value, (list, tuple)):
            words += [shlex.quote(str(item)) for item in value]
        elif not isinstance(value, bool):
            words.append(shlex.quote(str(value)))
    return " ".join(words)
