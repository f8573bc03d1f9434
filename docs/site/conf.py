"""Sphinx's configuration. Sphinx reads these names; `__main__.py` says where the pages are."""

from __future__ import annotations

from pathlib import Path

project = "dray"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "dray"
html_static_path = [str(Path(__file__).parent / "static")]
html_css_files = ["dray.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
# A page that is opened from a disk may not fetch another one for its text.
html_show_search_summary = False
html_theme_options = {"navigation_with_keys": False}
language = "en"

myst_enable_extensions = ["attrs_inline", "deflist"]
myst_heading_anchors = 4
myst_all_links_external = False
suppress_warnings = [
    "misc.highlighting_failure",  # an excerpt may be cut
    "myst.header",  # a page of GitHub may begin at any level
]
exclude_patterns = ["files"]
