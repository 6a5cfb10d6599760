"""An environment for a cell: an interpreter, the project, and the few packages that the core needs, pinned."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

from tests.versions.matrix import NEWEST
from tests.versions.servers import MissingError, Servers

PROJECT = Path(__file__).parents[2]
NEEDED = (
    "pytest",
    "pytest-randomly",
    "pytest-xdist",
    "hypothesis",
    "psutil",
    "trustme",
    "gevent",
    "opentelemetry-sdk",
    "opentelemetry-instrumentation-celery",
)
"""Of the extra `dev`, what the core imports: frameworks and object mappers have wishes about versions of their own."""

_PARTS = ("mongo_celery", "tests/fixtures", "tests/integration", "tests/acceptance", "tests/versions")
_PYTHONS = ("3.14", "3.13", "3.12", "3.11")
_REPORTED = ("celery", "kombu", "pymongo", "redis")
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def find_python(version: str, servers: Servers) -> Path:
    """
    Give an interpreter of that version, or the newest that this machine or Debian's archive has.

    Raises:
        MissingError: there is none.
    """
    missing: list[MissingError] = []
    for candidate in _PYTHONS if version == NEWEST else (version,):
        kept = sorted(_pyenv().glob(f"versions/{candidate}.*/bin/python{candidate}"))
        for found in (shutil.which(f"python{candidate}"), *map(str, kept)):
            # A version manager's stand-in is found and yet may not run: only running it tells.
            if found and _runs(found):
                return Path(found)
        try:
            return servers.python(candidate)
        except MissingError as error:
            missing.append(error)
    raise missing[0]


def make_environment(folder: Path, python: Path, packages: Mapping[str, str]) -> Path:
    """
    Make a virtual environment with the project, and give its interpreter; one that is there is kept.

    Args:
        folder: of the environment.
        python: the interpreter.
        packages: pins, by distribution.

    Raises:
        MissingError: these versions cannot be installed together, or not from here.
    """
    interpreter = folder / "bin" / "python"
    done = folder / "complete"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        # Debian has what brings pip into an environment in a package of its own: the newest pip comes from outside.
        subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)
        modules = next(folder.glob("lib/python*/site-packages"))
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--target", modules, "pip"], check=True)
        pins = folder / "pins.txt"
        pins.write_text("".join(f"{name}{pin}\n" for name, pin in packages.items()), encoding="utf-8")
        wanted = [*needed_requirements(), *(f"{name}{pin}" for name, pin in packages.items())]
        command: list[str | Path] = [
            interpreter,
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            "-c",
            pins,
        ]
        installed = subprocess.run(
            [*command, "-e", f"{PROJECT}[metrics,otel]", *wanted], capture_output=True, text=True, check=False
        )
        if installed.returncode:
            said = [line for line in installed.stderr.splitlines() if line.startswith("ERROR")]
            raise MissingError(f"these packages cannot be installed together: {' '.join(said[-2:])}")
        done.touch()
    return interpreter


def needed_requirements() -> list[str]:
    """`NEEDED`, with the bounds that the extra `dev` has for them."""
    with (PROJECT / "pyproject.toml").open("rb") as file:
        extra: list[str] = tomllib.load(file)["project"]["optional-dependencies"]["dev"]
    found = {name[0]: line for line in extra if (name := _NAME.match(line))}
    return [found[name] for name in NEEDED]


def fingerprint() -> str:
    """One word for all files that cells have a part of, as they are now: what a cell came to holds for these alone."""
    digest = hashlib.sha256((PROJECT / "pyproject.toml").read_bytes())
    for file in sorted(path for part in _PARTS for path in (PROJECT / part).rglob("*.*")):
        if file.is_file() and file.suffix != ".pyc":
            digest.update(f"{file.relative_to(PROJECT)}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def versions_in(interpreter: Path) -> dict[str, str]:
    """Give what an environment really has: Python and the packages that the table names."""
    code = (
        "import json, platform; from importlib.metadata import version; "
        f"print(json.dumps({{'python': platform.python_version(), **{{n: version(n) for n in {_REPORTED!r}}}}}))"
    )
    said = subprocess.run([interpreter, "-c", code], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(said.stdout)
    return found


def _pyenv() -> Path:
    """Where pyenv, if it is here, keeps interpreters that are on no path."""
    return Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))


def _runs(program: str) -> bool:
    return subprocess.run([program, "-c", "import venv"], capture_output=True, check=False).returncode == 0
