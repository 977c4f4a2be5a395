"""Who may ask: the hosts, origins and keys that a server takes.

A page of another site that a browser shows must not reach a server on this machine, nor by a name
that is made to lead here (DNS rebinding): such a request names its own site. So a request must name
the server by an address, by `localhost` or by a name that it was told, and a page only its own
origin. Keys are compared in constant time. Knows headers and files of keys; knows no routes.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from edgespec.errors import OptionError, RequestError
from edgespec.safe_read.regular import open_regular
from edgespec.serve.errors import Refusal

MIN_KEY_CHARS = 16
MAX_KEY_FILE_BYTES = 2**20


class Guard:
    """`hosts` are further names of the server; without `keys` everybody may ask who reaches it."""

    def __init__(self, hosts: Sequence[str] = (), keys: Sequence[str] = ()) -> None:
        own = (*hosts, "localhost", socket.gethostname())
        self.hosts = frozenset(name.lower() for name in own)
        self.keys = tuple(digest(key) for key in keys)

    def check(self, scheme: str, headers: Mapping[str, str]) -> None:
        """Raises Refusal for a request of another site, or without a key."""
        host = headers.get("host", "")
        if not self.knows(host):
            message = "The Host header names another server."
            raise Refusal(403, f"{message} Add the name by `allowed_host`.", code="unknown_host")
        origin = headers.get("origin")
        if origin is not None and origin.lower() != f"{scheme}://{host}".lower():
            raise Refusal(403, "Pages of other sites may not ask.", code="unknown_origin")
        if self.keys and not self.has_key(headers):
            message = "The key is missing or wrong: send `Authorization: Bearer KEY`."
            raise Refusal(401, message, code="invalid_api_key")

    def knows(self, host: str) -> bool:
        """Whether a Host header names this server: by an address, or by a name that it has."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return name in self.hosts or is_address(name)

    def has_key(self, headers: Mapping[str, str]) -> bool:
        """Whether a request has one of the keys; how long that takes says nothing of them."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip()
        if scheme.lower() == "basic":  # a browser's own dialog: the key is the password
            given = password_of(given)
        elif scheme.lower() != "bearer":
            given = headers.get("x-api-key", "")
        sent = digest(given)
        return sum(hmac.compare_digest(sent, key) for key in self.keys) > 0  # all are compared


def password_of(credentials: str) -> str:
    """The password of HTTP's Basic scheme (RFC 7617); empty for what is none."""
    try:
        return base64.b64decode(credentials, validate=True).decode().partition(":")[2]
    except ValueError:
        return ""


def digest(key: str) -> bytes:
    """What is compared of a key: of one length, whatever the key's."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def is_address(name: str) -> bool:
    """Whether a name is an IP address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether an address to listen at is reached from this machine alone."""
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def check_exposure(host: str, keys: Sequence[str]) -> None:
    """Raises OptionError for an address that others reach, where anybody could ask."""
    if not is_loopback(host) and not keys:
        message = f"`host` {host} is reached from other machines, and there are no keys"
        raise OptionError(message, "Name a file with a key a line: `api_key_file`.")


def read_keys(path: Path) -> tuple[str, ...]:
    """The keys of a file, one a line. Raises RequestError for a file without one, and for a key
    that could be guessed."""
    try:
        with open_regular(path) as file:
            data = file.read(MAX_KEY_FILE_BYTES)
        keys = tuple(line.strip() for line in data.decode("ascii").splitlines() if line.strip())
    except (OSError, ValueError) as error:
        why = (error.strerror or "no text file") if isinstance(error, OSError) else "not ASCII"
        message = f"`api_key_file` {path} cannot be read: {why}"
        raise RequestError(message, "Name a text file with a key a line.") from None
    if not keys or any(len(key) < MIN_KEY_CHARS for key in keys):
        message = f"`api_key_file` {path} has no key, or one below {MIN_KEY_CHARS} characters"
        raise RequestError(message, "Make keys by: openssl rand -hex 24.")
    return keys
