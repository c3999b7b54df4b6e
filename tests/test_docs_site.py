"""The pages lead somewhere: links and anchors of the Markdown files, and of the website that `make docs` builds."""

import re
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import raggedmoe
from raggedmoe.train.settings.config import SECTIONS

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
SITE = ROOT / "docs" / "site"


def without_code(text):
    """The text of a page without blocks and words of code, in which a bracket is no link."""
    return re.sub(r"`[^`\n]*`", "code", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))


def anchors(page):
    """The anchors of a page's headings, as repositories and the website make them."""
    headings = re.findall(r"^#+ +(.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), flags=re.M)
    slugs = [
        re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).lower()).replace(" ", "-")
        for text in headings
    ]
    return {
        slug if not slugs[:number].count(slug) else f"{slug}-{slugs[:number].count(slug)}"
        for number, slug in enumerate(slugs)
    }


def dead_links(page, text):
    """The links of a page's text that lead to no file, or to no heading of one."""
    dead = []
    for target in re.findall(r"\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)", without_code(text)):
        parts = urlsplit(target)
        if parts.scheme:
            continue
        file = page.parent / unquote(parts.path) if parts.path else page
        if not file.exists() or not file.resolve().is_relative_to(ROOT):
            dead.append(f"{target}: no such file")
        elif parts.fragment and (file.suffix != ".md" or unquote(parts.fragment) not in anchors(file)):
            dead.append(f"{target}: no such heading")
    return dead


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading_that_are_there(page):
    assert dead_links(page, page.read_text()) == []


def test_a_dead_link_is_seen():
    text = (
        "[a](docs/gone.md) [b](docs/train.md#gone) [c](#gone) `[d](e)` [f](docs/train.md#object-storage) [g](https://h)"
    )
    assert dead_links(ROOT / "README.md", text) == [
        "docs/gone.md: no such file",
        "docs/train.md#gone: no such heading",
        "#gone: no such heading",
    ]


def test_the_reference_has_every_public_name():
    """Of `raggedmoe` and `raggedmoe.interop`, and each section of settings beside its class."""
    text = (ROOT / "docs" / "api.rst").read_text()
    names = set(re.findall(r"^ *from \S+ import (\w+) as \1$", Path(raggedmoe.__file__).read_text(), re.M))
    names |= {f"raggedmoe.interop.{name}" for name in raggedmoe.interop.__all__}
    names -= {"interop", "__version__"}
    assert len(names) > 30
    documented = set(re.findall(r"^\.\. (?:auto)?(?:class|function):: ([\w.]+)", text, re.M))
    assert documented == names
    assert set(re.findall(r"\.\. settings:: (\w+)", text)) == set(SECTIONS)


def test_the_readme_explains_every_extra():
    table = re.search(r"^\| extra \|.*?\n\n", (ROOT / "README.md").read_text(), re.M | re.S).group()
    explained = re.findall(r"^\| `(\w+)` \|", table, re.M)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert sorted(explained) == sorted(extras)
    of_all = re.findall(r"\w+", extras["all"][0].partition("[")[2])
    assert sorted(explained[1 : 1 + len(of_all)]) == of_all


class _Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, path):
        super().__init__()
        self.path, self.links, self.ids = path, [], set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.ids |= {values.get("id")}
        self.links += [values[name] for name in ("href", "src") if values.get(name)]


@pytest.mark.ci
def test_the_website_is_built_without_a_warning_and_its_links_lead_somewhere(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", str(SITE), str(ROOT), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    pages = {path: _Page(path) for path in tmp_path.rglob("*.html") if "_static" not in path.parts}
    assert {path.name for path in pages} >= {"index.html", "README.html", "api.html", "train.html"}
    dead = []
    for page in pages.values():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or link.startswith("//"):
                continue
            target = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path
            found = target.exists() and (
                not parts.fragment or target not in pages or unquote(parts.fragment) in pages[target].ids
            )
            dead += [] if found else [f"{page.path.name}: {link}"]
    assert dead == []
    reference = (tmp_path / "docs" / "api.html").read_text()
    for text in (
        "Compute the layer on",
        "Who picks the experts: the scores",
        "per_device_batch_size",
        "preferred_element_type",
    ):
        assert text in reference
