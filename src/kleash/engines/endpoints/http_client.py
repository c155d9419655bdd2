"""JSON requests to an inference server, with one time limit for a whole request and retries with back-off."""

import json
import random
import re
import socket
import ssl
import threading
import zlib
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from http.client import (
    HTTPConnection,
    HTTPException,
    HTTPMessage,
    HTTPResponse,
    HTTPSConnection,
    IncompleteRead,
)
from math import inf
from time import monotonic
from types import MappingProxyType
from typing import Any
from urllib.parse import SplitResult, quote, urlsplit

from kleash.engines.endpoints.addresses import SHORTEST_KEY
from kleash.errors import EndpointError, OptionError

RETRIED_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses of passing faults: the request is sent again."""
REFUSAL_ADVICE: Mapping[int, str] = MappingProxyType(
    {
        **dict.fromkeys(
            (400, 413, 422), "; a smaller --top-logprobs or --window, or shorter responses, ask for less"
        ),
        **dict.fromkeys(
            (404, 405), "; see that its address is right, and that it serves completions of the model"
        ),
    }
)
FIRST_PAUSE_SECONDS = 0.5
"""Pause before the first retry; each later one is twice as long, and all vary at random by half."""
MAX_PAUSE_SECONDS = 30.0
MAX_RETRY_AFTER_SECONDS = 300.0
"""A server that asks for a longer pause ends the run, which can be resumed later."""
MAX_ANSWER_BYTES = 2**24
"""Of an answer whose length does not depend on the request."""
MAX_QUOTED = 300
"""Characters of a server's own message that are quoted in an error."""
BLOCK_BYTES = 2**16
ADVICE = (
    "see that it runs, and that its address is that of the API, as in http://host:port/v1 or https://host/v1"
)
COMPRESSIONS = ("gzip", "x-gzip", "deflate")
"""Encodings of answers that are unpacked; some proxies compress without being asked."""
ANSWER_FIELDS = frozenset({"choices", "meta_info", "data"})
"""Fields of answers. One without them that has an error is a failure, as of a proxy that answers with 200."""


class RefusedRequestError(EndpointError):
    """A request that a server does not understand, or that asks for more than it gives."""

    advice: str = ""
    """What may help, after a semicolon; empty if the server's own message has to say it."""


class _PassingError(Exception):
    """A fault that may not occur again.

    Args:
        sentence: what happened.
        retry_after: the pause that the server asked for, in seconds; None if it asked for none.
    """

    def __init__(self, sentence: str, retry_after: float | None = None) -> None:
        super().__init__(sentence)
        self.retry_after = retry_after


@dataclass(kw_only=True)
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
    """Time limit of a request, from the connection to the last byte of the answer."""
    retries: int = 5
    """Number of times that a request is sent again after a passing fault."""
    pause: Callable[[float], bool] | None = None
    """Waits for a number of seconds; true if the client was closed meanwhile. None is the client's own."""

    def __post_init__(self) -> None:
        """Prepare the state that threads share.

        Raises:
            OptionError: if the key cannot be sent in a header.
        """
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise OptionError(
                f"{self.key_variable} has characters that a header cannot hold; set it to the key alone"
            )
        self._is_closed = threading.Event()
        self._sockets: set[socket.socket] = set()

    def close(self) -> None:
        """End all requests in flight, which raise an error, and send no more."""
        self._is_closed.set()
        for connected in tuple(self._sockets):
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)

    def get(self, path: str) -> Any:
        """The answer to a GET of ``path``; None if the server has no such path.

        Raises:
            EndpointError: as ``post``.
        """
        return self._request("GET", path, None)

    def post(self, path: str, body: Any, *, max_bytes: int = MAX_ANSWER_BYTES) -> Any:
        """The answer to a POST of ``body`` as JSON to ``path``, of at most ``max_bytes``.

        Raises:
            EndpointError: if the server cannot be reached, refuses the request, sends a longer answer, or fails
                ``retries`` + 1 times.
        """
        return self._request("POST", path, json.dumps(body).encode(), max_bytes)

    def _request(self, method: str, path: str, body: bytes | None, max_bytes: int = MAX_ANSWER_BYTES) -> Any:
        for attempt in range(self.retries + 1):
            if self._is_closed.is_set():
                break
            try:
                return self._attempt(method, path, body, max_bytes)
            except _PassingError as fault:
                if self._is_closed.is_set():
                    break
                if attempt == self.retries:
                    times = "once" if attempt == 0 else f"{attempt + 1} times"
                    raise EndpointError(
                        f"{self.subject} {fault} (tried {times}); {ADVICE}, then go on with --resume"
                    ) from None
                seconds = min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2**attempt) * random.uniform(0.5, 1.5)
                if fault.retry_after is not None:
                    if fault.retry_after > MAX_RETRY_AFTER_SECONDS:
                        raise EndpointError(
                            f"{self.subject} {fault} and asks for a pause of {fault.retry_after:.0f} s; go on with "
                            "--resume after it"
                        ) from None
                    seconds = fault.retry_after + min(seconds, 1.0)
                if (self.pause or self._is_closed.wait)(seconds):
                    break
        raise EndpointError(f"the request to {self.subject} was cancelled")

    def _attempt(self, method: str, path: str, body: bytes | None, max_bytes: int) -> Any:
        """One attempt of a request; the answer may take as long as the time limit."""
        address = urlsplit(self.url + path)
        headers = {"Accept": "application/json", "Content-Type": "application/json", "Connection": "close"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        deadline = monotonic() + self.timeout_seconds
        with closing(self._connected(address)) as connection:
            connected = connection.sock
            self._sockets.add(connected)
            try:
                connection.request(method, address.path, body=body, headers=headers)
                with connection.getresponse() as response:
                    content = self._read_all(response, max_bytes, deadline)
            except EndpointError:
                raise
            except TimeoutError as error:
                raise _PassingError(
                    f"did not finish its answer within {self.timeout_seconds:g} s (--endpoint-timeout)"
                ) from error
            except (OSError, HTTPException, ValueError, OverflowError, zlib.error) as error:
                raise _PassingError(f"broke off its answer ({type(error).__name__})") from error
            finally:
                self._sockets.discard(connected)
        if method == "GET" and response.status in (404, 405):
            return None
        return self._answer(response.status, response.headers, self._without_key(content))

    def _connected(self, address: SplitResult) -> HTTPConnection:
        """A connection to the server; raises _PassingError, or EndpointError if it does not speak https."""
        connection_type = HTTPSConnection if address.scheme == "https" else HTTPConnection
        connection = connection_type(address.hostname or "", address.port, timeout=self.timeout_seconds)
        try:
            connection.connect()
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
                raise EndpointError(
                    f"{self.subject} does not answer as a server of https that is trusted here ({reason}); see whether "
                    "its address begins with http://, or set the environment variable SSL_CERT_FILE to the certificate "
                    "of its authority"
                ) from error
            raise _PassingError(
                f"cannot be reached: {reason} (proxies of the environment are not used)"
            ) from error
        return connection

    def _read_all(self, response: HTTPResponse, max_bytes: int, deadline: float) -> bytes:
        """The whole body of a response, unpacked.

        Raises:
            EndpointError: if it is longer than ``max_bytes``.
            IncompleteRead: if it ends before its announced length.
            TimeoutError: if it has not ended at ``deadline``.
            zlib.error: if it cannot be unpacked.
        """
        announced, content = response.length, bytearray()
        while len(content) < (inf if announced is None else announced):
            block = response.read1(BLOCK_BYTES)  # what has arrived
            if not block:
                break
            content += block
            self._require_length(len(content), max_bytes)
            if monotonic() > deadline:
                raise TimeoutError
        if len(content) < (announced or 0):
            raise IncompleteRead(bytes(content))
        if response.headers.get("Content-Encoding", "").strip().lower() not in COMPRESSIONS:
            return bytes(content)
        unpacker = zlib.decompressobj(zlib.MAX_WBITS | 32)
        unpacked = unpacker.decompress(content, max_bytes + 1)
        self._require_length(len(unpacked), max_bytes)
        if not unpacker.eof:
            raise IncompleteRead(unpacked)
        return unpacked

    def _require_length(self, size: int, max_bytes: int) -> None:
        """Raise EndpointError for an answer that is longer than one to this request can be."""
        if size > max_bytes:
            raise EndpointError(
                f"{self.subject} sends an answer of more than {max_bytes >> 20} MiB; see that the address is that "
                "of an inference server, or lower --top-logprobs"
            )

    def _answer(self, status: int, headers: HTTPMessage, content: bytes) -> Any:
        """The JSON of an answer with a status of success; an error for every other status."""
        if 200 <= status < 300:
            try:
                answer = json.loads(content)
            except (ValueError, RecursionError) as error:
                raise _PassingError(
                    f"answered with {len(content)} bytes that are not JSON, or only a part of it"
                ) from error
            if _is_error(answer):
                raise _PassingError(f"answered with an error{self._quoted(content)}", _retry_after(headers))
            return answer
        if status in RETRIED_STATUSES:
            raise _PassingError(f"answered {status}{self._quoted(content)}", _retry_after(headers))
        if status in (401, 403):
            advice = f"set {self.key_variable} to its key" if self.api_key is None else "check the key"
            sentence = f"refuses the request with {status} ({self.key_variable}); {advice}"
        elif 300 <= status < 400:
            location = self._redacted(headers.get("Location", "not named"))
            sentence = f"sends to another address ({location}); give that one"
        else:
            sentence = f"refuses the request with {status}{self._quoted(content)}"
            refusal = RefusedRequestError(f"{self.subject} {sentence}")
            refusal.advice = REFUSAL_ADVICE.get(status, "")
            raise refusal
        raise EndpointError(f"{self.subject} {sentence}")

    def _without_key(self, content: bytes) -> bytes:
        """An answer without the key, which a server may repeat anywhere. Short keys stay, since they may be data."""
        for written in self._long_key_forms():
            content = content.replace(written.encode(), b"***")
        return content

    def _long_key_forms(self) -> set[str]:
        """The key as it may stand in JSON, in an address or by itself; empty for a short key."""
        if self.api_key is None or len(self.api_key) < SHORTEST_KEY:
            return set()
        return {self.api_key, json.dumps(self.api_key)[1:-1], quote(self.api_key, safe="")}

    def _quoted(self, content: bytes) -> str:
        """The message in the body of an error, without the key, in quotation marks after a colon; or an empty text."""
        message = self._redacted(_message(content))
        message = message if len(message) <= MAX_QUOTED else message[: MAX_QUOTED - 1] + "…"
        return f": {message!r}" if message else ""

    def _redacted(self, text: str) -> str:
        """A server's text without the key, which it may repeat; a short key is removed where it stands as a word."""
        if not self.api_key:
            return text
        for written in self._long_key_forms():
            text = text.replace(written, "***")
        return re.sub(rf"(?<!\w){re.escape(self.api_key)}(?!\w)", "***", text)


def _is_error(answer: Any) -> bool:
    """Whether a JSON value is an error in place of an answer, as of a proxy or of older versions of vLLM."""
    if not isinstance(answer, dict) or answer.keys() & ANSWER_FIELDS:
        return False
    return bool(answer.get("error")) or answer.get("object") == "error"


def _message(content: bytes) -> str:
    """The message in the body of an error, in one line; empty if there is none."""
    text = content[: 16 * MAX_QUOTED].decode("utf-8", errors="replace")
    try:
        message: Any = json.loads(content)
    except (ValueError, RecursionError):
        message = text
    for name in ("error", "message", "detail"):
        if isinstance(message, dict) and name in message:
            message = message[name]
    return " ".join((message if isinstance(message, str) else text).split())


def _retry_after(headers: HTTPMessage) -> float | None:
    """The pause in the header ``Retry-After``, in seconds or as a date; None if there is none that can be read."""
    value = headers.get("Retry-After", "").strip()
    if value.isdecimal():
        return float(value)
    try:
        moment = parsedate_to_datetime(value)
        return max(0.0, (moment - datetime.now(timezone.utc)).total_seconds())
    except (ValueError, TypeError):
        return None
