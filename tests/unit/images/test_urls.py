"""URLs are fetched from the internet alone, within limits of time and size, and no text of a
server reaches a message."""

from __future__ import annotations

import gzip
import http.server
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.errors import RequestError
from edgespec.images import urls
from edgespec.images.urls import UrlTarget, fetch, is_public, read_url
from tests.unit.images.samples import attempted

BODY = b"an image" * 100
SECRET = "secret text of a server"


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers by the path that is asked for."""

    seen: list[tuple[str, str | None, str]] = []  # noqa: RUF012 - path, Host, Accept-Encoding
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        host, coding = self.headers["Host"], self.headers["Accept-Encoding"]
        self.seen.append((self.path, host, coding))
        name = self.path.strip("/").partition("?")[0]
        if name.startswith("to:"):
            self.send_response(302)
            self.send_header("Location", name.removeprefix("to:"))
            self.end_headers()
        elif name == "loop":
            self.answer(307, b"", Location="/loop")
        elif name == "missing":
            self.answer(404, SECRET.encode())
        elif name == "gzip":
            self.answer(200, gzip.compress(BODY), **{"Content-Encoding": "gzip"})
        elif name == "short":
            self.answer(200, BODY[:10], length=len(BODY))
        elif name == "endless":
            self.answer(200, BODY, length=10**12)
        elif name == "chunked":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for _ in range(1000):
                self.wfile.write(b"400\r\n" + b"x" * 1024 + b"\r\n")
        elif name == "drip":
            self.send_response(200)
            self.end_headers()
            for _ in range(200):
                self.wfile.write(b"x")
                time.sleep(0.05)
        elif name == "drip-headers":
            for _ in range(200):
                self.wfile.write(b"H")
                time.sleep(0.05)
        elif name == "nonsense":
            self.wfile.write(SECRET.encode() + b"\r\n\r\n")
        else:
            self.answer(200, BODY)

    def answer(self, status: int, body: bytes, *, length: int = -1, **headers: str) -> None:
        self.send_response(status, SECRET)
        self.send_header("Content-Length", str(len(body) if length < 0 else length))
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of clients that went away."""


def serving(tls: ssl.SSLContext | None = None) -> Iterator[int]:
    Handler.seen.clear()
    with Server(("127.0.0.1", 0), Handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.fixture
def port() -> Iterator[int]:
    yield from serving()


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine counts as the internet."""
    monkeypatch.setattr(urls, "is_public", lambda address: True)


def fetched(url: str, *, max_bytes: int = 10_000, timeout_s: float = 20) -> bytes:
    return fetch(url, '"URL"', max_bytes, timeout_s)


def refusal(url: str, **limits: float) -> str:
    with pytest.raises(RequestError) as caught:
        fetched(url, **limits)  # type: ignore[arg-type]
    assert caught.value.what.startswith('image "URL" ')
    assert caught.value.remedy
    assert SECRET not in str(caught.value)
    return caught.value.what


@pytest.mark.usefixtures("local")
def test_an_image_is_fetched_as_it_is(port: int) -> None:
    assert fetched(f"http://localhost:{port}/a%20b.png?size=1&x") == BODY
    assert Handler.seen == [("/a%20b.png?size=1&x", f"localhost:{port}", "identity")]


@pytest.mark.usefixtures("local")
def test_a_redirect_on_the_same_host_is_followed(port: int) -> None:
    assert fetched(f"http://localhost:{port}/to:/b.png") == BODY
    assert [path for path, *_ in Handler.seen] == ["/to:/b.png", "/b.png"]


@pytest.mark.usefixtures("local")
@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("http://127.0.0.1:{port}/b.png", "redirects to another host"),
        ("http://localhost:1/b.png", "redirects to another host"),
        ("//example.com/b.png", "redirects to another host"),
        ("https://localhost:{port}/b.png", "redirects to another host"),
        ("file:///etc/passwd", "is no URL of a host alone"),
        ("http://a@localhost:{port}/b.png", "is no URL of a host alone"),
        ("http://[::1", "redirects to no URL"),
    ],
)
def test_no_redirect_leaves_the_host(port: int, place: str, said: str) -> None:
    assert said in refusal(f"http://localhost:{port}/to:{place.format(port=port)}")
    assert len(Handler.seen) == 1


def test_only_from_http_to_https_of_the_same_host_may_the_scheme_change() -> None:
    plain, secured = UrlTarget("http", "a", 80, "/"), UrlTarget("https", "a", 443, "/x")
    assert urls._is_secured(plain, secured)
    for other in (
        UrlTarget("https", "b", 443, "/"),
        UrlTarget("https", "a", 8443, "/"),
        UrlTarget("http", "a", 443, "/"),
    ):
        assert not urls._is_secured(plain, other)
    assert not urls._is_secured(secured, plain)


@pytest.mark.usefixtures("local")
def test_redirects_without_end_are_refused(port: int) -> None:
    assert "redirects more than 3 times" in refusal(f"http://localhost:{port}/loop")
    assert len(Handler.seen) == 4


@pytest.mark.usefixtures("local")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing", "the server answers 404"),
        ("gzip", "comes compressed, unasked"),
        ("short", "the connection fails"),
        ("nonsense", "the connection fails"),
    ],
)
def test_answers_without_an_image_are_refused(port: int, name: str, said: str) -> None:
    assert said in refusal(f"http://localhost:{port}/{name}")


@pytest.mark.usefixtures("local")
@pytest.mark.parametrize("name", ["chunked", "endless", "a.png"])
def test_no_more_is_read_than_shows_that_it_is_too_long(port: int, name: str) -> None:
    assert len(fetched(f"http://localhost:{port}/{name}", max_bytes=700)) == 701


@pytest.mark.usefixtures("local")
@pytest.mark.parametrize("name", ["drip", "drip-headers"])
def test_a_server_that_sends_a_byte_now_and_then_is_left(port: int, name: str) -> None:
    said = refusal(f"http://localhost:{port}/{name}", timeout_s=0.3)
    assert said == 'image "URL" takes too long to fetch.'


@pytest.mark.usefixtures("local")
def test_a_server_that_is_not_there_is_refused() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        assert "the connection fails" in refusal(f"http://127.0.0.1:{port}/a.png")


@pytest.mark.usefixtures("local")
def test_a_name_that_is_looked_up_for_too_long_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    done, late, real = threading.Event(), list[bool](), socket.getaddrinfo

    def slow(*args: Any, **kwargs: Any) -> Any:
        late.append(not done.wait(5))
        return real(*args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    said = refusal("http://localhost/a.png", timeout_s=0.05)
    done.set()
    assert said == 'image "URL" takes too long to fetch.'
    assert True not in late


@pytest.mark.usefixtures("local")
def test_without_time_left_nothing_is_fetched(port: int) -> None:
    assert "takes too long" in refusal(f"http://localhost:{port}/a.png", timeout_s=-1)
    assert Handler.seen == []


# ---- where URLs may lead


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1", "[::1]", "2130706433", "0x7f.1", "0.0.0.0", "127.1"]
)
def test_this_machine_is_refused_however_it_is_written(port: int, host: str) -> None:
    said = refusal(f"http://{host}:{port}/a.png")
    assert "private network" in said or "no such host" in said
    assert Handler.seen == []


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.215.14", True),
        ("2606:2800:21f:cb07:6820:80da:af6b:8b2c", True),
        ("::ffff:93.184.215.14", True),
        ("64:ff9b::5db8:d70e", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::", False),
        ("::1", False),
        ("fe80::1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("ff02::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:169.254.169.254", False),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
        ("2606:4700::5efe:7f00:1", False),
        ("2606:4700::200:5efe:5db8:d70e", False),
        ("2606:4700::5eff:7f00:1", True),
        ("2001:0:1:2:3:4:5:6", False),
        ("fec0::1", False),
        ("64:ff9b:1::7f00:1", False),
        ("::127.0.0.1", False),
        ("::93.184.215.14", False),
        ("::ffff:0:127.0.0.1", False),
        ("5f00::1", False),
        ("4000::1", False),
        ("no address", False),
    ],
)
def test_which_addresses_are_of_the_internet(address: str, public: bool) -> None:
    assert is_public(address) is public


def test_a_host_with_a_private_address_among_others_is_refused(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def two(host: str, port: int, **_: object) -> list[tuple[Any, ...]]:
        return [(0, 0, 0, "", (a, port)) for a in ("93.184.215.14", "127.0.0.1")]

    monkeypatch.setattr(socket, "getaddrinfo", two)
    assert "private network" in refusal(f"http://rebinding.example:{port}/a.png")
    assert Handler.seen == []


def test_a_name_is_resolved_once_and_the_checked_address_is_used(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that leads elsewhere the second time (DNS rebinding) is not asked a second time."""
    asked: list[str] = []
    real: Callable[..., Any] = socket.getaddrinfo

    def once(host: str, *args: Any, **kwargs: Any) -> Any:
        if host != "rebinding.example":
            return real(host, *args, **kwargs)
        asked.append(host)
        return [(0, 0, 0, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", once)
    monkeypatch.setattr(urls, "is_public", lambda address: address == "127.0.0.1")
    assert fetched(f"http://rebinding.example:{port}/a.png") == BODY
    assert asked == ["rebinding.example"]
    assert Handler.seen[0][1] == f"rebinding.example:{port}"


# ---- one reading of a URL


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("https://host/a.png", UrlTarget("https", "host", 443, "/a.png")),
        ("HTTP://Host:8080", UrlTarget("http", "host", 8080, "/")),
        ("http://[2606:2800::1]/a?b#c", UrlTarget("http", "2606:2800::1", 80, "/a?b")),
    ],
)
def test_a_url_is_its_parts(url: str, target: UrlTarget) -> None:
    assert read_url(url, "x") == target


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http:///a.png",
        "http://user@host/a.png",
        "http://user:word@host/a.png",
        "http://good.example@127.0.0.1/",
        "http://good.example\\@127.0.0.1/",
        "http://good.example\\.127.0.0.1/",
        "http://host name/",
        "http://host/a b",
        "http://host/a\r\nX: y",
        "http://host\t/",
        "http://host/ä.png",
        "http://ⓗost/",
        "http://host:0/",
        "http://host:99999/",
        "http://host:port/",
        "http://[::1/",
        "http://[fe80::1%25eth0]/",
        "http://ho%73t/",
        "ftp://host/a.png",
        "//host/a.png",
        "host/a.png",
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(url: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_url(url, "x")
    assert caught.value.remedy == "Write https://HOST/PATH, percent-encoded."


@settings(deadline=None)
@given(st.text(max_size=40))
def test_any_text_is_a_target_or_an_error(text: str) -> None:
    found = attempted(lambda: read_url(f"http://{text}", "x"))
    if isinstance(found, RequestError):
        assert found.remedy
    else:
        assert found.path.startswith("/")
        assert "@" not in found.host


# ---- certificates


def test_a_certificate_is_asked_for_and_must_be_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pair.pem").write_text(PAIR)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "pair.pem")
    real = ssl.create_default_context
    monkeypatch.setattr(urls, "is_public", lambda address: True)
    for port in serving(tls):
        assert "the connection fails" in refusal(f"https://localhost:{port}/a.png")
        monkeypatch.setattr(
            ssl, "create_default_context", lambda: real(cafile=str(tmp_path / "pair.pem"))
        )
        assert fetched(f"https://localhost:{port}/a.png") == BODY
        assert "the connection fails" in refusal(f"https://127.0.0.1:{port}/a.png")
    assert len(Handler.seen) == 1


# Of localhost, made for this test: openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256
# -nodes -days 36500 -subj /CN=localhost -addext subjectAltName=DNS:localhost
PAIR = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgaT/sASu3QL3Sizno
fRxEwh8D9GqZkQDE3/h8wA5l28OhRANCAATtYm6QItXZa0YbJrmIhFxZcJ+FEvze
yTbzhPH+AC8pTLQ5ViIw0SFWfjbJEkoP0Yi9fzP5iVlyDefmdjRAjkqy
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBljCCATugAwIBAgIUG6bnTAPL52UWR4nHwe8xr127Qk4wCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyMzA4NTUzNloYDzIxMjYxMDMw
MDg1NTM2WjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAATtYm6QItXZa0YbJrmIhFxZcJ+FEvzeyTbzhPH+AC8pTLQ5ViIw0SFW
fjbJEkoP0Yi9fzP5iVlyDefmdjRAjkqyo2kwZzAdBgNVHQ4EFgQUwGe5Waws6MIK
0oin04eaIL9RyjgwHwYDVR0jBBgwFoAUwGe5Waws6MIK0oin04eaIL9RyjgwDwYD
VR0TAQH/BAUwAwEB/zAUBgNVHREEDTALgglsb2NhbGhvc3QwCgYIKoZIzj0EAwID
SQAwRgIhAIrVjhtKzLS4W49ew7hVApDPdHDzUANYKzsSmSNvcGwkAiEAtowpFIC6
sx2asaGxjfImDqckv+y+UPPeiulO4te8uHY=
-----END CERTIFICATE-----
"""
