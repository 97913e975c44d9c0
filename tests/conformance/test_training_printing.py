"""Lines of all ranks: whole, in order, once."""

import re

import pytest
import samestep as ss

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

HEAD = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \[(\d+) / (\d+)\] "


def test_whole_lines_in_order_of_rank_on_the_first_rank(group, capsys):
    ss.println(group, "loss", group.rank / 2, "\nand more")
    group.println()
    lines = capsys.readouterr().out.splitlines()
    if group.rank != 0:
        assert lines == []
        return
    found = [re.fullmatch(HEAD + "(.*)", line) for line in lines]
    assert all(found)
    expected = [
        (str(r), str(group.size), text) for r in range(group.size) for text in (f"loss {r / 2} ", "and more")
    ]
    expected += [(str(r), str(group.size), "") for r in range(group.size)]
    assert [match.groups() for match in found] == expected
