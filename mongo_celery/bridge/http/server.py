"""
A read-only HTTP server beside the listeners: GET and HEAD, with a thread for each of a bounded number of connections.

It knows nothing of the answers. A connection ends with its answer. Nothing that a client sends is logged.
"""

from __future__ import annotations

import logging
import re
import socket
import threading
from collections import OrderedDict
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
"""One more ends the oldest, so that clients that send nothing cannot keep a probe out."""

THREADS_MAX = 128
"""A connection that is ended leaves its thread until its answer is there. Beyond these, a new one is ended at once."""

_ADDRESS = re.compile(r"(?:(?P<host>\[[^\[\]]+\]|[^\[\]:\s]*):)?(?P<port>\d{1,5})")
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Response(NamedTuple):
    """An answer; `policy` is its `Content-Security-Policy`."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: int = HTTPStatus.OK
    policy: str = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"


Answer = Callable[[str], Response | None]
"""Return the response for a path. None means that nothing is there."""


def parse_address(text: str) -> tuple[str, int]:
    """
    Parse `HOST:PORT`, `[IPV6]:PORT`, `:PORT` or `PORT`. Without a host it is loopback.

    Raises:
        ConfigurationError: the text is not an address.
    """
    found = _ADDRESS.fullmatch(text.strip())
    if found is None or int(found["port"]) > 65_535:  # noqa: PLR2004 - the largest port
        raise ConfigurationError(
            f"{text!r} is not an address to serve HTTP at. Give HOST:PORT, or PORT for this machine alone. "
            "0.0.0.0:9100 is port 9100 of all its addresses, [::1]:9100 is an IPv6 address."
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

    A website can point its own name to 127.0.0.1, so that a browser there reads this server (DNS rebinding).
    """
    try:
        return is_loopback(urlsplit(f"//{header}").hostname or "")
    except ValueError:
        return False


class HttpServer(ThreadingHTTPServer):
    """
    Serves from entering to leaving. It takes the address when it is made.

    Raises:
        ConfigurationError: the text is not an address, or it cannot be served.
    """

    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: str, answer: Answer) -> None:
        host, port = parse_address(address)
        self.answer = answer
        self.guards_host = is_loopback(host)
        self._connections: OrderedDict[Any, None] = OrderedDict()
        self._room = threading.BoundedSemaphore(THREADS_MAX)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _RequestHandler)
        except (OSError, UnicodeError) as error:
            raise ConfigurationError(
                f"cannot serve HTTP at {address}: {getattr(error, 'strerror', None) or error}. "
                "Give --http another address, or end the process that uses this one."
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
        """Bind without the look-up of this machine's name, which may wait for a name server."""
        TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread."""
        self._connections[request] = None
        if len(self._connections) > CONNECTIONS_MAX:
            with suppress(OSError):
                self._connections.popitem(last=False)[0].shutdown(socket.SHUT_RDWR)
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # the system has no thread left
            self._room.release()
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, then make room for another thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        self._connections.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that hang up. An error of an answer is logged before it comes here."""


class _RequestHandler(BaseHTTPRequestHandler):
    server: HttpServer
    server_version, sys_version = "mongo_celery", ""
    default_request_version = "HTTP/1.0"
    timeout = 5

    def do_GET(self) -> None:
        hosts = self.headers.get_all("Host", [])
        if self.server.guards_host and (len(hosts) > 1 or not all(map(is_own_host, hosts))):
            self._send(Response(b"Ask for localhost or 127.0.0.1.\n", status=HTTPStatus.MISDIRECTED_REQUEST))
            return
        try:
            found = self.server.answer(self.path.partition("?")[0])
        except Exception as error:  # noqa: BLE001 - its words may hold a secret
            logger.warning("an HTTP request failed: %s", type(error).__name__, extra={"event": "http_failed"})
            found = Response(b"This failed.\n", status=HTTPStatus.INTERNAL_SERVER_ERROR)
        self._send(found or Response(b"There is nothing here.\n", status=HTTPStatus.NOT_FOUND))

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
        """Refuse a request. Nothing of it is repeated."""
        del message, explain
        self.close_connection = True
        self._send(Response(b"Only GET and HEAD of a path are answered.\n", status=code))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of the standard library
        del format, args
