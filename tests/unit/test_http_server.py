"""The HTTP server beside the listeners: addresses, hosts, methods, headers, slow clients and many, a hung server."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPException
from itertools import count
from typing import Any

import pytest

from mongo_celery.bridge.http.recent import Recent
from mongo_celery.bridge.http.server import (
    CONNECTIONS_MAX,
    THREADS_MAX,
    Answer,
    HttpServer,
    Response,
    is_loopback,
    is_own_host,
    parse_address,
)
from mongo_celery.errors import ConfigurationError, ServerUnavailableError
from tests.fixtures.process import wait_for

LOOPBACK = "127.0.0.1"
WELL = Response(b"well\n")


@pytest.fixture
def serve() -> Iterator[Callable[..., HttpServer]]:
    with contextlib.ExitStack() as stack:

        def start(answer: Answer = lambda _path: WELL) -> HttpServer:
            return stack.enter_context(HttpServer("0", answer))

        yield start


def ask(served: HttpServer, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, str, dict[str, str]]:
    connection = HTTPConnection(LOOPBACK, served.port, timeout=20)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.getheaders())
    finally:
        connection.close()


def raw(served: HttpServer, sent: bytes) -> bytes:
    with socket.create_connection((LOOPBACK, served.port), timeout=20) as connection:
        connection.sendall(sent)
        return b"".join(iter(lambda: connection.recv(4096), b""))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("9100", ("127.0.0.1", 9100)),
        (":9100", ("127.0.0.1", 9100)),
        ("0.0.0.0:9100", ("0.0.0.0", 9100)),
        ("[::1]:9100", ("::1", 9100)),
        (" localhost:0 ", ("localhost", 0)),
    ],
)
def test_an_address_without_a_host_is_this_machine_alone(text: str, wanted: tuple[str, int]) -> None:
    assert parse_address(text) == wanted


def test_an_address_that_is_taken_or_not_ours_ends_the_start(serve: Callable[..., HttpServer]) -> None:
    taken = str(serve().port)
    wrong = ("", "shop", "127.0.0.1:", "a b:1", "::1:9100", "x:65536", "http://x:1", "[]:1")
    for address in (taken, "192.0.2.1:0", "no.such.host.invalid:1", f"{'x' * 70}:1", *wrong):
        with pytest.raises(ConfigurationError):
            HttpServer(address, lambda _path: None)


@pytest.mark.parametrize(
    ("hosts", "answered"),
    [
        (("127.0.0.1:9100", "127.0.0.1", "localhost:9100", "LOCALHOST.", "shop.localhost:1", "[::1]:9100"), True),
        (("10.1.2.3:9100", "attacker.example:9100", "localhost.attacker.example", "", "a b"), False),
        (("127.0.0.1.attacker.example", "127.0.0.1@attacker.example"), False),
    ],
)
def test_a_server_on_loopback_answers_to_names_of_this_machine(hosts: tuple[str, ...], answered: bool) -> None:
    """A website's name that points to 127.0.0.1 is none of them: DNS rebinding."""
    assert [is_own_host(host) for host in hosts] == [answered] * len(hosts)
    assert not is_loopback("0.0.0.0")


def test_an_answer_is_closed_to_other_sites_and_kept_nowhere(serve: Callable[..., HttpServer]) -> None:
    served = serve()
    status, text, headers = ask(served)
    assert (status, text) == (200, "well\n")
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; frame-ancestors 'none'")
    assert not {name.lower() for name in headers} & {"access-control-allow-origin", "set-cookie"}
    assert "Python" not in headers["Server"]


def test_a_probe_may_ask_for_the_status_alone(serve: Callable[..., HttpServer]) -> None:
    assert ask(serve(), method="HEAD")[:2] == (200, "")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /\r\n\r\n", b" 200 "),
        (b"nonsense\r\n\r\n", b" 400 "),
        (b"GET / HTTP/9.9\r\n\r\n", b" 505 "),
        *((method + b" / HTTP/1.1\r\n\r\n", b" 501 ") for method in (b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS")),
        (b"GET http://[x/ HTTP/1.1\r\n\r\n", b" 404 "),
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n", b" 414 "),
        (b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: 1\r\n" % number for number in range(150)) + b"\r\n", b" 431 "),
        (b"GET / HTTP/1.1\r\nHost: attacker.example\r\n\r\n", b" 421 "),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: attacker.example\r\n\r\n", b" 421 "),
    ],
)
def test_a_wrong_request_is_refused_and_not_repeated(
    serve: Callable[..., HttpServer], sent: bytes, status: bytes
) -> None:
    answer = raw(serve(lambda path: WELL if path == "/" else None), sent)
    assert status in answer.partition(b"\r\n")[0]
    assert b"attacker" not in answer
    assert b"xxx" not in answer


def test_a_missing_path_and_a_failure_have_their_status(serve: Callable[..., HttpServer], caplog: Any) -> None:
    """The words of an error go neither to the client nor into the log."""

    def answer(path: str) -> Response | None:
        if path == "/bad":
            raise RuntimeError("mongodb://user:canary@host")
        return None

    served = serve(answer)
    assert ask(served, "/../etc/passwd")[0] == 404
    status, text, _ = ask(served, "/bad?x=1")
    assert status == 500
    assert "canary" not in text + caplog.text


def test_clients_that_send_no_request_keep_no_probe_out(serve: Callable[..., HttpServer]) -> None:
    served = serve()
    address = (LOOPBACK, served.port)
    with contextlib.ExitStack() as stack:
        for _ in range(2 * CONNECTIONS_MAX):
            slow = stack.enter_context(socket.create_connection(address, timeout=20))
            slow.sendall(b"GET /healthz HTTP/1.1\r\nX-More: ")
        for _ in range(20):
            stack.enter_context(socket.create_connection(address, timeout=20))
            assert ask(served)[0] == 200


def test_answers_that_hang_take_a_bounded_number_of_threads(serve: Callable[..., HttpServer]) -> None:
    """P17: beyond the bound a request is ended at once. When the answers are there, requests are answered again."""
    begun, ends = list[str](), threading.Event()

    def answer(path: str) -> Response:
        begun.append(path)
        ends.wait(120)
        return WELL

    def is_answered() -> bool:
        with contextlib.suppress(OSError, HTTPException):
            return ask(served)[0] == 200
        return False

    served = serve(answer)
    with contextlib.ExitStack() as stack:
        for number in range(1, THREADS_MAX + 1):
            hung = stack.enter_context(socket.create_connection((LOOPBACK, served.port), timeout=20))
            hung.sendall(b"GET / HTTP/1.0\r\n\r\n")
            wait_for(lambda number=number: len(begun) >= number, message="it is being answered")  # type: ignore[misc]
        for _ in range(10):
            with contextlib.suppress(ConnectionError):
                assert raw(served, b"GET / HTTP/1.0\r\n\r\n") == b""
        assert len(begun) == THREADS_MAX
        ends.set()
    wait_for(is_answered, message="there is room again")


def test_the_value_before_is_given_while_a_read_is_under_way() -> None:
    """A server that hangs delays the request that reads, and no other one."""
    reads, begun, ends = count(1), threading.Event(), threading.Event()

    def read() -> int:
        number = next(reads)
        if number > 1:
            begun.set()
            ends.wait(120)
        return number

    recent = Recent(read, len, keep=0.0)
    assert recent() == 1

    def ask_again() -> None:  # a value that took long to read is kept for longer
        while not ends.is_set():
            recent()

    slow = threading.Thread(target=ask_again)
    slow.start()
    try:
        assert begun.wait(60), "it is read again"
        assert recent() == 1
    finally:  # else the thread would outlive a failure, and pytest wait for it
        ends.set()
        slow.join()
    assert recent() > 1


@pytest.mark.parametrize(
    ("kind", "shown"), [(ServerUnavailableError, "mongodb://***@h"), (KeyError, "KeyError: 'mongodb://***@h'.")]
)
def test_an_error_of_a_value_is_one_sentence_without_credentials(kind: type[Exception], shown: str) -> None:
    def read() -> str:
        raise kind("mongodb://me:canary@h")

    assert Recent(read, str)() == shown
