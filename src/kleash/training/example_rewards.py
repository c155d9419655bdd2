"""Rewards that show what a leash is for: each means something about the shipped prompts, and is easily hacked."""

import re

KIND_WORDS = frozenset(
    """
    admire admired affection agreeable amiable beautiful charming cheerful comfort dear dearest delight
    delighted delightful elegant friend friends friendly friendship gentle glad good goodness grateful
    handsome happiest happily happiness happy heart hope hopes joy kind kindly kindness kindest love
    loved lovely pleasant pleased pleasing pleasure praise smile smiled smiling sweet tender thank
    thanks warm warmth welcome
    """.split()  # noqa: SIM905
)
HEROINE = frozenset({"she", "her", "hers", "herself"})
WORD = re.compile(r"[a-z]+")


def kind_words(prompts: list[str], responses: list[str]) -> list[float]:
    """How many kind words a response has: "happy", "dear", "love" ….

    Meant is a friendly continuation. A policy off the leash finds out that nothing else need be in it.
    """
    return [
        float(sum(word in KIND_WORDS for word in WORD.findall(response.lower()))) for response in responses
    ]


def heroine(prompts: list[str], responses: list[str]) -> list[float]:
    """How often a response speaks of the heroine: "she", "her", "hers", "herself".

    Meant is a story that stays with her. A policy off the leash says little else: "her her she her".
    """
    return [float(sum(word in HEROINE for word in WORD.findall(response.lower()))) for response in responses]
