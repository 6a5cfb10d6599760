"""
The HTTP server: a thread for each connection, so many at most, each with so much time.

It knows nothing of what it serves. GET and HEAD are answered, and nothing else; a connection ends with its answer.
What is sent to it is in no log: nobody had to log in to send it.
"""

from __future__ import annotations

import io
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from urllib.parse import urlsplit

from mongo_celery.bridge.http.address import HttpAddress, answers_to
from mongo_celery.errors import ConfigurationError

logger = logging.getLogger("mongo_celery.http")

CONNECTIONS_MAX = 32
"""At so many at a time the next one ends the oldest that has sent no request yet, or else has to come later."""

REQUEST_SECONDS = 5.0
"""For so long a client may take to send its request, and again to take the answer."""

_POLL_SECONDS = 0.2
_SOLELY_TEXT = "text/plain; charset=utf-8"
_NOTHING_ELSE = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
_HEADERS: Mapping[str, str] = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class Response:
    """
    An answer.

    Attributes:
        policy: of its content, as the header `Content-Security-Policy` has it.
    """

    body: bytes
    content_type: str = _SOLELY_TEXT
    status: HTTPStatus = HTTPStatus.OK
    policy: str = _NOTHING_ELSE
    headers: Mapping[str, str] = field(default_factory=dict)


def said(text: str, status: HTTPStatus = HTTPStatus.OK, **headers: str) -> Response:
    """One sentence."""
    return Response(f"{text}\n".encode(), status=status, headers=headers)


Answering = Callable[[str, str], Response | None]
"""What is at a path, given the header `Accept`; None where there is nothing."""


class HttpListener:
    """
    Serves until it is stopped.

    Args:
        address: where; a port of 0 is any that is free.
        answer: what is at a path. It is called in many threads at once.

    Raises:
        ConfigurationError: the address cannot be served at.
    """

    def __init__(self, address: HttpAddress, answer: Answering) -> None:
        self._server = _opened(address, answer)
        self.address = HttpAddress(address.host, self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_SECONDS,), name="mongo_celery-http", daemon=True
        )

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def stop(self) -> None:
        """Take no more connections; those that are there end by themselves."""
        if self._thread.ident is not None:
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


def _opened(address: HttpAddress, answer: Answering) -> _BoundedServer:
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, place = found[0]
        return _BoundedServer(family, place, address, answer)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigurationError(
            f"cannot serve HTTP at {address}: {why}. Give --http another address, or end what has this one."
        ) from None


class _BoundedServer(ThreadingMixIn, HTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, family: int, place: Any, address: HttpAddress, answer: Answering) -> None:
        self.address_family = family
        self.address = address
        self.answer = answer
        self._room = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._unread: dict[Any, None] = {}
        self._unread_lock = threading.Lock()
        super().__init__(place, _Requests)

    def server_bind(self) -> None:
        """Without the look-up of this machine's name, which may take as long as a name server does not answer."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.address.host, self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False) and not self._make_room():
            with suppress(OSError):
                request.settimeout(_POLL_SECONDS)
                request.sendall(b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 5\r\nContent-Length: 0\r\n\r\n")
            self.shutdown_request(request)
            return
        with self._unread_lock:
            self._unread[request] = None
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self.has_been_read(request)
            self._room.release()
            self.shutdown_request(request)

    def _make_room(self) -> bool:
        """End the oldest connection whose request is not complete; return False if all are being answered."""
        with self._unread_lock:
            oldest = next(iter(self._unread), None)
            self._unread.pop(oldest, None)
            if oldest is not None:
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
        return oldest is not None and self._room.acquire(timeout=_POLL_SECONDS)

    def has_been_read(self, request: Any) -> None:
        """Note that the request of a connection is complete, or will never be."""
        with self._unread_lock:
            self._unread.pop(request, None)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.has_been_read(request)
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever hangs up is no news; what is wrong here was answered and logged where it was met."""


class _Requests(BaseHTTPRequestHandler):
    server: _BoundedServer
    server_version = "mongo_celery"
    sys_version = ""
    timeout = REQUEST_SECONDS

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_InTime(self.connection, time.monotonic() + REQUEST_SECONDS))

    def do_GET(self) -> None:
        self.server.has_been_read(self.connection)
        self._send(self._answer())

    do_HEAD = do_GET  # noqa: N815

    def _answer(self) -> Response:
        hosts = self.headers.get_all("Host", [None])
        if len(hosts) > 1 or not answers_to(hosts[0], self.server.address):
            return said(
                "What is served to this machine alone answers to its own names only: ask for localhost, or 127.0.0.1.",
                HTTPStatus.MISDIRECTED_REQUEST,
            )
        try:
            path = urlsplit(self.path).path
        except ValueError:
            return said("That is no address.", HTTPStatus.BAD_REQUEST)
        try:
            found = self.server.answer(path, self.headers.get("Accept", ""))
        except Exception as error:  # noqa: BLE001 - whoever asked is told, and it is not the listener's trouble
            logger.warning("a request cannot be answered: %s", type(error).__name__, extra={"event": "http_failed"})
            return said("This cannot be answered; the listener's log says more.", HTTPStatus.INTERNAL_SERVER_ERROR)
        return found if found is not None else said("There is nothing here.", HTTPStatus.NOT_FOUND)

    def _send(self, response: Response) -> None:
        self.connection.settimeout(REQUEST_SECONDS)
        self.request_version = self.protocol_version  # else one that was not understood gets no headers, as in HTTP/0.9
        self.send_response(response.status)
        headers = {
            **_HEADERS,
            "Content-Type": response.content_type,
            "Content-Length": str(len(response.body)),
            "Content-Security-Policy": response.policy,
            **response.headers,
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the standard library refuses; an unknown method is one that is not allowed."""
        del message, explain
        self.close_connection = True
        if code == HTTPStatus.NOT_IMPLEMENTED:
            self._send(
                said("Only GET and HEAD: nothing is changed here.", HTTPStatus.METHOD_NOT_ALLOWED, Allow="GET, HEAD")
            )
            return
        self._send(said("This request cannot be understood.", HTTPStatus(code)))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the standard library's name
        del format, args


class _InTime(io.RawIOBase):
    """A socket that is read until a monotonic time, however little comes at a time."""

    def __init__(self, connection: socket.socket, until: float) -> None:
        super().__init__()
        self._connection = connection
        self._until = until

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)
