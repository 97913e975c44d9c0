"""A group that an error has ended: each rank leaves it alone."""

import re

import jobs
from running import script


def test_what_brought_the_ranks_together_is_left_too(tmp_path):
    program = script("faults/broken_group")
    ended = jobs.run(2, [program, str(tmp_path / "left")])
    assert ended.code == 0, ended.text
    waited = re.search(r"<(\d+) s>", ended.text)
    assert waited, ended.text
    assert int(waited[1]) < 30, ended.text
    assert re.search(r"<.*rank 0.*>", ended.text), ended.text
