#!/usr/bin/env python3
"""Check that no file uses a word that docs/glossary.md has replaced: in names, comments, strings and pages.

`retired_words.txt` has sections, headed by the folders or files that they hold for. Each line is a regular expression,
which is matched as a whole word, and the words to use. A line that must name a retired word ends in `retired: ok`.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / ".ci" / "retired_words.txt"
EVERYWHERE = (
    "csrc python tests benchmarks examples docs README.md CONTRIBUTING.md "
    ".ci pyproject.toml CMakeLists.txt CMakePresets.json mkdocs.yml packaging .ci/run"
)
TEXTS = {".py", ".pyi", ".h", ".cpp", ".c", ".md", ".txt", ".toml", ".sh", ".svg"}
_PLAIN = re.compile(r"[\w ]+")
KNOWN = {TABLE, ROOT / "python" / "samestep" / "_settings.py"}  # these list retired names


def main() -> int:
    """Name every use of a retired word; the exit code."""
    wrong, n_words = [], 0
    for places, words in _sections():
        n_words += len(words)
        for path in _files(places):
            text = path.read_text(errors="replace")
            # Most words are plain, and most files have none of them: looking for those first saves most of the time.
            possible = [word for word in words if not _PLAIN.fullmatch(word) or word in text]
            pattern = re.compile("|".join(rf"(?<!\w)(?:{word})(?!\w)" for word in possible))
            for number, line in enumerate(text.splitlines() if possible else (), 1):
                if line.endswith("retired: ok"):
                    continue
                for found in pattern.finditer(line):
                    use = next(
                        use for word, use in words.items() if re.compile(word).match(line, found.start())
                    )
                    wrong.append(f"{path.relative_to(ROOT)}:{number}: {found[0]!r} is retired; use: {use}")
    print("\n".join(wrong) or f"words: none of {n_words} retired words is used")
    return int(bool(wrong))


def _sections() -> list[tuple[list[str], dict[str, str]]]:
    sections: list[tuple[list[str], dict[str, str]]] = []
    for line in TABLE.read_text().splitlines():
        if line.startswith("[") and line.endswith("]"):
            names = line.strip("[]")
            sections.append(((EVERYWHERE if names == "everywhere" else names).split(), {}))
        elif line and not line.startswith("#"):
            word, use = re.split(r"\s{2,}", line, maxsplit=1)
            sections[-1][1][word] = use
    return sections


def _files(places: list[str]) -> list[Path]:
    files: set[Path] = set()
    for place in places:
        folder, _, name = place.partition("/")
        if name:
            files |= set((ROOT / folder).rglob(name))
        elif (ROOT / place).is_file():
            files.add(ROOT / place)
        else:
            files |= {path for path in (ROOT / place).rglob("*") if path.suffix in TEXTS}
    return sorted(path for path in files if path.is_file() and path not in KNOWN)


if __name__ == "__main__":
    sys.exit(main())
