"""The documentation's site as it is built: where links lead, what a page asks for, how it looks in a browser."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import browser
from helpers import PYTHON, ROOT

pytestmark = pytest.mark.slow

WIDTHS = (360, 1440)
PAGES = (
    "index",
    "start",
    "concepts",
    "sites/lumi",
    "reference/recipe",
    "reference/commands/run",
    "reference/metrics",
    "runs",
)
STYLE = "<style>iframe { border: 0 }</style>"
MEASURE = """
onload = () => {
  const found = [...document.querySelectorAll('iframe')].map((frame) => {
    const page = frame.contentDocument, walk = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT), faint = [];
    while (walk.nextNode()) {
      const owner = walk.currentNode.parentElement, text = walk.currentNode.data.trim();
      if (!text || owner.closest('script, style, svg') || !owner.checkVisibility()) continue;
      const ink = colour(frame, owner), ratio = contrast(ink.text, ink.ground);
      if (ratio < 4.5) faint.push([text.slice(0, 40), ratio]);
    }
    const letters = page.querySelector('h1').textContent.length;
    return [frame.title, letters, page.documentElement.scrollWidth, faint];
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
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.tags.append((tag, named))
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


@pytest.mark.seconds
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


@pytest.mark.seconds
def test_what_a_screen_reader_and_a_keyboard_need(site: Path) -> None:
    """Of what axe looks at, all that the text of a page shows."""
    lacking = []
    for path in sorted(site.rglob("*.html")):
        text = path.read_text(encoding="utf-8")
        tags = Page(path).tags
        levels = [int(tag[1]) for tag, _ in tags if re.fullmatch("h[1-6]", tag)]
        sides = [named.get("aria-label") for tag, named in tags if tag == "aside"]
        inputs = [named for tag, named in tags if tag == "input" and named.get("type") not in ("hidden", "checkbox")]
        found = {
            "one h1": levels.count(1) == 1,
            "headings in order": all(below - above <= 1 for above, below in pairwise(levels)),
            "a language": ("html", "en") in [(tag, named.get("lang")) for tag, named in tags],
            "a title": any(tag == "title" for tag, _ in tags),
            "named columns": all(sides) and len(set(sides)) == len(sides),
            "images with a text": all("alt" in named for tag, named in tags if tag == "img"),
            "labels": all(named.get("aria-label") for named in inputs),
            "levels": all(named.get("aria-level") for _, named in tags if named.get("role") == "heading"),
            "no empty head": not re.search(r"<th\b[^>]*>(\s|<p>|</p>)*</th>", text),
            "code by keyboard": all("tabindex" in named for tag, named in tags if tag == "pre"),
            "links with a text": not re.search(r"<a\b(?![^>]*aria-label)[^>]*>\s*</a>", text),
        }
        lacking += [(path.relative_to(site).as_posix(), name) for name, good in found.items() if not good]
    assert lacking == []


@pytest.mark.slow
def test_another_build_has_the_same_bytes(site: Path, tmp_path: Path) -> None:
    """On another day, elsewhere, in another language and another order of names."""
    again, env = tmp_path / "an other place", {**PYTHON, "TZ": "Asia/Tokyo", "LANG": "C", "PYTHONHASHSEED": "7"}
    argv = [sys.executable, "docs/site", str(again)]
    subprocess.run(argv, cwd=ROOT, env={**env, "HOME": str(tmp_path)}, check=True, stdout=subprocess.DEVNULL)
    ours, theirs = (
        {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
        for folder in (site, again)
    )
    assert [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)] == []


@pytest.mark.seconds
@pytest.mark.skipif(not browser.program() and "DRAY_TEST_ALL" not in os.environ, reason="no Chromium")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_pages_fit_a_phone_and_a_desk_and_no_text_is_faint(site: Path, tmp_path: Path, *, dark: bool) -> None:
    """Tables and code scroll inside their own box, the page itself never."""
    frames = "".join(
        f'<iframe title="{name}" style="width:{width}px;height:900px" src="{(site / name).as_uri()}.html"></iframe>'
        for name in PAGES
        for width in WIDTHS
    )
    harness = tmp_path / "harness.html"
    harness.write_text(
        f"<!doctype html><meta charset=utf-8>{STYLE}<body>{frames}<script>{browser.INK}{MEASURE}</script>",
        encoding="utf-8",
    )
    words = ("--dump-dom", "--allow-file-access-from-files", "--window-size=1600,1200")
    ended = browser.chromium(*words, harness.as_uri(), folder=tmp_path, dark=dark)
    assert browser.console(ended) == []
    told = re.search(r'<pre id="found">(.*?)</pre>', ended.stdout, re.DOTALL)
    assert told, ended.stderr
    seen = json.loads(html.unescape(told[1]))
    wide = [width for _ in PAGES for width in WIDTHS]
    assert [(name, scrolls) for (name, _, scrolls, _), width in zip(seen, wide, strict=True) if scrolls > width] == []
    assert all(letters > 3 for _, letters, _, _ in seen)
    assert [(name, faint) for name, _, _, faint in seen if faint] == []
