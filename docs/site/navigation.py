"""What the pages do not say themselves, since the repository's view shows it anyway: which page stands below which."""

import re
from pathlib import Path
from typing import Any

INDEX = "docs/index"
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
    return text + _list("", _below(folder)) if page.endswith("/README") else text


def _link(link: re.Match[str], folder: Path) -> str:
    """A link to a folder leads to its README, as in the repository's view."""
    text, target = link.groups()
    if not (folder / target).is_dir():
        return link[0]
    return f"[{text}]({target}/README.md)" if (folder / target / "README.md").exists() else text


def _below(folder: Path) -> list[str]:
    """The pages beside a README, and the READMEs one folder down."""
    beside = sorted(each.stem for each in folder.glob("*.md") if each.stem != "README")
    return [*beside, *sorted(f"{each.parent.name}/README" for each in folder.glob("*/README.md"))]


def _unlisted(index: str, folder: Path) -> list[str]:
    """Pages that no list of the index names: nothing is left out because somebody forgot it."""
    listed = set(re.findall(r"^(?:[\w ]+ <)?([\w/-]+)>?$", index, re.MULTILINE)) | {"index"}
    return sorted(each.stem for each in folder.glob("*.md") if each.stem not in listed)


def _examples(root: Path) -> list[str]:
    """Their list, where there is one, with them below it."""
    below = ["README"] if (root / "examples/README.md").exists() else _below(root / "examples")
    return [f"/examples/{each}" for each in below]


def _list(caption: str, pages: list[str]) -> str:
    if not pages:
        return ""
    head = f":caption: {caption}\n" if caption else ""
    return "\n\n```{toctree}\n:hidden:\n" + head + "\n" + "\n".join(pages) + "\n```\n"
