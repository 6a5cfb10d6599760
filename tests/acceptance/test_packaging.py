"""What users install: the source distribution and the wheel that is built from it, in a clean place."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tomllib
from itertools import chain
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]
EXTRAS = {"redis", "servers", "django", "flask", "metrics", "otel"}

pytestmark = pytest.mark.slow  # pip builds and installs, with the package index


def _run(*command: str | Path, folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    source = folder / "source"
    source.mkdir()
    names = _run("git", "ls-files", "-z", folder=ROOT).split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    _run(sys.executable, "-m", "build", "--outdir", folder, source, folder=folder)
    return folder


def test_the_wheel_has_every_file_of_the_package_and_no_other(built: Path) -> None:
    """Templates, pages and `py.typed` too; neither tests nor examples."""
    (wheel,) = built.glob("*.whl")
    with ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    tracked = set(_run("git", "ls-files", "mongo_celery", folder=ROOT).split())

    assert packed == tracked
    assert "mongo_celery/py.typed" in packed


def test_the_source_distribution_has_what_the_wheel_is_built_of(built: Path) -> None:
    """And the licence and the README."""
    (source,) = built.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}

    assert {"LICENSE", "README.md", "pyproject.toml", "mongo_celery/py.typed"} <= packed


def test_the_wheel_runs_in_a_clean_place(built: Path, tmp_path: Path) -> None:
    """With nothing but its dependencies: the commands, Celery's plug-ins, and every public name."""
    _run(sys.executable, "-m", "venv", tmp_path / "venv", folder=tmp_path)
    programs = tmp_path / "venv" / "bin"
    (wheel,) = built.glob("*.whl")
    _run(programs / "python", "-m", "pip", "install", "-q", f"{wheel}[redis]", folder=tmp_path)

    assert "demo" in _run(programs / "mongo-celery", "--help", folder=tmp_path)
    commands = _run(programs / "celery", "--help", folder=tmp_path)
    assert {"listener", "changes", "outbox", "transactions"} <= set(commands.split())
    code = "import mongo_celery as m; [getattr(m, name) for name in m.__all__]; print(m.__version__)"
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert _run(programs / "python", "-c", code, folder=tmp_path).strip() == version


def test_every_extra_is_there_and_no_dependency_has_an_upper_bound() -> None:
    """A cap needs a reason, which this test would have to name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    bounds = [line.partition(";")[0] for line in chain(project["dependencies"], *extras.values())]

    assert set(extras) >= EXTRAS
    assert [line for line in bounds if "<" in line or "==" in line or "~=" in line] == []
