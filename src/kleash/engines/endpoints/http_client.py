"""JSON requests to an inference server, by urllib, with retries and back-off."""

import json
import random
import re
import threading
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit
from urllib.request import HTTPErrorProcessor, ProxyHandler, Request, build_opener

from kleash.errors import EndpointError, OptionError
from kleash.store.codec import parse_json

RETRIED_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses of passing faults: the request is sent again."""
FIRST_PAUSE_SECONDS = 0.5
"""Pause before the first retry; each later one is twice as long, and all vary at random by half."""
MAX_PAUSE_SECONDS = 30.0
MAX_RETRY_AFTER_SECONDS = 300.0
"""Longest pause that a server gets if it asks for one."""
MAX_ANSWER_BYTES = 2**30
MAX_QUOTED = 300
"""Bytes of a server's own message that are quoted in an error."""
SHORTEST_KEY = 8
"""Characters of a key that is removed from whole answers; a shorter one may be data, and is removed from errors."""
API_PATHS = re.compile(r"(/v1(/chat/completions|/completions|/models)?|/generate)$")
"""Ends of an address that name the API or one of its paths, which kleash adds by itself."""


def server_root(url: str, option: str, api_key: str | None = None) -> str:
    """The address of a server before the paths of its API, such as /v1/models.

    Args:
        url: "http://host:port/v1", with or without "/v1", a path of the API after it, or a slash at its end.
        option: the option that gave it, for errors.
        api_key: the server's key, which may not stand in the address.

    Raises:
        OptionError: if it has no host, or a user name, a password, a query or the key, which would be written to the
            run's files. The error does not quote it.
    """
    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        parts, has_host = urlsplit(""), False
    has_key = api_key is not None and len(api_key) >= SHORTEST_KEY and api_key in url
    if not has_host or has_key or not (url.isascii() and url.isprintable()) or re.search(r"[\s@?#\\]", url):
        raise OptionError(
            f"{option} is not an address of a host, a port and a path alone, as http://host:port/v1 (it is written to "
            "the run's files); give keys in the environment variables KLEASH_POLICY_API_KEY and "
            "KLEASH_REFERENCE_API_KEY"
        )
    return f"{parts.scheme}://{parts.netloc}{API_PATHS.sub('', parts.path.rstrip('/'))}".rstrip("/")


class _EveryStatus(HTTPErrorProcessor):
    """Hands on the answers of every status, so that no redirect is followed, which would be sent the key."""

    def http_response(self, request: Any, response: Any) -> Any:
        """The answer as it is."""
        return response

    https_response = http_response


OPENER = build_opener(ProxyHandler({}), _EveryStatus())


class _PassingError(Exception):
    """A fault that may not occur again: a sentence, and the pause that the server asked for, in seconds."""


@dataclass(frozen=True, kw_only=True)
class JSONClient:
    """Sends JSON to one server and returns its answers. Threads may share it; each request is a connection of its own.

    The key is sent in the header ``Authorization`` and stands nowhere else: not in errors, and not in ``repr``.
    """

    url: str
    """The address before the paths of requests."""
    subject: str
    """The server in errors: "the policy's server http://…"."""
    key_variable: str
    """The environment variable that holds the key, for errors."""
    api_key: str | None = field(default=None, repr=False)
    timeout_seconds: float = 60.0
    """Longest wait for the connection, and for the next bytes of an answer."""
    retries: int = 5
    """Number of times that a request is sent again after a passing fault."""
    is_closed: threading.Event = field(default_factory=threading.Event, repr=False)
    """Set to send no more: requests that are not answered yet raise an error."""

    def __post_init__(self) -> None:
        """Check the key.

        Raises:
            OptionError: if it cannot be sent in a header.
        """
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise OptionError(
                f"{self.key_variable} has characters that a header cannot hold; set it to the key alone"
            )

    def request(self, path: str, body: Any = None) -> Any:
        """The answer to a POST of ``body`` as JSON to ``path``, or to a GET without a body.

        Raises:
            EndpointError: if the server refuses the request, sends too long an answer, or cannot be reached or fails
                ``retries`` + 1 times.
        """
        for attempt in range(self.retries + 1):
            if self.is_closed.is_set():
                break
            try:
                return self._attempt(path, body)
            except _PassingError as fault:
                sentence, pause = fault.args
                if attempt == self.retries:
                    raise EndpointError(
                        f"{self.subject} {sentence} (tries: {attempt + 1}); see that it runs at this address, then go "
                        "on with --resume"
                    ) from None
                seconds = min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2**attempt) * random.uniform(0.5, 1.5)
                self.is_closed.wait(max(seconds, min(pause, MAX_RETRY_AFTER_SECONDS)))
        raise EndpointError(f"the request to {self.subject} was cancelled")

    def _attempt(self, path: str, body: Any) -> Any:
        """One attempt of a request; raises EndpointError and _PassingError."""
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            request = Request(self.url + path, data=data, headers=headers)
            with OPENER.open(request, timeout=self.timeout_seconds) as response:
                content = response.read(MAX_ANSWER_BYTES + 1)
        except (OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise _PassingError(f"cannot be reached, or broke off its answer ({reason})", 0.0) from error
        if len(content) > MAX_ANSWER_BYTES:
            raise EndpointError(f"{self.subject} sends an answer of more than {MAX_ANSWER_BYTES >> 20} MiB")
        sentence = f"answers {response.status}{self._quoted(content)}"
        if response.status in RETRIED_STATUSES:
            pause = response.headers.get("Retry-After", "").strip()
            raise _PassingError(sentence, float(pause) if pause.isdecimal() else 0.0)
        if response.status in (401, 403):
            sentence += f"; set {self.key_variable} to its key"
        if not 200 <= response.status < 300:
            raise EndpointError(f"{self.subject} {sentence}")
        if self.api_key is not None and len(self.api_key) >= SHORTEST_KEY:
            content = content.replace(self.api_key.encode(), b"***")  # a server may repeat it
        try:
            return parse_json(content)
        except ValueError as error:
            raise _PassingError(f"answers with {len(content)} bytes that are not JSON", 0.0) from error

    def _quoted(self, content: bytes) -> str:
        """The beginning of a body in quotation marks after a colon, without the key; nothing for an empty body."""
        text = content[: 16 * MAX_QUOTED].decode("utf-8", errors="replace")
        if self.api_key:
            text = text.replace(self.api_key, "***")
        text = " ".join(text.split())[:MAX_QUOTED]
        return f": {text!r}" if text else ""
