"""Writes the first example of a page to a file: python example.py docs/testing.md makes test_example.py."""

import re
import sys
from pathlib import Path

page = Path(sys.argv[1]).read_text(encoding="utf-8")
Path("test_example.py").write_text(re.search(r"```py\n(.*?)```", page, re.DOTALL)[1], encoding="utf-8")
