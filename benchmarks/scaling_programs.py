"""What the ranks of `scaling.py measure` run, after the prelude of `tests/hosts/lab.py`."""

PRICES = """
import statistics
if REALTIME:
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(5))
world = ss.initialize("native", timeout=60)
me, other = world.rank, 1 - world.rank

def median(act, seconds=1.0):
    times, end = [], time.perf_counter() + 5
    act()
    while True:
        world.barrier()
        begin = time.perf_counter()
        act()
        times.append(time.perf_counter() - begin)
        enough = len(times) >= 3 and (sum(times) > seconds or time.perf_counter() > end)
        if world.allreduce(np.array([float(enough)]), "max")[0]:
            return statistics.median(times)

long, got_long = np.zeros(LONG // 8), np.zeros(LONG // 8)

def both_ways():
    world.sendrecv(long, other, got_long, other)

a, b = np.ones(1 << 15, "f4"), np.ones(1 << 15, "f4")

def add():
    for _ in range(100):
        np.add(a, b, out=a)

tell(both_ways=median(both_ways) / long.nbytes, reduce=median(add) / 100 / (2 * a.nbytes))
ss.finalize()
"""
TIMES = """
import statistics
if REALTIME:
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(5))
world = ss.initialize("native", timeout=60)

def agreed(value):
    return float(world.allreduce(np.array([float(value)]), "max")[0])

def timed(act, n):
    world.barrier()
    begin = time.perf_counter()
    for _ in range(n):
        act()
    return (time.perf_counter() - begin) / n

def median(act):
    # The first batch spends what a limiter lets through at once; calls follow each other without a pause in which it
    # could save again.
    n = max(1, int(BATCH_S / agreed(timed(act, 3))))
    timed(act, n)
    return statistics.median(timed(act, n) for _ in range(3))

def shift():
    world.sendrecv(word, (world.rank + 1) % world.size, got, (world.rank - 1) % world.size)

word, got = np.zeros(1), np.zeros(1)
if not SIZES:
    tell(barrier=median(world.barrier), shift=median(shift))
for nbytes in SIZES:
    array = np.zeros(nbytes // 4, "f4")
    tell(nbytes=nbytes, seconds=median(lambda: world.allreduce(array)))
ss.finalize()
"""
