#!/usr/bin/env python3
"""Every page of the site fits a phone and a desktop, in a real browser: check_pages.py SITE [PICTURES].

No page is wider than the window, and nothing of its text reaches beyond the right edge, except inside frames that
scroll (code and wide tables). Scripts of the pages raise no errors. The search finds a page. With PICTURES, a folder,
the top of each page is saved there. Needs Playwright and Chromium; `.ci/run browser` installs both.
"""

import functools
import http.server
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

WINDOWS = {"phone": (390, 844), "desktop": (1440, 900)}
LEAST = 30  # pages: this check must find those that it is about
BEYOND = """() => [...document.querySelectorAll('.md-content *')]
  .filter(e => e.getBoundingClientRect().right > innerWidth + 1
               && !e.closest('pre, .md-typeset__scrollwrap, .md-typeset__table, .tabbed-labels'))
  .slice(0, 3).map(e => e.tagName + ': ' + e.textContent.slice(0, 60))"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files without a line for each."""

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def problems(page: Page, url: str, width: int) -> Iterator[str]:
    """What does not fit on one page, and which errors its scripts raise."""
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(url, wait_until="load")
    wide = page.evaluate("document.documentElement.scrollWidth")
    if wide > width:
        yield f"is {wide} pixels wide"
    yield from (f"reaches beyond the edge: {text}" for text in page.evaluate(BEYOND))
    yield from errors


def search(page: Page, url: str) -> Iterator[str]:
    """Whether the search finds the page on GPUs."""
    page.goto(url, wait_until="load")
    page.locator("input.md-search__input").first.fill("NCCL")
    try:
        page.wait_for_selector(".md-search-result__link[href*='gpus']", state="attached", timeout=30_000)
    except Exception as error:
        yield f"the search does not find the page on GPUs: {str(error).splitlines()[0]}"


def check(browser: Browser, site: Path, base: str, pictures: Path | None) -> list[str]:
    """All that is wrong."""
    pages = [path.parent.relative_to(site).as_posix() for path in sorted(site.rglob("index.html"))]
    found = [] if len(pages) >= LEAST else [f"{len(pages)} pages were found, {LEAST} were expected"]
    for window, (width, height) in WINDOWS.items():
        for name in pages:
            page = browser.new_page(viewport={"width": width, "height": height})
            found += [f"{window}, {name}: {text}" for text in problems(page, f"{base}/{name}/", width)]
            if pictures is not None:
                page.screenshot(
                    path=pictures / f"{window}-{name.replace('/', '_').strip('.') or 'index'}.png"
                )
            page.close()
    found += search(browser.new_page(), f"{base}/")
    if not found:
        print(f"pages: all {len(pages)} fit {' and '.join(WINDOWS)}, and the search works")
    return found


def main(site: str, pictures: str = "") -> int:
    """Serve the site, and look at it; the exit code."""
    folder = Path(pictures) if pictures else None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        wrong = check(browser, Path(site), f"http://127.0.0.1:{server.server_port}", folder)
        browser.close()
    server.shutdown()
    print("\n".join(wrong))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
