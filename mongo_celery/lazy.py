"""Public names of a package, imported at first use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def load_lazily(
    package: str, names: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """
    Return `__getattr__` and `__dir__` of a package.

    Args:
        package: `__name__` of the package.
        names: public names, by the module below the package that defines them.
    """
    homes = {name: module for module, found in names.items() for name in found}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted(homes)
