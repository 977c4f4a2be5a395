"""Images behind http(s) URLs, fetched from public addresses alone.

A URL of a stranger must not reach what this machine alone can reach. So its host is resolved once,
each address is checked, and the connection goes to the address that was checked. No proxy is used,
no redirect leaves the host, and time and bytes are limited. Knows HTTP by the standard library.
"""

from __future__ import annotations

import http.client
import ipaddress
import queue
import re
import socket
import ssl
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

from edgespec.errors import RequestError

MAX_REDIRECTS = 3
REDIRECTS = (301, 302, 303, 307, 308)
CHUNK_BYTES = 64 * 2**10
HEADERS = {
    "User-Agent": "edgespec",
    "Accept": "image/*",
    "Accept-Encoding": "identity",  # what is compressed could grow without limit
    "Connection": "close",
}
PORTS = {"http": 80, "https": 443}
HOST = re.compile(r"[a-zA-Z0-9.-]+|[0-9a-fA-F:.]+")  # a name, or an address of IPv6
SAVE_IT = "Save the image in `image_root`, and write its path."
# An address of IPv4 inside one of IPv6 (RFC 6052); of mapped ones `ipaddress` knows
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
INTERNET_V6 = ipaddress.IPv6Network("2000::/3")  # all that was given out so far (RFC 4291)
ISATAP = frozenset((0x0000_5EFE, 0x0200_5EFE))  # before the IPv4 address in one, RFC 5214


@dataclass(frozen=True, slots=True)
class UrlTarget:
    """A URL in the only reading that is used: of the check and of the connection alike."""

    scheme: str
    host: str
    port: int
    path: str  # with the query


def fetch(url: str, shown: str, max_bytes: int, timeout_s: float) -> bytes:
    """The bytes behind a URL, one more than `max_bytes` at most. `shown` is its name in messages.

    Raises RequestError for a host on a private network, for a redirect to another host, and for an
    answer that is none, too late or not an image file as it is. `timeout_s` is for all of it, the
    look-up of the host's name included.
    """
    deadline = time.monotonic() + timeout_s
    target = read_url(url, shown)
    for _ in range(1 + MAX_REDIRECTS):
        answer = _get(target, shown, max_bytes, deadline)
        if isinstance(answer, bytes):
            return answer
        following = _following(target, answer, shown)
        if not (_is_same(target, following) or _is_secured(target, following)):
            raise RequestError(f"image {shown} redirects to another host.", SAVE_IT)
        target = following
    raise RequestError(f"image {shown} redirects more than {MAX_REDIRECTS} times.", SAVE_IT)


def read_url(url: str, shown: str) -> UrlTarget:
    """A URL as its parts. Raises RequestError for one that other programs might read in another
    way: with a user, with blanks or backslashes, or with letters beyond ASCII."""
    remedy = "Write https://HOST/PATH, percent-encoded."
    if not url.isascii() or not url.isprintable() or any(c in url for c in ' \\<>"^`{|}'):
        raise RequestError(f"image {shown} is a URL with characters that no URL has.", remedy)
    try:
        parts: SplitResult = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise RequestError(f"image {shown} is no URL.", remedy) from None
    if parts.scheme not in PORTS or not HOST.fullmatch(host) or "@" in parts.netloc or port == 0:
        raise RequestError(f"image {shown} is no URL of a host alone.", remedy)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return UrlTarget(parts.scheme, host, port or PORTS[parts.scheme], path)


def is_public(address: str) -> bool:
    """Whether an IP address is one of the internet: not of this machine, of a private network, or
    of another one inside which it stands for."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped or ip in NAT64:
            return is_public(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))
        if ip.sixtofour or int(ip) >> 32 & 0xFFFFFFFF in ISATAP or ip not in INTERNET_V6:
            return False
    return ip.is_global and not ip.is_multicast


def _following(target: UrlTarget, place: str, shown: str) -> UrlTarget:
    try:
        return read_url(urljoin(_text(target), place), shown)
    except ValueError:
        raise RequestError(f"image {shown} redirects to no URL.", SAVE_IT) from None


def _is_same(before: UrlTarget, after: UrlTarget) -> bool:
    told = (before.scheme, before.host, before.port)
    return told == (after.scheme, after.host, after.port)


def _is_secured(before: UrlTarget, after: UrlTarget) -> bool:
    """Whether a redirect is that from http to https of one host, on their usual ports."""
    told = (before.scheme, before.port, after.scheme, after.port)
    return before.host == after.host and told == ("http", 80, "https", 443)


def _text(target: UrlTarget) -> str:
    host = f"[{target.host}]" if ":" in target.host else target.host
    return f"{target.scheme}://{host}:{target.port}{target.path}"


def _get(target: UrlTarget, shown: str, max_bytes: int, deadline: float) -> bytes | str:
    """The bytes of an answer, or where it redirects."""
    if time.monotonic() >= deadline:
        raise _too_late(shown)
    address = _resolved(target, shown, deadline)
    with _Watchdog(deadline) as watchdog:
        connection = _Connection(target, address, watchdog)
        try:
            connection.request("GET", target.path, headers=HEADERS)
            response = connection.getresponse()
            if response.status in REDIRECTS and (place := response.getheader("Location")):
                return place
            if response.status != 200:
                message = f"image {shown} cannot be fetched: the server answers {response.status}."
                raise RequestError(message, SAVE_IT)
            if response.getheader("Content-Encoding", "identity") != "identity":
                raise RequestError(f"image {shown} comes compressed, unasked.", SAVE_IT)
            data = _body(response, max_bytes)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise _failed(shown, watchdog) from error
        finally:
            connection.close()
        if watchdog.has_barked:
            raise _failed(shown, watchdog)
        return data


def _body(response: http.client.HTTPResponse, max_bytes: int) -> bytes:
    """What is declared too long is not read beyond its first bytes."""
    data = bytearray()
    while len(data) <= max_bytes and (
        chunk := response.read(min(CHUNK_BYTES, max_bytes + 1 - len(data)))
    ):
        data += chunk
    if len(data) <= max_bytes and response.length:
        raise http.client.IncompleteRead(bytes(data), response.length)
    return bytes(data)


def _failed(shown: str, watchdog: _Watchdog) -> RequestError:
    if watchdog.has_barked:
        return _too_late(shown)
    return RequestError(f"image {shown} cannot be fetched: the connection fails.", SAVE_IT)


def _too_late(shown: str) -> RequestError:
    return RequestError(f"image {shown} takes too long to fetch.", SAVE_IT)


def _resolved(target: UrlTarget, shown: str, deadline: float) -> str:
    """The address of a host; where one of several is not public, none of them is used."""
    try:
        answers = _looked_up(target, deadline - time.monotonic())
    except (OSError, ValueError) as error:
        raise RequestError(f"image {shown} cannot be fetched: no such host.", SAVE_IT) from error
    if answers is None:
        raise _too_late(shown)
    addresses = [str(place[4][0]) for place in answers]
    if not addresses or not all(map(is_public, addresses)):
        message = (
            f"image {shown} is on this machine or on a private network, where URLs may not lead."
        )
        raise RequestError(message, SAVE_IT)
    return addresses[0]


def _looked_up(target: UrlTarget, timeout_s: float) -> list[tuple[Any, ...]] | None:
    """What the system's resolver finds; None where that takes too long. It takes no limit of time,
    so it works in a thread of its own, which is then left behind. Raises OSError or ValueError."""
    answers: queue.SimpleQueue[list[tuple[Any, ...]] | OSError | ValueError] = queue.SimpleQueue()

    def look_up() -> None:
        try:
            answers.put(socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM))
        except (OSError, ValueError) as error:
            answers.put(error)

    threading.Thread(target=look_up, daemon=True).start()
    try:
        answer = answers.get(timeout=max(timeout_s, 0))
    except queue.Empty:
        return None
    if isinstance(answer, Exception):
        raise answer
    return answer


class _Watchdog:
    """Ends a connection at the deadline: a server that sends a byte now and then never meets the
    timeout of a socket."""

    def __init__(self, deadline: float) -> None:
        self.has_barked = False
        self.left_s = max(deadline - time.monotonic(), 0.001)
        self._sockets: list[socket.socket] = []
        self._timer = threading.Timer(self.left_s, self._bark)
        self._timer.daemon = True

    def __enter__(self) -> _Watchdog:
        self._timer.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._timer.cancel()

    def watch(self, plain: socket.socket) -> None:
        """Ends this socket too, at the deadline."""
        self._sockets.append(plain)
        if self.has_barked:
            self._bark()

    def _bark(self) -> None:
        self.has_barked = True
        for watched in self._sockets:
            with suppress(OSError):
                socket.socket.shutdown(watched, socket.SHUT_RDWR)


class _Connection(http.client.HTTPConnection):
    """A connection to the address that was checked; the host's name stands in its headers, and in
    the certificate that it must show."""

    def __init__(self, target: UrlTarget, address: str, watchdog: _Watchdog) -> None:
        super().__init__(target.host, target.port, timeout=watchdog.left_s)
        self._target, self._address, self._watchdog = target, address, watchdog

    def connect(self) -> None:
        """Connects, and for https shakes hands."""
        plain = socket.create_connection((self._address, self._target.port), self._watchdog.left_s)
        self.sock = plain
        if self._target.scheme == "https":
            context = ssl.create_default_context()
            secured = context.wrap_socket(
                plain, server_hostname=self._target.host, do_handshake_on_connect=False
            )
            self.sock = secured
            self._watchdog.watch(secured)
            secured.do_handshake()
        else:
            self._watchdog.watch(plain)
