"""`python docs/site OUT`: build the documentation as a site, without a network. Each warning is an error."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import accessible
import sources
from sphinx.cmd.build import main as sphinx

HERE = Path(__file__).resolve().parent


def build(out: Path) -> int:
    """Write the site into `out`, in place of what was there; what Sphinx ended with."""
    with TemporaryDirectory(prefix="dray-docs-") as made:
        pages, html = Path(made, "pages"), Path(made, "html")
        sources.write(HERE.parents[1], pages)
        argv = ["-c", str(HERE), "-d", str(Path(made, "doctrees")), "-b", "html", "-q", "-W", "--keep-going"]
        code = sphinx([*argv, str(pages), str(html)])
        if code == 0:
            accessible.mend(html)
            (html / ".buildinfo").unlink(missing_ok=True)
            shutil.rmtree(out, ignore_errors=True)
            out.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(html, out)
    return code


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/site OUT")
    os.environ.setdefault("SOURCE_DATE_EPOCH", "0")  # the same bytes on another day
    built = Path(sys.argv[1])
    if code := build(built):
        sys.exit(code)
    print(built / "index.html")
