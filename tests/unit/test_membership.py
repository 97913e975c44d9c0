"""Who makes the group after a loss: laws of the rule, and all orders of events in a small job."""

import itertools

import pytest
from samestep.rendezvous.membership import Post, Record, next_record

STARTED = Record(0, ["0.0", "1.0", "2.0"], 0, 0, True)


def post(epoch, step=0, clean=True, admits=True):
    return Post(epoch, step, clean, admits, 9.0)


def test_it_waits_for_all_members_that_are_alive():
    alive = ["0.0", "1.0", "2.0"]
    posts = {uid: post(1) for uid in alive[:2]}
    assert next_record(STARTED, alive, posts) is None
    assert next_record(STARTED, alive, {**posts, "2.0": post(0)}) is None  # an old one
    assert next_record(STARTED, alive[:2], posts) == Record(1, alive[:2], 0, 0, True)
    assert next_record(STARTED, [], {}) is None


@pytest.mark.parametrize("steps", list(itertools.permutations([3, 3, 4])))
def test_the_state_is_that_of_the_rank_that_has_finished_most(steps):
    alive = STARTED.members
    posts = {uid: post(1, step) for uid, step in zip(alive, steps, strict=True)}
    assert next_record(STARTED, alive, posts) == Record(1, alive, steps.index(4), 4, False)


def test_a_state_that_may_have_changed_does_not_count():
    alive = STARTED.members
    posts = {"0.0": post(1, 5, clean=False), "1.0": post(1, 5), "2.0": post(1, 5)}
    assert next_record(STARTED, alive, posts) == Record(1, alive, 1, 5, False)
    posts = {uid: post(1, 5, clean=False) for uid in alive}
    assert next_record(STARTED, alive, posts).root == -1
    posts["2.0"] = post(1, -1)  # which has been admitted, and has got no state
    assert next_record(STARTED, alive, posts).root == -1


def test_a_state_counts_more_than_none():
    alive = STARTED.members
    posts = {"0.0": post(1, -1), "1.0": post(1, 0), "2.0": post(1, -1)}
    assert next_record(STARTED, alive, posts) == Record(1, alive, 1, 0, False)


def test_newcomers_come_last_if_all_admit_them():
    alive = ["0.1", "1.0", "2.0"]
    posts = {"0.1": post(-1, -1), "1.0": post(1, 2), "2.0": post(1, 2)}
    assert next_record(STARTED, alive, posts) == Record(1, ["1.0", "2.0", "0.1"], 0, 2, False)
    posts["2.0"] = post(1, 2, admits=False)
    assert next_record(STARTED, alive, posts) == Record(1, ["1.0", "2.0"], 0, 2, True)
    del posts["0.1"]  # not there yet
    assert next_record(STARTED, alive, posts).members == ["1.0", "2.0"]


# ---- all orders of events: a job of two ranks and a newcomer, or of three ranks

MOST_DEATHS, LAST_STEP = 2, 2


class Job(tuple):
    """(record, alive, posts, ranks, deaths): what there is at one moment. Hashable.

    `ranks`: uid -> (epoch that it takes part in, finished steps, has left, has computed).
    """


def freeze(record, alive, posts, ranks, deaths):
    return Job(
        (
            (*record[:1], tuple(record.members), *record[2:]),
            tuple(alive),
            tuple(sorted(posts.items())),
            tuple(sorted(ranks.items())),
            deaths,
        )
    )


def thaw(job):
    record, alive, posts, ranks, deaths = job
    return Record(record[0], list(record[1]), *record[2:]), list(alive), dict(posts), dict(ranks), deaths


def events(job):
    """Whatever may happen next: (what, job)."""
    record, alive, posts, ranks, deaths = thaw(job)
    if deaths < MOST_DEATHS and len(alive) > 1:
        for uid in alive:
            yield "dies", freeze(record, [one for one in alive if one != uid], posts, ranks, deaths + 1)
    made = next_record(record, alive, posts)
    if made is not None:
        yield "record", freeze(made, alive, posts, ranks, deaths)
    for uid in alive:
        epoch, step, has_left, has_computed = ranks[uid]
        others = {one: ranks[one] for one in ranks if one != uid}
        if has_left:
            if record.epoch > epoch and uid in record.members:
                known = step if epoch >= 0 and record.equal else max(0, record.step)
                yield (
                    "joins",
                    freeze(
                        record, alive, posts, {**others, uid: (record.epoch, known, False, False)}, deaths
                    ),
                )
            continue
        members = record.members if record.epoch == epoch else []
        mates = [ranks[one] for one in members if one != uid]
        if not has_computed and step < LAST_STEP:
            yield (
                "computes",
                freeze(record, alive, posts, {**others, uid: (epoch, step, False, True)}, deaths),
            )
        # The sums of a step are there when all members have computed it, even if some have died or gone on since.
        complete = has_computed and all(
            e == epoch and (s > step or (s == step and c)) for e, s, _, c in mates
        )
        if complete:
            yield (
                "finishes",
                freeze(record, alive, posts, {**others, uid: (epoch, step + 1, False, False)}, deaths),
            )
        lost = any(one not in alive or (ranks[one][0] == epoch and ranks[one][2]) for one in members)
        called = any(posts[one].epoch < 0 for one in posts if one in alive and one not in members)
        if lost or (called and not has_computed):
            left = {**others, uid: (epoch, step, True, False)}
            yield "leaves", freeze(record, alive, {**posts, uid: post(epoch + 1, step)}, left, deaths)


def check(before, after):
    """What no event may do."""
    record, alive, _, ranks, deaths = thaw(after)
    was = thaw(before)
    assert record.epoch in (was[0].epoch, was[0].epoch + 1)
    if record.epoch == was[0].epoch:
        assert record == was[0]
    assert record.epoch <= 1 + deaths + ("2.1" in ranks), "an epoch more than there were losses and newcomers"
    for uid, (epoch, step, _, _) in ranks.items():
        if epoch >= 0:
            assert step >= was[3][uid][1], "a finished step was taken back"
        if epoch == record.epoch:
            assert uid in record.members
    at = [ranks[uid][1] for uid in record.members if uid in alive and ranks[uid][0] == record.epoch]
    assert not at or max(at) - min(at) <= 1


@pytest.mark.parametrize("newcomer", [False, True])
def test_all_orders_of_events(newcomer):
    members = ["0.0", "1.0"] if newcomer else ["0.0", "1.0", "2.0"]
    ranks = dict.fromkeys(members, (1, 0, False, False))
    posts = {}
    if newcomer:
        ranks["2.1"], posts["2.1"] = (-1, -1, True, False), post(-1, -1)
    first = freeze(Record(1, members, 0, 0, True), list(ranks), posts, ranks, 0)
    seen, left = {first}, [first]
    while left:
        job = left.pop()
        following = list(events(job))
        for _, after in following:
            check(job, after)
            if after not in seen:
                seen.add(after)
                left.append(after)
        if all(what == "dies" for what, _ in following):
            record, alive, _, ranks, _ = thaw(job)
            members = [uid for uid in record.members if uid in alive]
            if members:  # else the state is gone
                assert {ranks[uid] for uid in members} == {(record.epoch, LAST_STEP, False, False)}
    assert len(seen) > 1000
