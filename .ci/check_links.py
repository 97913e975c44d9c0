"""The pages of an sdist link only to what it holds: python3 .ci/check_links.py samestep-1.0.tar.gz."""

import posixpath
import re
import sys
import tarfile

PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")  # a colon: to another site


def main(path: str) -> int:
    """Name what is missing; the exit code."""
    with tarfile.open(path) as sdist:
        root = sdist.getnames()[0].partition("/")[0]
        held = {name.removeprefix(f"{root}/") for name in sdist.getnames()}
        held |= {posixpath.dirname(name) for name in held}
        texts = {page: sdist.extractfile(f"{root}/{page}").read().decode() for page in PAGES if page in held}
    missing = [f"{page}: not in the sdist" for page in PAGES if page not in texts]
    n_links = 0
    for page, text in texts.items():
        for target in LINK.findall(text):
            n_links += 1
            if posixpath.normpath(target) not in held:
                missing.append(f"{page}: links to {target}, which is not in the sdist")
    print("\n".join(missing) or f"links: {n_links} lead to what the sdist holds")
    return 1 if missing or not n_links else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
