"""An example reward for the shipped prompts, which is easily hacked without a KL penalty."""

import re

HEROINE = frozenset({"she", "her", "hers", "herself"})
WORD = re.compile(r"[a-z]+")


def heroine(prompts: list[str], responses: list[str]) -> list[float]:
    """The number of words in each response that refer to the heroine: "she", "her", "hers", "herself".

    It is meant to reward a story about her. Without a KL penalty, responses are like "her her she her".
    """
    return [float(sum(word in HEROINE for word in WORD.findall(response.lower()))) for response in responses]
