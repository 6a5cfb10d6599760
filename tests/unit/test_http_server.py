"""What serves HTTP beside a listener: addresses, hosts, methods, headers, slow clients and many, a hung server."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from typing import Any, NoReturn

import pytest

from mongo_celery.bridge.http import server
from mongo_celery.bridge.http.address import HttpAddress, answers_to, http_address
from mongo_celery.bridge.http.server import HttpListener, Response, said
from mongo_celery.bridge.operations.readings import Reading
from mongo_celery.errors import ConfigurationError, ServerUnavailableError
from tests.fixtures.process import wait_for

LOOPBACK = HttpAddress("127.0.0.1", 0)


@pytest.fixture
def serve() -> Iterator[Callable[..., HttpListener]]:
    """Give a function that serves what it is given, on a port of its own."""
    served: list[HttpListener] = []

    def start(answer: Callable[[str, str], Response | None] = lambda _path, _accept: said("well")) -> HttpListener:
        served.append(HttpListener(LOOPBACK, answer))
        served[-1].start()
        return served[-1]

    yield start
    for each in served:
        each.stop()


def ask(served: HttpListener, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, str, dict[str, str]]:
    connection = HTTPConnection(served.address.host, served.address.port, timeout=20)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.getheaders())
    finally:
        connection.close()


def raw(served: HttpListener, sent: bytes) -> bytes:
    """What comes back for these bytes, until the connection ends."""
    with socket.create_connection((served.address.host, served.address.port), timeout=20) as connection:
        connection.sendall(sent)
        return b"".join(iter(lambda: connection.recv(4096), b""))


# -- addresses -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("9100", "127.0.0.1:9100"),
        (":9100", "127.0.0.1:9100"),
        ("0.0.0.0:9100", "0.0.0.0:9100"),
        ("listener.internal:80", "listener.internal:80"),
        ("[::1]:9100", "[::1]:9100"),
        (" localhost:0 ", "localhost:0"),
    ],
)
def test_an_address_without_a_host_is_this_machine_alone(text: str, wanted: str) -> None:
    """Whoever wants to be reached by others says so."""
    assert str(http_address(text)) == wanted


@pytest.mark.parametrize(
    "text", ["", "shop", "1.2.3.4", "127.0.0.1:", "a b:1", "::1", "::1:9100", "x:65536", "http://x:1", "[]:1"]
)
def test_what_is_no_address_is_told_in_one_sentence(text: str) -> None:
    with pytest.raises(ConfigurationError, match="is no address to serve HTTP at: give HOST:PORT"):
        http_address(text)


def test_an_address_that_is_taken_or_not_ours_ends_the_start(serve: Callable[..., HttpListener]) -> None:
    taken = serve().address
    for address in (
        taken,
        HttpAddress("192.0.2.1", 0),
        HttpAddress("no.such.host.invalid", 1),
        HttpAddress("x" * 70, 1),
    ):
        with pytest.raises(ConfigurationError, match=r"cannot serve HTTP at .*\. Give --http another address"):
            HttpListener(address, lambda _path, _accept: None)


@pytest.mark.parametrize(
    ("host", "answered"),
    [
        (None, True),
        ("127.0.0.1:9100", True),
        ("127.0.0.1", True),
        ("localhost:9100", True),
        ("LOCALHOST.", True),
        ("shop.localhost:1", True),
        ("[::1]:9100", True),
        ("10.1.2.3:9100", True),
        ("attacker.example:9100", False),
        ("localhost.attacker.example", False),
        ("127.0.0.1.attacker.example", False),
        ("127.0.0.1@attacker.example", False),
        ("", False),
        ("a b", False),
    ],
)
def test_what_is_served_to_this_machine_alone_answers_to_its_own_names(host: str | None, answered: bool) -> None:
    """A name that somebody has pointed to 127.0.0.1 is not one of them: DNS rebinding."""
    assert answers_to(host, LOOPBACK) is answered
    assert answers_to(host, HttpAddress("0.0.0.0", 9100))


# -- requests --------------------------------------------------------------------------------------


def test_an_answer_is_closed_to_other_sites_and_kept_nowhere(serve: Callable[..., HttpListener]) -> None:
    served = serve()
    status, text, headers = ask(served)
    assert (status, text) == (200, "well\n")
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert not {name.lower() for name in headers} & {"access-control-allow-origin", "set-cookie"}
    assert "Python" not in headers["Server"]
    assert ask(served, method="HEAD")[:2] == (200, "")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "ANY"])
def test_nothing_but_looking_is_allowed(serve: Callable[..., HttpListener], method: str) -> None:
    status, _, headers = ask(serve(), method=method)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /\r\n\r\n", b" 200 "),
        (b"nonsense\r\n\r\n", b" 400 "),
        (b"GET / HTTP/9.9\r\n\r\n", b" 505 "),
        (b"GET http://[x/ HTTP/1.1\r\n\r\n", b" 400 "),
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n", b" 414 "),
        (b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: 1\r\n" % number for number in range(150)) + b"\r\n", b" 431 "),
        (b"GET / HTTP/1.1\r\nHost: attacker.example\r\n\r\n", b" 421 "),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: attacker.example\r\n\r\n", b" 421 "),
    ],
)
def test_what_is_not_understood_is_refused(serve: Callable[..., HttpListener], sent: bytes, status: bytes) -> None:
    """And nothing of it is repeated."""
    answer = raw(serve(), sent)
    assert status in answer.partition(b"\r\n")[0]
    assert b"attacker" not in answer
    assert b"xxx" not in answer


def test_what_is_not_there_and_what_fails_is_said(serve: Callable[..., HttpListener], caplog: Any) -> None:
    """An error in an answer is no error of the listener, and tells nothing to whoever asked."""

    def answer(path: str, _accept: str) -> Response | None:
        if path == "/bad":
            raise RuntimeError("mongodb://user:canary@host")
        return None

    served = serve(answer)
    assert ask(served, "/../etc/passwd")[0] == 404
    status, text, _ = ask(served, "/bad?x=1")
    assert status == 500
    assert "canary" not in text + caplog.text


def test_a_client_that_dawdles_is_cut_off(serve: Callable[..., HttpListener], monkeypatch: pytest.MonkeyPatch) -> None:
    """However little it sends at a time, and however often: the bound is one for the whole request."""
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.5)
    served = serve()
    with socket.create_connection((served.address.host, served.address.port), timeout=20) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n")
        ended = threading.Event()

        def wait_for_the_end() -> None:
            connection.recv(1)
            ended.set()

        threading.Thread(target=wait_for_the_end, daemon=True).start()
        while not ended.wait(0.05):
            try:
                connection.sendall(b"X-More: 1\r\n")
            except OSError:
                break
    assert ask(served)[0] == 200


def test_more_clients_than_there_is_room_for_are_told_to_come_later(
    serve: Callable[..., HttpListener], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads are bounded; the ones that are there are served."""
    monkeypatch.setattr(server, "CONNECTIONS_MAX", 2)
    goes_on, inside = threading.Event(), threading.Semaphore(0)

    def answer(path: str, _accept: str) -> Response:
        if path == "/slow":
            inside.release()
            goes_on.wait(30)
        return said("well")

    served = serve(answer)
    found: list[int] = []
    slow = [threading.Thread(target=lambda: found.append(ask(served, "/slow")[0])) for _ in range(2)]
    for each in slow:
        each.start()
    for _ in slow:
        assert inside.acquire(timeout=30)
    assert b" 503 " in raw(served, b"")
    goes_on.set()
    for each in slow:
        each.join()
    assert found == [200, 200]
    wait_for(lambda: ask(served)[0] == 200, message="there is room again")


def test_clients_that_send_no_request_keep_nobody_out(serve: Callable[..., HttpListener]) -> None:
    """A liveness probe is answered while more sockets are open than there is room for, and while more come."""
    served = serve()
    address = (served.address.host, served.address.port)
    with contextlib.ExitStack() as stack:
        for _ in range(2 * server.CONNECTIONS_MAX):
            slow = stack.enter_context(socket.create_connection(address, timeout=20))
            slow.sendall(b"GET /healthz HTTP/1.1\r\nX-More: ")
        for _ in range(20):
            stack.enter_context(socket.create_connection(address, timeout=20))
            assert ask(served)[0] == 200


# -- readings --------------------------------------------------------------------------------------


def test_a_server_that_hangs_keeps_nobody_longer_than_they_wait() -> None:
    """The thread that asks it is one, however many wait; what comes late is given to the next."""
    answers, asked = threading.Event(), []

    def read() -> str:
        asked.append(1)
        answers.wait(30)
        return "well"

    reading = Reading("MongoDB", read, keep=30.0)
    for _ in range(5):
        told = reading.get(time.monotonic() + 0.02)
        assert told.value is None
        assert told.error is not None
        assert told.error.startswith("MongoDB gave no answer for")
    assert len(asked) == 1
    answers.set()
    assert reading.get(time.monotonic() + 30).value == "well"
    reading.stop()


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ServerUnavailableError("no answer from mongodb://me:canary@host"), "no answer from mongodb://***@host"),
        (ValueError("in mongodb://me:canary@host."), "MongoDB cannot be read: ValueError: in mongodb://***@host."),
    ],
)
def test_an_error_is_one_sentence_without_credentials(error: Exception, sentence: str) -> None:
    def read() -> NoReturn:
        raise error

    reading: Reading[str] = Reading("MongoDB", read)
    assert reading.get(time.monotonic() + 30).error == sentence
    reading.stop()


def test_many_who_ask_at_once_cost_one_reading() -> None:
    """Several pages and probes on one listener are one reader of MongoDB."""
    count = iter(range(100))
    reading = Reading("MongoDB", lambda: json.dumps(next(count)), keep=30.0)
    found: list[str | None] = []
    asking = [threading.Thread(target=lambda: found.append(reading.get(time.monotonic() + 30).value)) for _ in range(8)]
    for each in asking:
        each.start()
    for each in asking:
        each.join()
    assert found == ["0"] * 8
    reading.stop()
