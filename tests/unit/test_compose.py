"""docker-compose.yml is one that Compose accepts, and has the services that its header promises."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.fixtures.availability import skip_or_fail

ROOT = Path(__file__).parents[2]
SECONDS_MAX = 60


def compose_command() -> list[str] | None:
    """Find Compose: the plugin of `docker`, or a program of its own."""
    for command in (["docker", "compose"], ["docker-compose"]):
        program = shutil.which(command[0])
        if program is None:
            continue
        found = [program, *command[1:]]
        version = subprocess.run([*found, "version"], capture_output=True, check=False, timeout=SECONDS_MAX)
        if version.returncode == 0:
            return found
    return None


def compose(*arguments: str) -> str:
    command = compose_command()
    if command is None:
        # Set by .ci/run where it may not install Compose, and says so.
        if os.environ.get("MONGO_CELERY_WITHOUT_COMPOSE"):
            pytest.skip("there is no Compose, and no right to install it")
        skip_or_fail("there is no Compose on this machine: install docker-compose or docker-compose-v2")
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=SECONDS_MAX
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("image", "server"), [("mongo", ""), ("redis", "Redis "), ("python", "")])
def test_the_images_are_of_versions_that_are_tested(image: str, server: str) -> None:
    """The table of the versions page has a row for each, with a full version."""
    tags = re.findall(rf"image: {image}:([\d.]+)", (ROOT / "docker-compose.yml").read_text())
    rows = (ROOT / "tests/versions/README.md").read_text()
    assert tags
    assert all(re.search(rf"\| {server}{re.escape(tag)}\.\d+ \|", rows) for tag in tags)


def test_compose_accepts_the_file_and_finds_the_services_of_the_example() -> None:
    """A replica set, a Redis, two listeners, a worker, beat and a writer, after one installation; without a daemon."""
    services = {"mongo", "redis", "install", "listener-a", "listener-b", "worker", "beat", "writer"}
    assert set(compose("config", "--services").split()) == services
