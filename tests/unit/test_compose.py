"""docker-compose.yml is one that Compose accepts, and has the services that its header promises."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.fixtures.availability import skip_or_fail

ROOT = Path(__file__).parents[2]
SECONDS_MAX = 60


def test_compose_accepts_the_file_and_finds_the_services_of_the_example() -> None:
    """A replica set, a Redis, two listeners, a worker, beat and a writer, after one installation; without a daemon."""
    commands = (["docker", "compose"], ["docker-compose"])
    found = [each for each in commands if shutil.which(each[0]) and _run(*each, "version").returncode == 0]
    if not found:
        # Set by .ci/run where it may not install Compose, and says so.
        if os.environ.get("MONGO_CELERY_WITHOUT_COMPOSE"):
            pytest.skip("there is no Compose, and no right to install it")
        skip_or_fail("there is no Compose on this machine: install docker-compose or docker-compose-v2")
    done = _run(*found[0], "config", "--services")
    services = {"mongo", "redis", "install", "listener-a", "listener-b", "worker", "beat", "writer"}
    assert set(done.stdout.split()) == services, done.stderr


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=SECONDS_MAX)
