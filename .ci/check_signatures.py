#!/usr/bin/env python3
"""The signatures on the API pages are broken into lines that fit: python3 check_signatures.py SITE.

Without the formatter that mkdocstrings asks for, each signature is one long line, and mkdocs builds without a warning.
"""

import html
import re
import sys
from pathlib import Path

WIDEST = 80  # characters: `line_length` in mkdocs.yml, and some for what cannot be broken
LEAST = 150  # signatures: this check must find those that it is about
SIGNATURE = re.compile(r'<div class="[^"]*doc-signature[^"]*">\s*<pre>(.*?)</pre>', re.DOTALL)


def main(site: str) -> int:
    """Name every line that is too wide; the exit code."""
    n_found, wrong = 0, []
    for page in sorted(Path(site, "api").rglob("*.html")):
        for signature in SIGNATURE.findall(page.read_text(encoding="utf-8")):
            n_found += 1
            lines = html.unescape(re.sub("<[^>]+>", "", signature)).splitlines()
            wrong += [
                f"{page.parent.name}: {len(line)} characters: {line}" for line in lines if len(line) > WIDEST
            ]
    if n_found < LEAST:
        wrong.append(f"{n_found} signatures were found, {LEAST} were expected")
    print("\n".join(wrong) or f"signatures: no line of {n_found} has more than {WIDEST} characters")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
