"""A page in a real Chromium without a window: what it draws at a width, and what it says to its console."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")

# What a text and what is behind it look like, as computed, and their contrast by WCAG 2.
INK = """
const channels = (text) => text.match(/[\\d.]+/g).map(Number);
function colour(frame, owner) {
  const text = channels(frame.contentWindow.getComputedStyle(owner).color);
  for (let up = owner; up; up = up.parentElement) {
    const ground = channels(frame.contentWindow.getComputedStyle(up).backgroundColor);
    if (ground.length < 4 || ground[3] == 1) return {text, ground};
  }
  return {text, ground: [255, 255, 255]};
}
function contrast(a, b) {
  const light = (rgb) => {
    const [r, g, b] = rgb.slice(0, 3).map((c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const [one, other] = [light(a), light(b)].sort((x, y) => y - x);
  return (one + 0.05) / (other + 0.05);
}
"""

# The page is in frames of these widths, whose media queries go by them; the page itself has no script and allows none.
_MEASURE = """
const rough = (box) => [box.left, box.top, box.right, box.bottom].map(Math.round);
function look(frame) {
  const page = frame.contentDocument, wide = frame.clientWidth, found = {wide};
  for (const kind of ['clipped', 'overlap', 'drawn', 'faint']) found[kind] = [];
  found.scrolls = page.documentElement.scrollWidth;
  const walk = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const text = walk.currentNode, owner = text.parentElement, range = page.createRange();
    range.selectNodeContents(text);
    const box = range.getBoundingClientRect();
    if (!text.data.trim() || !box.width) continue;
    const region = owner.closest('.scroll'), inside = region ? region.scrollWidth : wide;
    const left = region ? box.left - region.getBoundingClientRect().left + region.scrollLeft : box.left;
    const right = left + box.width;
    let cut = left < -1 || right > inside + 1;
    for (let up = owner; up; up = up.parentElement) {
      const how = frame.contentWindow.getComputedStyle(up), at = up.getBoundingClientRect();
      if (how.overflowX != 'visible' && !up.matches('.scroll, html, body')) cut ||= box.right > at.right + 1;
    }
    if (cut) found.clipped.push([text.data.slice(0, 60), ...rough(box)]);
    const ink = colour(frame, owner), ratio = contrast(ink.text, ink.ground);
    if (ratio < 4.5) found.faint.push([text.data.slice(0, 40), Math.round(ratio * 100) / 100]);
  }
  for (const plane of page.querySelectorAll('.plane, .rows')) {
    for (const kind of ['.tick.across', '.tick.up']) {
      const boxes = [...plane.querySelectorAll(kind)].map((tick) => [tick.textContent, tick.getBoundingClientRect()]);
      boxes.forEach(([name, a], n) => boxes.slice(n + 1).forEach(([other, b]) => {
        const beside = a.left >= b.right || b.left >= a.right || a.top >= b.bottom || b.top >= a.bottom;
        if (!beside) found.overlap.push([name, other]);
      }));
    }
  }
  for (const figure of page.querySelectorAll('figure')) {
    const boxes = [...figure.querySelectorAll('.curve, .dots, rect, .bar i')].map((one) => one.getBoundingClientRect());
    const most = (side) => Math.max(0, ...boxes.map((box) => box[side]));
    const title = figure.querySelector('figcaption').textContent;
    found.drawn.push([title, Math.round(most('width')), Math.round(most('height'))]);
  }
  return found;
}
onload = () => {
  document.body.append(Object.assign(document.createElement('pre'), {
    id: 'found', textContent: JSON.stringify([...document.querySelectorAll('iframe')].map(look)),
  }));
};
"""


def program() -> str | None:
    """The browser that this machine has."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def chromium(*words: str, folder: Path, dark: bool = False) -> subprocess.CompletedProcess[str]:
    """Run it with a profile in this folder."""
    browser = program()
    assert browser
    argv = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
        "--no-first-run", "--disable-extensions", "--disable-background-networking", "--enable-logging=stderr",
        f"--user-data-dir={folder / 'profile'}", f"--blink-settings=preferredColorScheme={0 if dark else 1}", *words,
    ]  # fmt: skip
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)


def console(ended: subprocess.CompletedProcess[str]) -> list[str]:
    """What pages have said, and what was refused to them."""
    return re.findall(r"CONSOLE[^\n]*", ended.stderr)


def measured(page: Path, widths: tuple[int, ...], folder: Path, *, dark: bool = False) -> list[dict[str, Any]]:
    """For each width what is clipped, what overlaps, what is drawn, and what is too faint to be read."""
    content = html.escape(page.read_text(encoding="utf-8"))
    frames = "".join(f'<iframe style="width:{w}px;height:900px;border:0" srcdoc="{content}"></iframe>' for w in widths)
    harness = folder / "harness.html"
    harness.write_text(
        f"<!doctype html><meta charset=utf-8><body>{frames}<script>{INK}{_MEASURE}</script>", encoding="utf-8"
    )
    ended = chromium(
        "--dump-dom", f"--window-size={max(widths) + 100},1200", harness.as_uri(), folder=folder, dark=dark
    )
    found = re.search(r'<pre id="found">(.*?)</pre>', ended.stdout, re.DOTALL)
    assert found, ended.stderr
    assert console(ended) == []
    return json.loads(html.unescape(found[1]))


def screenshot(
    page: Path, picture: Path, width: int, height: int, folder: Path, *, dark: bool = False, tops: Sequence[int] = (0,)
) -> None:
    """Of a page at a width, which a window of 500 and less does not have: so it is in frames, which begin at `tops`."""
    frame = folder / "frame.html"
    frames = [
        f'<div style="width:{width}px;height:{height}px;overflow:hidden;flex:none"><iframe style="width:{width}px;'
        f'height:{height + top}px;margin-top:-{top}px;border:0" src="{page.as_uri()}"></iframe></div>'
        for top in tops
    ]
    body = f'<body style="margin:0;display:flex">{"".join(frames)}'
    frame.write_text(f"<!doctype html><meta charset=utf-8>{body}", encoding="utf-8")
    window = f"--window-size={max(width * len(tops), 500)},{height}"
    chromium(f"--screenshot={picture}", window, frame.as_uri(), folder=folder, dark=dark)
