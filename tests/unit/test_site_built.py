"""The documentation's site as it is built: where links lead, what a page asks for, how it looks in a browser."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import browser
from helpers import PYTHON, ROOT

WIDTHS = (360, 1440)
PAGES = ("index", "start", "concepts", "sites/lumi", "reference/recipe", "reference/commands/run", "metrics", "remote")
STYLE = "<style>iframe { border: 0 }</style>"
MEASURE = """
onload = () => {
  const found = [...document.querySelectorAll('iframe')].map((frame) => {
    const page = frame.contentDocument;
    return [frame.title, page.querySelector('h1').textContent.length, page.documentElement.scrollWidth];
  });
  document.body.append(Object.assign(document.createElement('pre'), {id: 'found', textContent: JSON.stringify(found)}));
};
"""


class Page(HTMLParser):
    """Where a page's links lead, what it loads, and the anchors that it has."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.anchors.update(filter(None, (named.get("id"), named.get("name") if tag == "a" else None)))
        if tag == "a" and named.get("href"):
            self.links.append(str(named["href"]))
        elif tag in ("script", "img", "link", "iframe", "source"):
            self.loads += filter(None, (named.get("src"), named.get("href")))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That of `make docs`, which .ci/run has made; else one of its own."""
    if found := os.environ.get("DRAY_TEST_DOCS"):
        return Path(found)
    folder = tmp_path_factory.mktemp("docs")
    argv = [sys.executable, "docs/site", str(folder)]
    subprocess.run(argv, cwd=ROOT, env={**PYTHON}, check=True, stdout=subprocess.DEVNULL)
    return folder


def test_every_link_and_anchor_is_there_and_nothing_comes_from_elsewhere(site: Path) -> None:
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html")}
    assert len(pages) > 100
    broken = []
    for path, page in pages.items():
        for link in page.links + page.loads:
            parts = urlsplit(link)
            if parts.scheme in ("https", "http", "mailto", "data") and link in page.links:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            there = target.exists() and not parts.scheme and not parts.netloc
            if there and parts.fragment and target in pages:
                there = unquote(parts.fragment) in pages[target].anchors
            if not there:
                broken.append((path.name, link))
    assert broken == []


@pytest.mark.skipif(not browser.program() and "DRAY_TEST_ALL" not in os.environ, reason="no Chromium")
def test_pages_fit_a_phone_and_a_desk(site: Path, tmp_path: Path) -> None:
    """Tables and code scroll inside their own box, the page itself never."""
    frames = "".join(
        f'<iframe title="{name}" style="width:{width}px;height:900px" src="{(site / name).as_uri()}.html"></iframe>'
        for name in PAGES
        for width in WIDTHS
    )
    harness = tmp_path / "harness.html"
    harness.write_text(
        f"<!doctype html><meta charset=utf-8>{STYLE}<body>{frames}<script>{MEASURE}</script>", encoding="utf-8"
    )
    words = ("--dump-dom", "--allow-file-access-from-files", "--window-size=1600,1200")
    ended = browser.chromium(*words, harness.as_uri(), folder=tmp_path)
    assert browser.console(ended) == []
    told = re.search(r'<pre id="found">(.*?)</pre>', ended.stdout, re.DOTALL)
    assert told, ended.stderr
    seen = json.loads(html.unescape(told[1]))
    wide = [width for _ in PAGES for width in WIDTHS]
    assert [(name, scrolls) for (name, _, scrolls), width in zip(seen, wide, strict=True) if scrolls > width] == []
    assert all(letters > 3 for _, letters, _ in seen)
