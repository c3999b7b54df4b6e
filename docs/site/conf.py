"""The documentation as a website: `make docs` writes it to out/docs.

The pages are README.md, CONTRIBUTING.md, CHANGELOG.md and docs/, as they stand in the repository, and docs/api.rst,
which Sphinx fills with the docstrings of the public names. A link that leads nowhere is a warning, and so an error.
"""

import sys
from pathlib import Path

from sphinx import addnodes

from raggedmoe import __version__

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

project, version, author = "raggedmoe", __version__, "the raggedmoe authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "directives"]
root_doc = "README"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "docs/api.rst"]
exclude_patterns = [".*", "out", "src", "tests", "examples"]  # is not searched
html_theme = "furo"
html_title = "raggedmoe"
html_extra_path = ["index.html"]
html_copy_source = False

myst_heading_anchors = 4  # as on the pages of a repository: docs/train.md#object-storage
default_role = "code"  # docstrings have `names` in single backticks, as Markdown has
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True

PAGES = {
    "Use it": [
        *("docs/howto", "docs/train", "docs/models", "docs/checkpoints", "docs/compile", "docs/launch", "docs/maxtext"),
    ],
    "How it works": [
        *("docs/architecture", "docs/route", "docs/dispatch", "docs/experts", "docs/kernels", "docs/parallel"),
        *("docs/grouped_matmul", "docs/expert_ffn", "docs/sparsecore", "docs/native", "docs/quantised"),
    ],
    "Reference": ["docs/api", "docs/speed", "docs/verify", "docs/tpu-matrix", "docs/mutants", "docs/log"],
    "Project": ["CONTRIBUTING", "CHANGELOG"],
}


def add_contents(app, docname, source):
    """Give the first page, which is the repository's README, the table of contents that the site is navigated by."""
    if docname == root_doc:
        for caption, pages in PAGES.items():
            source[0] += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""])


def leave_out_folders(app, doctree):
    """Take a link to a folder of the repository, which is no page, for its text."""
    page = Path(doctree["source"]).parent
    for node in list(doctree.findall(addnodes.pending_xref)):
        if (page / node["reftarget"]).is_dir():
            node.replace_self(node.children)


def shorten_signature(app, what, name, obj, options, signature, returned):
    """Leave out what a page says elsewhere: fields have lines of their own, and a module's constructor is a member."""
    if what == "class":
        return "", ""
    if signature is None:
        return None
    return signature.replace("jaxlib._jax.", ""), (returned or "").replace("jaxlib._jax.", "")


def setup(app):
    """Add them to Sphinx."""
    app.connect("autodoc-process-signature", shorten_signature)
    app.connect("source-read", add_contents)
    app.connect("doctree-read", leave_out_folders)
