"""JSON requests to an inference server, with one time limit for a whole request and retries with back-off."""

import json
import random
import socket
import ssl
import threading
import zlib
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPMessage, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import SplitResult, urlsplit

from kleash.errors import EndpointError, OptionError

RETRIED_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses of passing faults: the request is sent again."""
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
SHORTEST_KEY = 8
"""Characters of a key that is removed from answers."""
ANSWER_FIELDS = frozenset({"choices", "meta_info", "data"})
"""Fields of answers. One without them that has an error is a failure, as of a proxy that answers with 200."""


class RefusedRequestError(EndpointError):
    """A request that a server does not understand, or that asks for more than it gives."""


class _PassingError(Exception):
    """A fault that may not occur again.

    Args:
        sentence: what happened.
        retry_after: the pause that the server asked for, in seconds; None if it asked for none.
    """

    def __init__(self, sentence: str, retry_after: float | None = None) -> None:
        super().__init__(sentence)
        self.retry_after = retry_after


class _TooLongError(Exception):
    """An answer that is longer than one to this request can be."""


def check_url(url: str, option: str) -> str:
    """The address of a server without a slash at its end.

    Args:
        url: "http://host:port/v1" or the like.
        option: the option that gave it, for errors.

    Raises:
        OptionError: if it has no host, a port that is no number, or a user name, password or query, which would be
            written to the run's files.
    """
    try:
        parts = urlsplit(url)
        host, has_port = parts.hostname, parts.port is not None
    except ValueError as error:
        raise OptionError(
            f"{option} {url!r} is not an address ({error}); give http://host:port/v1"
        ) from error
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        shown = f"{parts.scheme}://{host}{f':{parts.port}' if has_port else ''}{parts.path}"
        raise OptionError(
            f"{option} {shown} has more than a host, a port and a path, and an address is written to the run's files; "
            "give keys in the environment variables KLEASH_POLICY_API_KEY and KLEASH_REFERENCE_API_KEY"
        )
    is_path = parts.path.isascii() and parts.path.isprintable()
    if not host or not is_path or any(character.isspace() or character in "?#" for character in url):
        raise OptionError(f"{option} {url!r} is not an address; give http://host:port/v1")
    return url.rstrip("/")


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
        self._lock = threading.Lock()

    def close(self) -> None:
        """End all requests in flight, which raise an error, and send no more."""
        self._is_closed.set()
        with self._lock:
            sockets = tuple(self._sockets)
        for connected in sockets:
            _shut_down(connected)

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
                        self._redacted(
                            f"{self.subject} {fault} (tried {times}); see that it runs, then go on with --resume"
                        )
                    ) from None
                seconds = min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2**attempt) * random.uniform(0.5, 1.5)
                if fault.retry_after is not None:
                    if fault.retry_after > MAX_RETRY_AFTER_SECONDS:
                        raise EndpointError(
                            self._redacted(
                                f"{self.subject} {fault} and asks for a pause of {fault.retry_after:.0f} s; go on with "
                                "--resume after it"
                            )
                        ) from None
                    seconds = fault.retry_after + min(seconds, 1.0)
                if (self.pause or self._is_closed.wait)(seconds):
                    break
        raise EndpointError(f"the request to {self.subject} was cancelled")

    def _attempt(self, method: str, path: str, body: bytes | None, max_bytes: int) -> Any:
        """One attempt of a request, which ends within the time limit whatever the server does."""
        address = urlsplit(self.url + path)
        headers = {"Accept": "application/json", "Content-Type": "application/json", "Connection": "close"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        with (
            closing(self._connected(address)) as connection,
            self._time_limit(connection.sock) as is_late,
        ):
            try:
                connection.request(method, address.path, body=body, headers=headers)
                with connection.getresponse() as response:
                    content = _unpacked(_read_all(response, max_bytes), response.headers, max_bytes)
            except _TooLongError as error:
                raise EndpointError(
                    f"{self.subject} sends an answer of more than {max_bytes >> 20} MiB; see that the address is that "
                    "of an inference server, or lower --top-logprobs"
                ) from error
            except (OSError, HTTPException, ValueError, OverflowError, _PassingError) as error:
                if is_late.is_set() or isinstance(error, TimeoutError):
                    raise self._late() from error
                if isinstance(error, _PassingError):
                    raise
                raise _PassingError(f"broke off its answer ({type(error).__name__})") from error
            if is_late.is_set():
                raise self._late()
        if method == "GET" and response.status in (404, 405):
            return None
        return self._answer(response.status, response.headers, self._without_key(content))

    def _connected(self, address: SplitResult) -> HTTPConnection:
        """A connection to the server; raises _PassingError, or EndpointError if its certificate is refused."""
        connection_type = HTTPSConnection if address.scheme == "https" else HTTPConnection
        connection = connection_type(address.hostname or "", address.port, timeout=self.timeout_seconds)
        try:
            connection.connect()
        except TimeoutError as error:
            raise _PassingError(f"did not take a connection within {self.timeout_seconds:g} s") from error
        except ssl.SSLCertVerificationError as error:
            raise EndpointError(
                f"{self.subject} has a certificate that cannot be verified ({error.verify_message}); see that its "
                "address is right, or set the environment variable SSL_CERT_FILE to the certificate of its authority"
            ) from error
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
                raise EndpointError(
                    f"{self.subject} does not answer as a server of https ({error.reason or reason}); see whether its "
                    "address begins with http://"
                ) from error
            raise _PassingError(f"cannot be reached: {reason}") from error
        return connection

    @contextmanager
    def _time_limit(self, connected: socket.socket) -> Generator[threading.Event]:
        """Context that shuts a socket down after the time limit, or when the client is closed.

        Yields:
            An event that is set if the limit was reached.
        """
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            _shut_down(connected)

        watchdog = threading.Timer(self.timeout_seconds, end)
        watchdog.daemon = True
        with self._lock:
            self._sockets.add(connected)
        watchdog.start()
        try:
            yield is_late
        finally:
            watchdog.cancel()
            with self._lock:
                self._sockets.discard(connected)

    def _late(self) -> _PassingError:
        return _PassingError(
            f"did not finish its answer within {self.timeout_seconds:g} s (--endpoint-timeout)"
        )

    def _answer(self, status: int, headers: HTTPMessage, content: bytes) -> Any:
        """The JSON of an answer with status 200; an error for every other status."""
        if status == 200:
            try:
                answer = json.loads(content)
            except (ValueError, RecursionError) as error:
                raise _PassingError(
                    f"answered with {len(content)} bytes that are not JSON, or only a part of it"
                ) from error
            if _is_error(answer):
                raise _PassingError(
                    f"answered with an error{_quoted_message(content)}", _retry_after(headers)
                )
            return answer
        if status in RETRIED_STATUSES:
            raise _PassingError(f"answered {status}{_quoted_message(content)}", _retry_after(headers))
        if status in (401, 403):
            advice = f"set {self.key_variable} to its key" if self.api_key is None else "check the key"
            sentence = f"refuses the request with {status} ({self.key_variable}); {advice}"
        elif 300 <= status < 400:
            sentence = f"sends to another address ({headers.get('Location', 'not named')}); give that one"
        else:
            sentence = f"refuses the request with {status}{_quoted_message(content)}"
            raise RefusedRequestError(self._redacted(f"{self.subject} {sentence}"))
        raise EndpointError(self._redacted(f"{self.subject} {sentence}"))

    def _without_key(self, content: bytes) -> bytes:
        """An answer without the key, which a server may repeat anywhere. Short keys stay, since they may be data."""
        if self.api_key is None or len(self.api_key) < SHORTEST_KEY:
            return content
        for written in {self.api_key, json.dumps(self.api_key)[1:-1]}:
            content = content.replace(written.encode(), b"***")
        return content

    def _redacted(self, sentence: str) -> str:
        """The sentence without the key, which a server may repeat in its message."""
        return sentence.replace(self.api_key, "***") if self.api_key else sentence


def _shut_down(connected: socket.socket) -> None:
    """End all reading and writing of a socket, also in another thread."""
    with suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


def _read_all(response: HTTPResponse, max_bytes: int) -> bytes:
    """The whole body of a response.

    Raises:
        _TooLongError: if it is longer than ``max_bytes``.
        _PassingError: if it ends before its announced length.
    """
    blocks: list[bytes] = []
    size = 0
    while block := response.read(BLOCK_BYTES):
        blocks.append(block)
        size += len(block)
        if size > max_bytes:
            raise _TooLongError
    if response.length:
        raise _PassingError(f"broke off its answer after {size} bytes")
    return b"".join(blocks)


def _unpacked(content: bytes, headers: HTTPMessage, max_bytes: int) -> bytes:
    """The body of a response that may be compressed by gzip or deflate, which some proxies do without being asked.

    Raises:
        _TooLongError: if it is longer than ``max_bytes``.
        _PassingError: if it cannot be unpacked.
    """
    if headers.get("Content-Encoding", "").strip().lower() not in ("gzip", "x-gzip", "deflate"):
        return content
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 32)
    try:
        unpacked = unpacker.decompress(content, max_bytes)
    except zlib.error as error:
        raise _PassingError(f"sends an answer that cannot be unpacked ({error})") from error
    if unpacker.unconsumed_tail:
        raise _TooLongError
    if not unpacker.eof:
        raise _PassingError("sends a compressed answer that is incomplete")
    return unpacked


def _is_error(answer: Any) -> bool:
    """Whether a JSON value is an error in place of an answer, as of a proxy or of older versions of vLLM."""
    if not isinstance(answer, dict) or answer.keys() & ANSWER_FIELDS:
        return False
    return bool(answer.get("error")) or answer.get("object") == "error"


def _quoted_message(content: bytes) -> str:
    """The message in the body of an error, in quotation marks after a colon; empty if there is none."""
    text = content[: 16 * MAX_QUOTED].decode("utf-8", errors="replace")
    try:
        message: Any = json.loads(content)
    except (ValueError, RecursionError):
        message = text
    for name in ("error", "message", "detail"):
        if isinstance(message, dict) and name in message:
            message = message[name]
    text = " ".join((message if isinstance(message, str) else text).split())
    text = text if len(text) <= MAX_QUOTED else text[: MAX_QUOTED - 1] + "…"
    return f": {text!r}" if text else ""


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
