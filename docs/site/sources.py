"""The pages of the site: docs/ as it is on GitHub, and what is made from models, verbs and sites."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import commands
import keys
import sites

# Pages beside docs/, and their names on the site.
_BESIDE = {
    "README.md": "readme.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-policy.md",
}
_LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")
_ENTRY = re.compile(r"^- \[[^\]]+\]\(([^)\s#]+)\)", re.MULTILINE)
_DECISIONS = "adr"


def write(root: Path, out: Path) -> None:
    """All pages, into an empty folder."""
    made = {**commands.pages(), **keys.pages()}
    pages = _ours(root)
    pages |= sites.pages(pages["sites.md"])
    pages[f"{_DECISIONS}/index.md"] = _decisions(pages)
    for name, text in pages.items():
        # Each page has the whole menu, so the decisions are not in it.
        apart = (
            "---\norphan: true\n---\n\n" if Path(name).parts[0] == _DECISIONS and not name.endswith("index.md") else ""
        )
        _put(out / name, apart + _fitting(root, out, name, text))
    for name, text in made.items():
        _put(out / name, text)
    _add(out / "index.md", _navigation((out / "index.md").read_text(encoding="utf-8")))
    _add(out / "reference/README.md", _toctree([Path(name).name for name in made if name.count("/") == 1]))


def _ours(root: Path) -> dict[str, str]:
    docs = root / "docs"
    found = {path.relative_to(docs).as_posix(): path for path in sorted(docs.rglob("*.md"))}
    found |= {name: root / file for file, name in _BESIDE.items()}
    return {name: path.read_text(encoding="utf-8") for name, path in found.items()}


def _fitting(root: Path, out: Path, name: str, text: str) -> str:
    """Links as the site needs them: to a folder's list, and to a copy of a file that is not a page."""
    beside = {ours: file for file, ours in _BESIDE.items()}
    origin = root / beside[name] if name in beside else root / "docs" / name

    def fit(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(origin.parent / link[1]))
        if ":" in link[1] or not target.exists() or not target.is_relative_to(root):
            return link[0]
        site = _on_site(root, out, target)
        return f"]({os.path.relpath(site, (out / name).parent)}{link[2] or ''})"

    return _LINK.sub(fit, text)


def _on_site(root: Path, out: Path, target: Path) -> Path:
    path = target.relative_to(root)
    if path.as_posix() in _BESIDE:
        return out / _BESIDE[path.as_posix()]
    if path.parts[0] == "docs" and path.suffix == ".md":
        return out / path.relative_to("docs")
    if target.is_dir():
        if path.parts[0] != "docs":
            raise ValueError(f"the site has no list of {path}: link to a file in it")
        readme = target / "README.md"
        return out / path.relative_to("docs") / ("README.md" if readme.exists() else "index.md")
    # A page beside docs/ is no page of the site.
    copied = out / "files" / (path.with_suffix(".md.txt") if path.suffix == ".md" else path)
    copied.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(target, copied)
    return copied


def _decisions(pages: dict[str, str]) -> str:
    names = sorted(Path(name).stem for name in pages if name.startswith(f"{_DECISIONS}/"))
    titles = {name: pages[f"{_DECISIONS}/{name}.md"].splitlines()[0].lstrip("# ") for name in names}
    links = "\n".join(f"- [{title}]({name}.md)" for name, title in titles.items())
    return f"# Decisions\n\n{links}\n"


def _navigation(index: str) -> str:
    """The site's menu is the start page itself: each of its headings, and the pages that it lists."""
    parts = re.split(r"^## ", index, flags=re.MULTILINE)[1:]
    lists = [(part.splitlines()[0], _ENTRY.findall(part)) for part in parts]
    return "".join(_toctree(names, caption) for caption, names in lists if names)


def _toctree(names: list[str], caption: str = "") -> str:
    line = f":caption: {caption}\n" if caption else ""
    return f"\n```{{toctree}}\n:hidden:\n{line}\n" + "\n".join(names) + "\n```\n"


def _add(file: Path, text: str) -> None:
    with file.open("a", encoding="utf-8") as page:
        page.write(text)


def _put(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
