"""Who makes the group after a loss: laws of the rule, and all orders of events in a small job."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samestep.rendezvous.membership import Post, Record, newcomers, next_record

STARTED = Record(0, ["0.0", "1.0", "2.0"], 0, 0, True)


def post(epoch, step=0, clean=True, admits=True, cut=()):
    return Post(epoch, step, clean, admits, 9.0, cut)


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


@given(st.data())
def test_those_that_stay_reach_each_other_and_nobody_goes_without_a_reason(data):
    n = data.draw(st.integers(1, 6))
    uids = [f"{i}.0" for i in range(n)]
    cuts = [data.draw(st.lists(st.sampled_from(uids), max_size=2)) for _ in uids]
    posts = {
        uid: post(
            1, data.draw(st.integers(-1, 2)), data.draw(st.booleans()), cut=[two for two in cut if two != uid]
        )
        for uid, cut in zip(uids, cuts, strict=True)
    }
    made = next_record(Record(0, uids, 0, 0, True), uids, posts)

    def is_cut(one, two):
        return two in posts[one].cut or one in posts[two].cut

    assert made.members and made.members == [uid for uid in uids if uid in made.members]
    assert not any(is_cut(one, two) for one, two in itertools.permutations(made.members, 2))
    holds = {uid for uid in uids if posts[uid].step >= 0 and posts[uid].clean}
    for uid in set(uids) - set(made.members):
        assert any(is_cut(uid, one) for one in uids)
    if holds:
        assert holds & set(made.members), "the state went with a line"


def test_who_goes_where_a_line_is_cut():
    def left(hosts, between, without_state=()):
        """Two ranks on hosts a, b, c in this order; the lines between two hosts are cut, as those behind notice."""
        uids = [f"{i}.0" for i in range(len(hosts))]
        on = {host: [uid for uid, one in zip(uids, hosts, strict=True) if one == host] for host in hosts}
        posts = {uid: post(1, -1 if uid in without_state else 5) for uid in uids}
        for one, two in between:
            posts |= {uid: posts[uid]._replace(cut=on[one]) for uid in on[two]}
        return "".join(uid[0] for uid in next_record(Record(0, uids, 0, 0, True), uids, posts).members)

    assert left("aabbcc", ["bc"]) == "0123"  # the later one
    assert left("abbc", ["bc"]) == "012"  # that of fewer ranks
    assert left("abcc", ["bc"]) == "023"
    assert left("aabbcc", ["ab", "ac"]) == "2345"
    assert left("abb", ["ab"], without_state=["1.0", "2.0"]) == "0"  # those that have joined just now
    assert left("aab", []) == "012"


def test_who_was_given_up_is_no_newcomer():
    """It has left the epoch, and lives until it reads the record."""
    posts = {"0.0": post(1, 5), "1.0": post(1, 5), "2.0": post(1, 5, cut=["1.0"])}
    made = next_record(STARTED, STARTED.members, posts)
    assert made == Record(1, ["0.0", "1.0"], 0, 5, True)
    posts |= {uid: post(2, 6) for uid in made.members}
    assert next_record(made, STARTED.members, posts).members == ["0.0", "1.0"]
    assert newcomers(made, STARTED.members, posts) == []


# ---- all orders of events: two ranks and one or two that come later, three ranks, or three whose lines are cut

LAST_STEP = 2


class Job(tuple):
    """(record, alive, posts, ranks, (deaths, cut)): what there is at one moment. Hashable.

    `ranks`: uid -> (epoch that it takes part in, finished steps, has left, has computed). `deaths`: that may come.
    `cut`: two ranks without a line; () as long as there is none, and None if there is to be none.
    """


def freeze(record, alive, posts, ranks, happened):
    return Job(
        (
            (*record[:1], tuple(record.members), *record[2:]),
            tuple(alive),
            tuple(sorted(posts.items())),
            tuple(sorted(ranks.items())),
            happened,
        )
    )


def thaw(job):
    record, alive, posts, ranks, happened = job
    return Record(record[0], list(record[1]), *record[2:]), list(alive), dict(posts), dict(ranks), *happened


def goes_on(job, uid, silent):
    """What becomes of a rank that has left its epoch, once there is a record: (what, job)."""
    record, alive, posts, ranks, deaths, cut = thaw(job)
    epoch, step, _, _ = ranks[uid]
    others = {one: ranks[one] for one in ranks if one != uid}
    if uid not in record.members:
        if epoch >= 0:
            yield (
                "is given up",
                freeze(record, [one for one in alive if one != uid], posts, ranks, (deaths, cut)),
            )
        return
    unanswered = [one for one in record.members if one in silent]
    if not unanswered:
        known = step if epoch >= 0 and record.equal else max(0, record.step)
        yield (
            "joins",
            freeze(record, alive, posts, {**others, uid: (record.epoch, known, False, False)}, (deaths, cut)),
        )
        return
    # The attempt to connect fails, so a newcomer has no state yet. The later one connects, and so learns why.
    knows = [one for one in unanswered if record.members.index(one) < record.members.index(uid)]
    posts = {**posts, uid: post(record.epoch + 1, step, cut=tuple(knows))}
    yield (
        "cannot join",
        freeze(record, alive, posts, {**others, uid: (record.epoch, step, True, False)}, (deaths, cut)),
    )


def events(job):
    """Whatever may happen next: (what, job)."""
    record, alive, posts, ranks, deaths, cut = thaw(job)

    def after(**changed):
        now = {"record": record, "alive": alive, "posts": posts, "ranks": ranks, "happened": (deaths, cut)}
        return freeze(**{**now, **changed})

    if deaths > 0 and len(alive) > 1:
        for uid in alive:
            yield "dies", after(alive=[one for one in alive if one != uid], happened=(deaths - 1, cut))
    if cut == ():
        for pair in itertools.combinations(alive, 2):
            yield "cut", after(happened=(deaths, pair))
    made = next_record(record, alive, posts)
    if made is not None:
        yield "record", after(record=made)
    for uid in alive:
        epoch, step, has_left, has_computed = ranks[uid]
        others = {one: ranks[one] for one in ranks if one != uid}
        silent = [
            one for one in cut or () if uid in cut and one != uid
        ]  # hosts that do not answer this one's
        if has_left:
            if record.epoch > epoch:
                yield from goes_on(job, uid, silent)
            continue
        members = record.members if record.epoch == epoch else []
        mates = [ranks[one] for one in members if one != uid]
        if not has_computed and step < LAST_STEP:
            yield "computes", after(ranks={**others, uid: (epoch, step, False, True)})
        # The sums of a step are there when all members have computed it, even if some have died or gone on since.
        complete = has_computed and all(
            e == epoch and (s > step or (s == step and c)) for e, s, _, c in mates
        )
        if complete:
            yield "finishes", after(ranks={**others, uid: (epoch, step + 1, False, False)})
        lost = any(
            one not in alive or one in silent or (ranks[one][0] == epoch and ranks[one][2]) for one in members
        )
        called = bool(newcomers(record, alive, posts))
        if lost or (called and not has_computed):
            left = {**others, uid: (epoch, step, True, False)}
            yield "leaves", after(posts={**posts, uid: post(epoch + 1, step)}, ranks=left)


def check(before, after, most_deaths):
    """What no event may do."""
    record, alive, _, ranks, deaths, cut = thaw(after)
    was = thaw(before)
    assert record.epoch in (was[0].epoch, was[0].epoch + 1)
    if record.epoch == was[0].epoch:
        assert record == was[0]
    n_new = sum(uid.endswith(".1") for uid in ranks)
    # A line that is cut ends the epoch in which it is, and one that cannot begin; so may that of a newcomer.
    assert record.epoch <= 1 + most_deaths - deaths + n_new + (2 + n_new) * bool(cut), (
        "more epochs than there were reasons"
    )
    for uid, (epoch, step, _, _) in ranks.items():
        if epoch >= 0 and was[3][uid][0] >= 0:
            assert step >= was[3][uid][1], "a finished step was taken back"
        if epoch == record.epoch:
            assert uid in record.members
    gone = [uid for uid in was[0].members if uid not in record.members]
    assert all(uid not in alive or uid in (cut or ()) for uid in gone), "one was given up without a reason"
    at = [ranks[uid][1] for uid in record.members if uid in alive and ranks[uid][0] == record.epoch]
    at = [step for step in at if step >= 0]  # a newcomer that did not get the state
    assert not at or max(at) - min(at) <= 1


@pytest.mark.parametrize(
    ("n", "n_new", "deaths", "cut"),
    [
        (3, 0, 2, None),
        (2, 1, 2, None),
        (3, 0, 1, ()),
        *(
            pytest.param(*job, marks=pytest.mark.slow)
            for job in [(2, 1, 1, ()), (2, 2, 2, None), (3, 0, 2, ()), (2, 1, 2, ())]
        ),
    ],
)
def test_all_orders_of_events(n, n_new, deaths, cut):
    members = [f"{i}.0" for i in range(n)]
    ranks = dict.fromkeys(members, (1, 0, False, False))
    posts = {}
    for i in range(n_new):
        uid = f"{n + i}.1"
        ranks[uid], posts[uid] = (-1, -1, True, False), post(-1, -1)
    first = freeze(Record(1, members, 0, 0, True), list(ranks), posts, ranks, (deaths, cut))
    seen, left = {first}, [first]
    while left:
        job = left.pop()
        following = list(events(job))
        for _, after in following:
            check(job, after, deaths)
            if after not in seen:
                seen.add(after)
                left.append(after)
        if all(what in ("dies", "cut") for what, _ in following):
            record, alive, _, ranks, _, broken = thaw(job)
            members = [uid for uid in record.members if uid in alive]
            assert not broken or not set(broken) <= set(members), "both ends of a cut line are members"
            if members:  # else the state is gone
                assert {ranks[uid] for uid in members} == {(record.epoch, LAST_STEP, False, False)}
    assert len(seen) > 1000
