"""
A read-only HTTP server beside the listeners. It serves GET and HEAD with one thread for each of a limited number of
connections.

It does not know the content of answers. A connection ends with its answer. The server logs nothing from clients.
"""

from __future__ import annotations

import logging
import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from socketserver import TCPServer
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

from mongo_celery.errors import ConfigurationError

logger = logging.getLogger("mongo_celery.http")

CONNECTIONS_MAX = 32
"""Largest number of connections. A new one ends the oldest, so silent clients cannot block a probe."""

THREADS_MAX = 128
"""
Largest number of threads. An ended connection keeps its thread until its answer is ready. Above this, a new connection
ends immediately.
"""

_ADDRESS = re.compile(r"(?:(?P<host>\[[^\[\]]+\]|[^\[\]:\s]*):)?(?P<port>\d{1,5})")
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Response(NamedTuple):
    """An answer. `policy` is its `Content-Security-Policy`."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: int = HTTPStatus.OK
    policy: str = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"


Answer = Callable[[str], Response | None]
"""Return the response for a path. None if the path does not exist."""


def parse_address(text: str) -> tuple[str, int]:
    """
    Parse `HOST:PORT`, `[IPV6]:PORT`, `:PORT` or `PORT`. The default host is loopback.

    Raises:
        ConfigurationError: the text is not an address.
    """
    found = _ADDRESS.fullmatch(text.strip())
    if found is None or int(found["port"]) > 65_535:  # noqa: PLR2004 - the largest port
        raise ConfigurationError(
            f"{text!r} is not an HTTP address. Give PORT, such as 9100, to serve this machine only. Give HOST:PORT, "
            "such as 0.0.0.0:9100 or [::]:9100, to serve other machines."
        )
    return (found["host"] or "127.0.0.1").strip("[]"), int(found["port"])


def is_loopback(host: str) -> bool:
    """Return True if a name or an address means this machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return f".{host.lower().rstrip('.')}".endswith(".localhost")


def is_own_host(header: str) -> bool:
    """
    Return True if a `Host` header names this machine.

    A website can point its name to 127.0.0.1, so that a browser on this machine reads this server (DNS rebinding).
    """
    try:
        return is_loopback(urlsplit(f"//{header}").hostname or "")
    except ValueError:
        return False


class HttpServer(ThreadingHTTPServer):
    """
    Serves inside its block. The constructor binds the address.

    Raises:
        ConfigurationError: the text is not an address, or it cannot be bound.
    """

    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: str, answer: Answer) -> None:
        host, port = parse_address(address)
        self.answer = answer
        self.guards_host = is_loopback(host)
        self._connections: list[Any] = []  # oldest first, until their threads end
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _RequestHandler)
        except (OSError, UnicodeError) as error:
            raise ConfigurationError(
                f"cannot serve HTTP at {address}: {getattr(error, 'strerror', None) or error}. "
                "Give another address, or end the process that uses this one."
            ) from None
        self.port: int = self.server_address[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, name="mongo_celery-http", daemon=True).start()
        logger.info("serving HTTP at %s", self.url, extra={"event": "http_serving"})
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def server_bind(self) -> None:
        """Bind without looking up this machine's name, which may wait for a name server."""
        TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, within both limits."""
        if len(self._connections) >= THREADS_MAX:
            super().shutdown_request(request)
            return
        self._connections.append(request)
        for oldest in self._connections[:-CONNECTIONS_MAX]:
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """End a connection and its thread."""
        with suppress(ValueError):
            self._connections.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that hang up. Errors of an answer are logged before."""


class _RequestHandler(BaseHTTPRequestHandler):
    server: HttpServer
    server_version, sys_version = "mongo_celery", ""
    default_request_version = "HTTP/1.0"
    timeout = 5

    def do_GET(self) -> None:
        hosts = self.headers.get_all("Host", [])
        if self.server.guards_host and (len(hosts) > 1 or not all(map(is_own_host, hosts))):
            self._send(Response(b"Use the host localhost or 127.0.0.1.\n", status=HTTPStatus.MISDIRECTED_REQUEST))
            return
        try:
            found = self.server.answer(self.path.partition("?")[0])
        except Exception as error:  # noqa: BLE001 - its words may hold a secret
            logger.warning(
                "the server could not answer an HTTP request: %s", type(error).__name__, extra={"event": "http_failed"}
            )
            found = Response(b"An error has occurred.\n", status=HTTPStatus.INTERNAL_SERVER_ERROR)
        self._send(found or Response(b"This path does not exist.\n", status=HTTPStatus.NOT_FOUND))

    do_HEAD = do_GET  # noqa: N815

    def _send(self, response: Response) -> None:
        self.send_response(response.status)
        own = {"Content-Type": response.content_type, "Content-Security-Policy": response.policy}
        for name, value in {**_HEADERS, **own, "Content-Length": len(response.body)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse a request without repeating any of it."""
        del message, explain
        self.close_connection = True
        self._send(Response(b"Only GET and HEAD are supported.\n", status=code))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of the standard library
        del format, args
