"""Addresses of inference servers, as users give them."""

import ipaddress
import re
from urllib.parse import SplitResult, urlsplit

from kleash.errors import OptionError

ADDRESS_ADVICE = "give http://host:port/v1"
KEY_ADVICE = "give keys in the environment variables KLEASH_POLICY_API_KEY and KLEASH_REFERENCE_API_KEY"
SHORTEST_KEY = 8
"""Characters of a key that is looked for in addresses, and is removed from answers."""
API_PATHS = re.compile(r"(/v1(/chat/completions|/completions|/models)?|/generate)$")
"""Ends of an address that name the API or one of its paths, which kleash adds by itself."""
HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
"""A host's name or IPv4 address, in ASCII."""


def server_root(url: str, option: str, api_key: str | None = None) -> str:
    """The address of a server before the paths of its API, such as /v1/models.

    Args:
        url: "http://host:port/v1", with or without "/v1", a path of the API after it, or a slash at its end.
        option: the option that gave it, for errors.
        api_key: the server's key, which may not stand in the address.

    Raises:
        OptionError: if it has no host or a port that is no number; or if it has a user name, a password, a query or
            the key, which would be written to the run's files. The error does not have them.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        if "@" in url:  # a password with "/", "?" or "#" is cut there, and its beginning taken for the port
            raise OptionError(
                f"{option} is an address with '@', which is for a password; {KEY_ADVICE}"
            ) from None
        brackets = "; an IPv6 address stands in brackets" if "::" in url and "[" not in url else ""
        raise OptionError(
            f"{option} {url!r} is not an address ({error}{brackets}); {ADDRESS_ADVICE}"
        ) from error
    if "@" in url or parts.query or parts.fragment:
        raise OptionError(
            f"{option} {_without_credentials(parts)} has more than a host, a port and a path, and an address is "
            f"written to the run's files; {KEY_ADVICE}"
        )
    if api_key is not None and len(api_key) >= SHORTEST_KEY and api_key in url:
        raise OptionError(
            f"{option} has the key in its address, which is written to the run's files; take it out, since it is sent "
            "in a header"
        )
    if not host or any(character.isspace() or character in "?#\\" for character in url):
        raise OptionError(f"{option} {url!r} is not an address; {ADDRESS_ADVICE}")
    if not (parts.path.isascii() and parts.path.isprintable()):
        raise OptionError(
            f"{option} {url!r} is not an address: its path has characters that have to be written as %XX"
        )
    if not _is_host(host):
        raise OptionError(f"{option} {url!r} is not an address ({host!r} is no host); {ADDRESS_ADVICE}")
    if port == 0 or parts.netloc.endswith(":"):
        raise OptionError(f"{option} {url!r} is not an address (it has no port after ':'); {ADDRESS_ADVICE}")
    return f"{parts.scheme}://{parts.netloc}{API_PATHS.sub('', parts.path.rstrip('/'))}".rstrip("/")


def _without_credentials(parts: SplitResult) -> str:
    """An address for an error, with an ellipsis for what may be a part of a password."""
    host = parts.netloc.rpartition("@")[2]
    rest = parts.path + parts.query + parts.fragment
    return f"{parts.scheme}://{'…' if '@' in rest else host + parts.path}"


def _is_host(host: str) -> bool:
    """Whether a text can be the name or the IP address of a host."""
    if ":" in host:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            return False
        return True
    try:
        return HOST_NAME.fullmatch(host.encode("idna").decode()) is not None
    except UnicodeError:  # an empty or a long label
        return False
