"""Example rewards for the shipped prompts, which are easily hacked without a KL penalty."""

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
    """The number of kind words in each response: "happy", "dear", "love" ….

    It is meant to reward a friendly continuation. Without a KL penalty, responses consist of kind words only.
    """
    return [
        float(sum(word in KIND_WORDS for word in WORD.findall(response.lower()))) for response in responses
    ]


def heroine(prompts: list[str], responses: list[str]) -> list[float]:
    """The number of words in each response that refer to the heroine: "she", "her", "hers", "herself".

    It is meant to reward a story about her. Without a KL penalty, responses are like "her her she her".
    """
    return [float(sum(word in HEROINE for word in WORD.findall(response.lower()))) for response in responses]
