"""One rank of `launcher_output.py`: prints so many lines, between files in a folder that its launcher makes."""

import sys
import time
from pathlib import Path


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.001)


def main(folder: str, lines: str) -> None:
    print("begin", flush=True)
    wait_for(Path(folder) / "begin")
    for i in range(int(lines)):
        print("line", i)
    print("end", flush=True)
    wait_for(Path(folder) / "end")


if __name__ == "__main__":
    main(*sys.argv[1:])
