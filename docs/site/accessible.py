"""What the theme's pages lack for a keyboard and a screen reader."""

from __future__ import annotations

import re
from pathlib import Path

_MENDS = (
    # What scrolls sideways can be reached by keyboard.
    (r"<pre>", '<pre tabindex="0">'),
    (r'<div class="table-wrapper', '<div tabindex="0" class="table-wrapper'),
    # A heading has a level, and two columns at the sides have names.
    (r'<p class="caption" role="heading">', '<p class="caption" role="heading" aria-level="2">'),
    (r'<aside class="sidebar-drawer">', '<aside class="sidebar-drawer" aria-label="All pages">'),
    (r'<aside class="(toc-drawer[^"]*)">', r'<aside class="\1" aria-label="This page">'),
    # The corner of a table is the head of nothing.
    (r'<th class="head"><p></p></th>', '<td class="head"></td>'),
    (r'<div id="search-results">', '<h1>Search</h1>\n<div id="search-results">'),
)


def mended(page: str) -> str:
    """The page with it."""
    for wrong, right in _MENDS:
        page = re.sub(wrong, right, page)
    return page


def mend(folder: Path) -> None:
    """All pages below a folder, where they are."""
    for path in sorted(folder.rglob("*.html")):
        path.write_text(mended(path.read_text(encoding="utf-8")), encoding="utf-8")
