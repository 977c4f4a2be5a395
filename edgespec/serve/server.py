"""Who listens: uvicorn, with connections that may not be slow, and a stop that drains.

The first SIGTERM or SIGINT ends the taking of requests, and the server once those under way have
ended; the second ends it at once. Knows sockets, signals and time. Knows no requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from edgespec.errors import EnvironmentProblem, OptionError, counted
from edgespec.serve.app import App
from edgespec.serve.limits import ServeLimits
from edgespec.serve.service import Service

SIGNALS = (signal.SIGINT, signal.SIGTERM)
BACKLOG = 128
FULL = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\n\r\n"


class Connection(H11Protocol):
    """One connection: its request's head must come in time, and what is sent must be read."""

    limits = ServeLimits()
    timer: asyncio.TimerHandle | None = None  # of the head
    stuck: asyncio.TimerHandle | None = None  # of what is not read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Takes the connection, where there is room for one."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            transport.write(FULL)
            transport.close()
            return
        self.expect()

    def expect(self) -> None:
        """The head of a request must come in time."""
        if self.timer is None:
            self.timer = self.loop.call_later(self.limits.receive_timeout_s, self.give_up)

    def data_received(self, data: bytes) -> None:
        """Takes in what came."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE and self.timer is not None:
            self.timer.cancel()
            self.timer = None
        elif self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.expect()

    def on_response_complete(self) -> None:
        """Waits for a next request; what is left of this one's body is not read for ever, nor is
        the beginning of another."""
        super().on_response_complete()
        rest, _ = self.conn.trailing_data
        if self.conn.their_state is h11.SEND_BODY or rest:
            self.expect()
        if self.transport.is_closing():
            self.watch_reader()

    def give_up(self) -> None:
        """The client is too slow."""
        self.transport.abort()

    def pause_writing(self) -> None:
        """The client reads too slowly for now."""
        super().pause_writing()
        self.watch_reader()

    def watch_reader(self) -> None:
        """What was written must be read in time."""
        if self.stuck is None:
            self.stuck = self.loop.call_later(self.limits.send_timeout_s, self.give_up)

    def resume_writing(self) -> None:
        """The client has caught up."""
        super().resume_writing()
        if self.stuck is not None:
            self.stuck.cancel()
            self.stuck = None

    def timeout_keep_alive_handler(self) -> None:
        """Closes an idle connection, and does not wait for who reads nothing."""
        super().timeout_keep_alive_handler()
        self.watch_reader()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the timers."""
        super().connection_lost(exc)
        for timer in (self.timer, self.stuck):
            if timer is not None:
                timer.cancel()


class Server(uvicorn.Server):
    """Serves until it is stopped. `said` is told what a signal begins."""

    def __init__(
        self,
        service: Service,
        *,
        certificate: Path | None = None,
        key: Path | None = None,
        said: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.service, self.said, self.number = service, said, 0  # the number of the first signal
        self.draining: asyncio.Task[None] | None = None
        limits = service.limits
        connection = type("LimitedConnection", (Connection,), {"limits": limits})
        config = uvicorn.Config(
            App(service),
            http=connection,
            ws="none",
            lifespan="off",
            loop="asyncio",
            interface="asgi3",
            log_config=None,
            log_level="critical",  # the application has a log of its own
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=limits.max_header_bytes,
            timeout_keep_alive=round(limits.keep_alive_s),
            timeout_graceful_shutdown=round(limits.send_timeout_s),
            ssl_certfile=certificate,
            ssl_keyfile=key,
        )
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Takes the signals of the process, in its main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self.signalled, number)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    def signalled(self, number: int) -> None:
        """A signal came."""
        if self.number:
            self.said("stopped at once")
            self.stop()
        else:
            self.number = number
            self.drain()

    def drain(self) -> None:
        """Takes no more requests, and stops once those under way have ended."""
        count = self.service.in_flight
        if count:
            what = counted(count, "more answer")
            self.said(f"stopping after {what}; another signal stops at once")
        self.service.draining = True
        self.draining = asyncio.create_task(self.drained())

    async def drained(self) -> None:
        """Waits for what is under way, for as long as the limits say."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.service.idle.wait(), self.service.limits.drain_s)
        if self.service.in_flight:
            self.stop()
        self.should_exit = True

    def stop(self) -> None:
        """Ends all that is under way."""
        self.service.draining = self.should_exit = self.force_exit = True
        for task in self.server_state.tasks:
            task.cancel()


def check_certificate(certificate: Path, key: Path) -> None:
    """Raises OptionError for files that are no certificate and key of each other, and for a key
    that a passphrase protects: nobody is there to type it."""
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key, password="")
    except (OSError, ssl.SSLError) as error:
        message = f"`tls_certificate` {certificate} and `tls_key` {key} cannot be used: {error}"
        raise OptionError(
            message, "Name a certificate and its key, in PEM, not encrypted."
        ) from None


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 is any that is free. EnvironmentProblem where there is none."""
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = places[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        message = f"`host` {host} `port` {port} cannot be listened at: {error.strerror or error}"
        remedy = "Give another `host` or `port`, or end what has it."
        raise EnvironmentProblem(message, remedy) from error
