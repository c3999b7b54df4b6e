"""A page as a test sees it."""

from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "br"}


class Page(HTMLParser):
    """The texts of a page: of everything, of tiles by name, of tables by class and row. Fails if tags do not match."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text()
        self.open: list[str] = []
        self.text, self.headings, self.missing = "", [], []
        self.tiles: dict[str, str] = {}
        self.tables: dict[str, list[list[str]]] = {}
        self.seen: set[str] = set()
        self._name = self._tile = self._kind = ""
        self.feed(self.source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        if tag in VOID:
            return
        self.open.append(tag)
        kind = dict(attrs).get("class") or ""
        if tag == "table":
            self._name = kind.split()[0]
            self.tables[self._name] = []
        elif tag == "tr" and "tbody" in self.open:
            self.tables[self._name].append([])
        elif tag == "td":
            self.tables[self._name][-1].append("")
        elif tag in ("h2", "h3"):
            self.headings.append("")
        elif kind == "missing":
            self.missing.append("")
        self._kind = kind

    def handle_startendtag(self, tag, attrs):
        self.seen.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" in self.open:
            return
        self.text += data
        if "td" in self.open:
            self.tables[self._name][-1][-1] += data
        elif self.open and self.open[-1] == "dt":
            self._tile = data
        elif self._kind == "value" and self.open[-1] == "span":
            self.tiles[self._tile] = data
        elif self.open and self.open[-1] in ("h2", "h3"):
            self.headings[-1] += data
        elif self._kind == "missing" and self.open[-1] == "p":
            self.missing[-1] += data
