"""The peer's package: installed by name, with plain npm, into a cache directory."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from mongo_celery.bench.errors import BenchError

NAME, VERSION = "mongochangestream", "0.55.0"
KEY_PREFIX = "mongoChangeStream"
"""How the names of its keys in Redis begin."""

_PACKAGES = (f"{NAME}@{VERSION}", "mongodb@6.22.0", "ioredis@5.11.1")
_INSTALL_SECONDS_MAX = 300
_QUIET = ("--no-audit", "--no-fund", "--ignore-scripts", "--loglevel", "error")


def cache_directory() -> Path:
    """Where the package is, or will be."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mongo_celery" / f"{NAME}-{VERSION}"


def installed(directory: Path) -> Path:
    """
    The directory, with the package in it: a complete installation or none.

    Raises:
        BenchError: there is no Node.js, or npm could not get the package.
    """
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            raise BenchError(f"The peer needs Node.js, and there is no {program} on PATH: install nodejs and npm.")
    if not (directory / "node_modules" / NAME).is_dir():
        _install(directory)
    return directory


def _install(directory: Path) -> None:
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent) as part:
            done = subprocess.run(
                ["npm", "install", *_QUIET, "--prefix", part, *_PACKAGES],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_INSTALL_SECONDS_MAX,
                check=False,
            )
            if done.returncode:
                words = done.stderr.strip().splitlines() or ["it said nothing"]
                raise BenchError(f"npm could not install {' '.join(_PACKAGES)}: {words[0]}. Check npm's registry.")
            (Path(part) / "node_modules").rename(_made(directory) / "node_modules")
    except subprocess.TimeoutExpired:
        raise BenchError(f"npm did not install {NAME} within {_INSTALL_SECONDS_MAX} s. Check npm's registry.") from None
    except OSError as error:
        raise BenchError(f"{directory} cannot have the peer: {error.strerror}. Set XDG_CACHE_HOME.") from error


def _made(directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    return directory
