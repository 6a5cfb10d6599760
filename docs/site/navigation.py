"""What the pages do not say themselves, since the repository's view shows it anyway: which page stands below which."""

import re
from pathlib import Path
from typing import Any

INDEX = "docs/index"
CONTRIBUTING = "CONTRIBUTING"
CONTRIBUTORS = [
    "ARCHITECTURE",
    "tests/README",
    "tests/proofs",
    "tests/change-stream-cases",
    "tests/versions/README",
    "docs/decisions/README",
]
"""Pages below that one, where users do not meet them."""
_LINK = re.compile(r"\[([^\]]*)\]\(([\w./-]+)\)")


def setup(app: Any) -> dict[str, Any]:
    """Sphinx asks for this."""
    app.connect(
        "source-read", lambda _app, page, source: source.append(on_the_site(Path(app.srcdir), page, source.pop()))
    )
    return {"parallel_read_safe": True}


def on_the_site(root: Path, page: str, text: str) -> str:
    """A page's text with links to folders led to their READMEs, and with the list of what stands below it."""
    folder = (root / page).parent
    text = _LINK.sub(lambda link: _link(link, folder), text)
    if page == INDEX:
        return text + _list("More", _unlisted(text, folder)) + _list("Examples", _examples(root))
    if page == CONTRIBUTING:
        return text + _list("", CONTRIBUTORS)
    has_pages = page.endswith("/README") and page.startswith(("docs/", "examples/"))
    return text + _list("", _below(root, folder, text)) if has_pages else text


def _link(link: re.Match[str], folder: Path) -> str:
    """A link to a folder leads to its README, as in the repository's view."""
    text, target = link.groups()
    if not (folder / target).is_dir():
        return link[0]
    return f"[{text}]({target}/README.md)" if (folder / target / "README.md").exists() else text


def _below(root: Path, folder: Path, text: str) -> list[str]:
    """Pages beside a README that the index does not list, in the order of its links, and READMEs one folder down."""
    elsewhere = {root / "docs" / f"{page}.md" for page in _listed((root / f"{INDEX}.md").read_text())}
    beside = sorted(each.stem for each in set(folder.glob("*.md")) - elsewhere if each.stem != "README")
    linked = [link[2].removesuffix(".md") for link in _LINK.finditer(text)]
    beside.sort(key=lambda page: linked.index(page) if page in linked else len(linked))
    return [*beside, *sorted(f"{each.parent.name}/README" for each in folder.glob("*/README.md"))]


def _unlisted(index: str, folder: Path) -> list[str]:
    """Pages that no list of the index names: nothing is left out because somebody forgot it."""
    return sorted(each.stem for each in folder.glob("*.md") if each.stem not in _listed(index) | {"index"})


def _listed(index: str) -> set[str]:
    """The pages that the lists of the index name."""
    return set(re.findall(r"^(?:.+ <)?([\w/-]+)>?$", index, re.MULTILINE))


def _examples(root: Path) -> list[str]:
    """Their list, where there is one, with them below it."""
    return ["/examples/README"] if (root / "examples/README.md").exists() else []


def _list(caption: str, pages: list[str]) -> str:
    if not pages:
        return ""
    head = f":caption: {caption}\n" if caption else ""
    return "\n\n```{toctree}\n:hidden:\n" + head + "\n" + "\n".join(pages) + "\n```\n"
