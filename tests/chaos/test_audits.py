"""A part of `python tests/chaos/audits.py`, and the law by which shards are chosen."""

from collections import Counter

import audits
import pytest
from samestep.step.audit import Audited, choose, with_another
from samestep.step.shards import shards_of


@pytest.mark.parametrize(("n_shards", "size"), [(1, 2), (8, 2), (9, 4), (3, 5), (7, 7)])
def test_each_shard_is_chosen_as_often_as_the_rate_says(n_shards, size):
    """By a rank that is not its owner; each rank computes one more at most, so that nobody waits."""
    rate, n_steps, counts = 0.4 / -(-n_shards // size), 4000, Counter()
    for step in range(n_steps):
        audited = choose(rate, 3, step, n_shards, size)
        for shard, (owner, other) in audited.ranks.items() if audited is not None else ():
            assert shard in shards_of(n_shards, owner, size)
            assert other != owner
            counts[shard] += 1
        auditors = [] if audited is None else [ranks[1] for ranks in audited.ranks.values()]
        assert len(set(auditors)) == len(auditors)
    least, most = audits.allowed(n_steps, rate)
    assert all(least <= counts[shard] <= most for shard in range(n_shards))


def test_a_third_rank_decides_each_difference():
    audited = Audited(7, {0: (0, 1), 3: (1, 2), 6: (2, 0)})
    assert with_another(audited, [0, 3], 3) == Audited(7, {0: (0, 1, 2), 3: (1, 2, 0)})
    assert with_another(with_another(audited, [0], 3), [0], 3) is None  # which has decided
    assert with_another(Audited(7, {0: (0, 1)}), [0], 2) is None


@pytest.mark.slow
def test_flips_are_found_and_clean_steps_are_not(capsys):
    assert audits.main(["--clean", "900", "--flips", "150", "-n", "3"]) == 0, capsys.readouterr().out


def test_what_should_not_be_counts():
    clean = {"audits": 600, "alarms": 0}
    struck = {"of_owners": 200, "of_owners_found": 20, "missed": [], "wrong": []}
    assert audits.problems(clean, struck, 0.1) == []
    assert audits.problems({**clean, "alarms": 1}, struck, 0.1) == ["1 alarms in clean steps"]
    for changed in ({"of_owners_found": 2}, {"of_owners_found": 60}, {"missed": [3]}, {"wrong": [3]}):
        assert len(audits.problems(clean, {**struck, **changed}, 0.1)) == 1
