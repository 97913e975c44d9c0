"""Steps in which a rank computes one bit of a gradient wrongly, and audits that may find it; rank 0 prints what did."""

import json
import logging
import random
import re
import sys

import numpy as np
import samestep as ss
from samestep.step.audit import choose
from samestep.step.shards import shards_of

SHARDS, SEED, OF_OWNERS = 9, 5, 0.8
NAMED = re.compile(
    r"audit of shard (\d+) of step (\d+) in group world: rank (\d+) \(.*?\) has computed other"
)


def gradients(shard, step):
    """Of many kinds of leaves, other ones for each shard and step."""
    by = 1.0 + shard.index + 0.001 * step
    return {
        "float64": by * np.arange(10.0).reshape(2, 5),
        "float32": np.full((3,), by, np.float32),
        "float16": np.full((2, 2), by, np.float16),
        "int64": np.arange(3) * (shard.index + 1),
        "complex128": np.full((2,), complex(by, -by)),
        "none": np.zeros((0, 4)),
        "scalar": np.float64(by),
    }


def flipped(grads, draw):
    """The same but for one bit of one leaf."""
    name = draw.choice([name for name in grads if grads[name].size])
    octets = np.frombuffer(grads[name].tobytes(), np.uint8).copy()
    octets[draw.randrange(octets.size)] ^= np.uint8(1 << draw.randrange(8))
    array = octets.view(grads[name].dtype).reshape(grads[name].shape)
    return {**grads, name: array if array.ndim else array[()]}


def audit(n_steps, rate, flips=True):
    """With `flips`, each step has one, which comes again when the step is repeated, as of a broken processor."""
    backend, warnings = ss.initialize(timeout=60.0), []
    logging.getLogger("samestep").addFilter(lambda record: warnings.append(record) or False)
    n_items = 2 * SHARDS * min(n_steps, 1000)
    sampler = ss.DistributedSampler(backend, n_items, batch_size=2 * SHARDS, shards=SHARDS, seed=SEED)
    total = ss.Accumulator(backend, shards=SHARDS)
    state = ss.TrainState(backend, w=0.0, sampler=sampler, audit=rate)
    n_audits, raised, planned = 0, {}, {}
    for step in state.steps(steps=n_steps):
        number = state.step + 1
        audited = choose(rate, SEED, number, SHARDS, backend.size)
        ranks = audited.ranks if audited is not None else {}
        draw = random.Random(1_000_003 * SEED + number)
        guilty = draw.randrange(backend.size)
        shard = draw.choice(shards_of(SHARDS, guilty, backend.size))
        is_owners = draw.random() < OF_OWNERS  # else in the shard that it audits, if there is one
        if not is_owners:
            shard = next((one for one in ranks if guilty in ranks[one][1:]), shard)
        flips_here = flips and number not in raised
        if flips_here:
            planned[number] = guilty, shard, is_owners, guilty in ranks.get(shard, ())
        try:
            with step:
                for part in step:
                    grads = gradients(part, number)
                    if flips_here and (backend.rank, part.index) == (guilty, shard):
                        grads = flipped(grads, draw)
                    total.add(grads, shard=part.index, weight=len(part))
                total.mean()
        except (ss.StepError, ss.MismatchError) as error:
            raised[number] = str(error)
        else:
            n_audits += len(ranks)
    found = {number: NAMED.findall(text) for number, text in raised.items()}
    right = [n for n, (g, s, _, _) in planned.items() if found.get(n) == [(str(s), str(n), str(g))]]
    audited = [n for n, (*_, is_audited) in planned.items() if is_audited]
    of_owners = [n for n, (*_, is_owners, _) in planned.items() if is_owners]
    told = {
        "audits": n_audits,
        "alarms": len(raised) + len(warnings),
        "flips": len(planned),
        "audited": len(audited),
        "named": len(right),
        "of_owners": len(of_owners),
        "of_owners_found": len(set(of_owners) & set(right)),
        "missed": sorted(set(audited) - set(right)),
        "wrong": sorted(set(raised) - set(right)),
    }
    same = backend.allgather_object(told)
    if backend.rank == 0:
        assert all(one == told for one in same), same
        print("result", json.dumps(told), flush=True)


if __name__ == "__main__":
    audit(*map(json.loads, sys.argv[1:]))
