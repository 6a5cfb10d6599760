"""The pictures of the documentation are those that their script draws, and can be read without being seen."""

from __future__ import annotations

import importlib.util
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

PICTURES = Path(__file__).parents[2] / "docs/pictures"
SVG = "{http://www.w3.org/2000/svg}"


def _script() -> Any:
    spec = importlib.util.spec_from_file_location("draw", PICTURES / "draw.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


DRAWN = {name: draw() for name, draw in _script().PICTURES.items()}


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_is_the_one_that_its_script_draws(name: str) -> None:
    """Whoever changes the one runs the other: `python docs/pictures/draw.py`."""
    assert (PICTURES / f"{name}.svg").read_text() == DRAWN[name]


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_says_in_words_what_it_shows(name: str) -> None:
    """For who does not see it, in the picture and on the page; and nothing of it is outside of its paper."""
    picture = ET.fromstring(DRAWN[name])
    shown = re.findall(rf"!\[([^\]]+)\]\(pictures/{name}\.svg\)", (PICTURES.parent / "internals.md").read_text())
    _, _, width, height = map(float, picture.attrib["viewBox"].split())

    assert picture.findtext(f"{SVG}title")
    assert len(picture.findtext(f"{SVG}desc") or "") > 200
    assert [len(text) > 80 for text in shown] == [True]
    for text in picture.iter(f"{SVG}text"):
        assert 0 < float(text.attrib["x"]) < width
        assert 0 < float(text.attrib["y"]) < height


def test_no_picture_is_left_over() -> None:
    """Each file there is drawn by the script."""
    assert {file.stem for file in PICTURES.glob("*.svg")} == set(DRAWN)
