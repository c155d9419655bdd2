"""Prompts and documents, cut from chapters."""

import re
from random import Random

from shipped_training import austen

FEWEST_WORDS, MOST_WORDS = 8, 24
TEXT_BYTES = 140_000
ABBREVIATED = re.compile(r"\"?(Mr|Mrs|Dr|St|Esq)\.")


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
    cut = [text for chapter in chapters for text in austen.documents(chapter, draw, shortest, longest)]
    order = list(range(len(cut)))
    draw.shuffle(order)
    taken, size = [], 0
    for at in order:
        size += len(cut[at].encode())
        if size > TEXT_BYTES:
            break
        taken.append(at)
    return [cut[at] for at in sorted(taken)]
