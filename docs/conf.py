"""
The documentation as a site.

    sphinx-build -n -W -c docs . build/site

from the project's root, which is the source: so a link between two pages is the same in the repository's view and
on the site. Nothing of it asks the network.
"""

import sys
from importlib.metadata import version as version_of
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs/site"))

project = "mongo_celery"
release = version = version_of("mongo-celery")
root_doc = "docs/index"
language = "en"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "navigation",  # these two are in docs/site
    "reference",
]
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "ARCHITECTURE.md",
    "docs/**.md",
    "examples/**.md",
    "tests/*.md",
    "tests/versions/README.md",
]
# Whatever else lies in a checkout is not even looked at: virtual environments, builds, caches.
exclude_patterns = sorted(
    f"{each.name}/**" if each.is_dir() else each.name
    for each in ROOT.iterdir()
    if each.name not in {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "docs", "examples", "tests"}
)

myst_enable_extensions = ["tasklist"]
myst_heading_anchors = 4
# A reason of `changes status --ask` has its heading on one level, whichever page it stands on.
suppress_warnings = ["myst.header"]

nitpicky = True
# Of types in signatures: other people's have no pages here, and ours have them under their public names.
nitpick_ignore_regex = [("py:.*", ".*")]

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"  # beside the API, "outbox()" stands below "Bridge"

html_theme = "furo"
html_title = f"mongo_celery {release}"
html_show_copyright = False
html_copy_source = False
html_show_sourcelink = False
html_additional_pages = {"index": "to_the_first_page.html"}
templates_path = ["site"]
html_static_path = ["site/static"]
html_css_files = ["site.css"]
