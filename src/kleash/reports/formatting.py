"""How numbers and other people's text are shown."""

import math
import shlex
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, fields, replace
from functools import lru_cache
from typing import Any

from kleash.records import MeasureJob, Number
from kleash.records.codec import encode

NAMED_CHARACTERS = {"\n": "⏎", "\t": "⇥"}
UNKNOWN = "–"
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
JOINERS = "\u200c\u200d"
"""Invisible, and part of emoji and of Persian words: kept inside other text."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A number as text: value, error and interval to the same digits."""

    value: str
    error: str
    interval: str
    unit: str
    warnings: tuple[str, ...]


def in_unit(number: Number) -> tuple[Number, str]:
    """``number`` in the unit in which it is shown, and that unit: probabilities as percentages."""
    if number.unit != "probability":
        return number, "" if number.unit == "none" else number.unit
    low, high = number.ci95
    shares = replace(
        number,
        value=100 * number.value,
        standard_error=100 * number.standard_error,
        ci95=(100 * low, 100 * high),
    )
    return shares, "%"


def shown(number: Number) -> Shown:
    """``number`` as a page shows it; probabilities as percentages."""
    number, unit = in_unit(number)
    low, high = (typeset(number.format(end)) for end in number.ci95)
    known = not (math.isnan(number.ci95[0]) or math.isnan(number.ci95[1]))
    return Shown(
        value=typeset(number.rounded),
        error=typeset(number.format(number.standard_error)) if number.has_error else UNKNOWN,
        interval=f"{low} to {high}" if known else UNKNOWN,
        unit=unit,
        warnings=number.warnings,
    )


def with_interval(number: Number) -> str:
    """A number with its 95 % interval."""
    text = shown(number)
    return text.value if text.interval == UNKNOWN else f"{text.value} ({text.interval})"


def sizes(value: float) -> float:
    """What to order by when the largest is sought: NaN is below everything."""
    return -math.inf if math.isnan(value) else value


def typeset(text: str) -> str:
    """A formatted number with a real minus sign, and infinity as its sign."""
    if text.lstrip("-") in ("inf", "nan"):
        return {"inf": "∞", "-inf": "−∞"}.get(text, "NaN")
    mantissa, _, exponent = text.partition("e")
    power = f" × 10{str(int(exponent)).translate(SUPERSCRIPTS)}" if exponent else ""
    return mantissa.replace("-", "−") + power


def plain(value: float, digits: int = 3) -> str:
    """A number that has no error of its own, to so many significant digits."""
    if not math.isfinite(value) or value == 0:
        return typeset(f"{value:g}")
    scientific = f"{value:.{digits - 1}e}"
    power = int(scientific.partition("e")[2])
    if -5 < power < 6:
        return typeset(f"{value:.{max(0, digits - 1 - power)}f}")
    return typeset(scientific)


def threshold(value: float) -> str:
    """A round number as short as it can be."""
    return typeset(f"{value:g}")


def count(value: int) -> str:
    """A whole number, its thousands apart by narrow spaces."""
    return f"{value:,}".replace(",", "\u202f")


def percent(value: float) -> str:
    """A share as a percentage."""
    return f"{plain(100 * value)}\u202f%"


def sentence(text: str) -> str:
    """``text`` with a capital at its beginning and a full stop at its end."""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?", ":")) else ".")


@lru_cache(maxsize=65536)
def visible(text: str) -> str:
    """``text`` with nothing in it that cannot be seen: spaces at its ends, line breaks, controls.

    A token of nothing is ∅; a combining mark that comes first stands on a dotted circle; what has
    neither a shape nor a sign of its own is its number, ⟨U+202E⟩.
    """
    if not text:
        return "∅"
    alone = all(character in JOINERS for character in text)
    inner = "".join(_visible_character(character, alone) for character in text.strip(" "))
    if inner and unicodedata.category(inner[0]).startswith("M"):
        inner = "◌" + inner
    if not inner:
        return "␣" * len(text)
    left, right = len(text) - len(text.lstrip(" ")), len(text) - len(text.rstrip(" "))
    return "␣" * left + inner + "␣" * right


def _visible_character(character: str, alone: bool) -> str:
    if character in NAMED_CHARACTERS:
        return NAMED_CHARACTERS[character]
    if character == " " or (character in JOINERS and not alone):
        return character
    unseen = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zs", "Zl", "Zp")
    return f"⟨U+{ord(character):04X}⟩" if unseen else character


def ending(text: str, length: int = 24) -> str:
    """The end of a name, made visible: what tells two paths apart comes last."""
    kept = visible(text)
    return kept if len(kept) <= length else "…" + kept[1 - length :]


def excerpt(text: str, length: int = 240) -> str:
    """The beginning of ``text``, made visible, with … where something is left out."""
    kept = visible(text[:length])
    return kept if len(text) <= length else kept.rstrip("␣ ") + " …"


def command_line(job: Mapping[str, Any]) -> str:
    """The command that makes a measurement again."""
    return command_of(("kleash", "measure"), fields(MeasureJob), job)


def command_of(words: Sequence[str], options: Sequence[Field[Any]], job: Mapping[str, Any]) -> str:
    """A command with the options that are not the default's."""
    said = list(words)
    for option in options:
        value = job.get(option.name, option.default)
        if encode(value) == encode(option.default) or option.name == "resume":
            continue
        name = option.name.replace("_", "-")
        said.append(f"--no-{name}" if value is False else f"--{name}")
        if isinstance(value, (list, tuple)):
            said += [shlex.quote(str(one)) for one in value]
        elif not isinstance(value, bool):
            said.append(shlex.quote(str(value)))
    return " ".join(said)
