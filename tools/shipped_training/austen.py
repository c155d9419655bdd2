"""Jane Austen's six novels, from Debian's package r-cran-janeaustenr to clean paragraphs, prompts and documents."""

import hashlib
import re
import struct
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path
from random import Random

PACKAGE = "r-cran-janeaustenr"
DATABASE = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
DATABASE_SHA256 = "8fb5198960d0da724b1562f96e4221e5c1b41ff455000280b02c55980c3d8f21"
NOVELS = ("emma", "mansfieldpark", "northangerabbey", "persuasion", "prideprejudice", "sensesensibility")
"""The order in which the package stores them."""

CHAPTER = re.compile(r"chapter [ivxlc\d]+\.?", re.IGNORECASE)
NOT_PROSE = re.compile(r"(volume [ivx]+|\(?end of .*|finis|the end)[.)]*", re.IGNORECASE)
AFTERWORD = "A NOTE ON THE TEXT"
"""An editor's note, not Austen's, that follows Northanger Abbey."""

HELD_OUT_OF, HELD_OUT_AT = 12, 5
"""Chapters number 5, 17, 29, ... of every novel, counted from 0, are never trained on."""

FEWEST_WORDS, MOST_WORDS = 8, 24
TEXT_BYTES = 140_000
ABBREVIATED = re.compile(r"\"?(Mr|Mrs|Dr|St|Esq)\.")

STRING_VECTOR, STRING = 16, 9


def download(folder: Path) -> Path:
    """Fetch and unpack the Debian package into ``folder``; the file with the six novels."""
    subprocess.run(["apt-get", "download", PACKAGE], cwd=folder, check=True)
    (archive,) = folder.glob(f"{PACKAGE}_*.deb")
    subprocess.run(["dpkg", "-x", archive, folder], check=True)
    database = folder / DATABASE
    digest = hashlib.sha256(database.read_bytes()).hexdigest()
    if digest != DATABASE_SHA256:
        raise SystemExit(f"{archive.name} holds other text than the pair was made from: {digest}")
    return database


def novels(database: bytes) -> dict[str, list[str]]:
    """The lines of each novel, out of R's lazy-load database.

    The database is a row of blocks: four bytes of length, then a zlib stream of one serialised object.
    """
    lines: dict[str, list[str]] = {}
    for name in NOVELS:
        stream = zlib.decompressobj()
        lines[name] = character_vector(stream.decompress(database[4:]))
        database = stream.unused_data
    return lines


def character_vector(serialised: bytes) -> list[str]:
    """An R character vector, from the binary (XDR) serialisation, version 3, that R wrote it in."""
    (version,) = struct.unpack_from(">i", serialised, 2)
    if serialised[:2] != b"X\n" or version != 3:
        raise ValueError(f"not an R serialisation of version 3: it begins with {serialised[:6]!r}")
    (encoding,) = struct.unpack_from(">i", serialised, 14)
    at = 18 + encoding
    flags, count = struct.unpack_from(">Ii", serialised, at)
    if flags & 0xFF != STRING_VECTOR:
        raise ValueError(f"R object of type {flags & 0xFF} where a character vector (16) was expected")
    at += 8
    strings: list[str] = []
    for _ in range(count):
        flags, length = struct.unpack_from(">Ii", serialised, at)
        if flags & 0xFF != STRING:
            raise ValueError(f"R object of type {flags & 0xFF} where a string (9) was expected")
        strings.append(serialised[at + 8 : at + 8 + length].decode("utf-8"))
        at += 8 + length
    return strings


def chapters(lines: list[str]) -> list[list[str]]:
    """The chapters of a novel as lists of paragraphs, each a single line, without headings and end matter."""
    result: list[list[str]] = []
    for block in re.split(r"\n\s*\n", "\n".join(lines)):
        paragraph = " ".join(block.replace("_", "").split())
        if paragraph == AFTERWORD:
            break
        if CHAPTER.fullmatch(paragraph):
            result.append([])
        elif result and re.search(r"\w", paragraph) and not NOT_PROSE.fullmatch(paragraph):
            result[-1].append(paragraph)
    return result


def split(chapters_of_a_novel: list[list[str]]) -> tuple[list[list[str]], list[list[str]]]:
    """The chapters to train on, and those held out."""
    training, held_out = [], []
    for number, chapter in enumerate(chapters_of_a_novel):
        (held_out if number % HELD_OUT_OF == HELD_OUT_AT else training).append(chapter)
    return training, held_out


def documents(paragraphs: list[str], draw: Random, low: int, high: int) -> Iterator[str]:
    """Consecutive paragraphs joined to documents of at least a random number of characters, ``low`` to ``high``."""
    group: list[str] = []
    length = draw.randint(low, high)
    for paragraph in paragraphs:
        group.append(paragraph)
        if sum(map(len, group)) >= length:
            yield "\n".join(group)
            group, length = [], draw.randint(low, high)
    if group:
        yield "\n".join(group)


def opening(paragraph: str, draw: Random) -> str:
    """The first words of a paragraph, up to a random punctuation mark among words 8 to 24 if there is one."""
    words = paragraph.split()
    stops = [
        count
        for count in range(FEWEST_WORDS, MOST_WORDS + 1)
        if re.search(r"[.!?;,]\"?$", words[count - 1]) and not ABBREVIATED.fullmatch(words[count - 1])
    ]
    return " ".join(words[: draw.choice(stops or [(FEWEST_WORDS + MOST_WORDS) // 2])])


def prompts(novels: dict[str, list[list[str]]], seed: str, per_novel: int) -> list[str]:
    """Openings of long paragraphs, as many from every novel."""
    draw = Random(f"prompts/{seed}")
    openings: list[str] = []
    for chapters in novels.values():
        long = [text for chapter in chapters for text in chapter if len(text.split()) >= 2 * MOST_WORDS]
        chosen = sorted(draw.sample(range(len(long)), per_novel))
        openings.extend(opening(long[at], draw) for at in chosen)
    return openings


def texts(novels: dict[str, list[list[str]]], seed: str, shortest: int, longest: int) -> list[str]:
    """Random documents from all novels, in their order, up to :data:`TEXT_BYTES` in total."""
    draw = Random(f"text/{seed}")
    chapters = [chapter for chapters in novels.values() for chapter in chapters]
    cut = [text for chapter in chapters for text in documents(chapter, draw, shortest, longest)]
    order = list(range(len(cut)))
    draw.shuffle(order)
    taken, size = [], 0
    for at in order:
        size += len(cut[at].encode())
        if size > TEXT_BYTES:
            break
        taken.append(at)
    return [cut[at] for at in sorted(taken)]
