"""Writes `[project.urls]` of pyproject.toml for a repository; a release does so before it builds.

python .ci/project_urls.py https://github.com/OWNER/NAME [PYPROJECT]

The tree itself names no address: only the repository that publishes knows which one is its own. Written twice, the file
is the same.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
REPOSITORY = re.compile(r"https://[A-Za-z0-9.-]+(:\d+)?/[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+")
TABLE = re.compile(r"^\[project\.urls\]\n(?:[^\[\n].*\n|\n)*", re.M)
NEXT = "[project.optional-dependencies]\n"


def table(repository: str) -> str:
    """The lines of `[project.urls]` for the address of a repository, with an empty line behind them."""
    urls = {
        "Source": repository,
        "Issues": f"{repository}/issues",
        "Changelog": f"{repository}/blob/HEAD/CHANGELOG.md",
        "Documentation": f"{repository}/blob/HEAD/docs/index.md",
    }
    return "[project.urls]\n" + "".join(f'{name} = "{url}"\n' for name, url in urls.items()) + "\n"


def with_urls(project: str, repository: str) -> str:
    """The text of a pyproject.toml with the addresses of `repository`, in place of those that it has."""
    if not REPOSITORY.fullmatch(repository):
        raise SystemExit(f"not the address of a repository: {repository!r}; it is https://HOST/OWNER/NAME")
    without = TABLE.sub("", project)
    if without.count(NEXT) != 1:
        raise SystemExit(f"pyproject.toml has no line {NEXT.strip()}, before which the addresses belong")
    return without.replace(NEXT, table(repository) + NEXT)


def main(arguments: list[str]) -> None:
    """Rewrite the file that the second argument names, else that of this tree."""
    if len(arguments) not in (1, 2):
        raise SystemExit(__doc__)
    path = Path(arguments[1]) if len(arguments) == 2 else PROJECT
    path.write_text(with_urls(path.read_text(encoding="utf-8"), arguments[0]), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
