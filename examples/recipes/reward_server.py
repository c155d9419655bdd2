"""A reward that a server computes: ``REWARD_SERVER=http://… kleash train grpo … --reward reward_server:judged``.

The server is sent {"prompts": […], "responses": […], and each column of the prompts' file: […]} and answers
{"rewards": […]}, a number for each response. A server that fails ends the run with its error.
"""

import json
import os
from typing import Any
from urllib.request import Request, urlopen


def judged(prompts: list[str], responses: list[str], **columns: list[Any]) -> list[float]:
    """The server's reward of each response."""
    body = json.dumps({"prompts": prompts, "responses": responses, **columns}).encode()
    request = Request(os.environ["REWARD_SERVER"], body, {"Content-Type": "application/json"})
    with urlopen(request, timeout=60) as answer:
        return json.load(answer)["rewards"]
