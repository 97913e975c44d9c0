"""benchmarks/hosts.py: what becomes of its numbers."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "benchmarks/hosts.py"


@pytest.fixture(scope="module")
def hosts():
    spec = importlib.util.spec_from_file_location("benchmarks_hosts", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def cell(hosts, ms):
    rounds = [
        {"library": "it 1.0", "half_round_trip_us": us, "1048576": {"ms": each, "sent": 1.0}}
        for us, each in zip((7.0, 5.0, 6.0), ms, strict=True)
    ]
    facts = {"rate": "1gbit", "layout": "2x1", "machine": "2 cores, 6.1", "date": "2026-11-22", "rounds": 3}
    return facts | {"sizes": [1 << 20], "found": {"ours": hosts.summary(rounds)}, "absent": ["theirs"]}


def test_the_median_of_the_rounds_beside_the_floor(hosts):
    text = hosts.table(cell(hosts, (90.0, 17.54, 9.0)))
    assert "| floor of the line | 8.8 | 1.00 | 1.00 | |" in text
    assert "| ours | 17.5 | 2.00 | 1.00 | 6.0 |" in text
    assert "| theirs | gave no answer |" in text


def test_the_page_holds_every_cell_and_names_the_libraries(hosts, tmp_path):
    for name in ("1gbit-2x1", "10gbit-2x1"):
        one = cell(hosts, (1.0, 2.0, 3.0)) | {"rate": name.partition("-")[0]}
        (tmp_path / f"{name}.json").write_text(json.dumps(one))
    page = hosts.render(tmp_path)
    assert "it 1.0" in page
    assert "| 1gbit, 2x1 | 1 MiB, ms |" in page
    assert "| 10gbit, 2x1 | 1 MiB, ms |" in page
