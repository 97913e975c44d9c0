"""NativeBackend over two hosts, which nothing but a network connects."""

VERBS = """
world = ss.initialize("native", timeout=60)
rank, n = world.rank, world.size
bits = hashlib.sha256()

def note(result):
    bits.update(np.ascontiguousarray(result).tobytes())

for count in (1, 5, 1000, 100_003, 700_003):
    def mine(seed=0):
        return np.random.default_rng(100 * seed + rank).standard_normal(count).astype("f4")

    for op in ("sum", "max", ss.AVG):
        note(world.allreduce(mine(), op))
    total = world.reduce(mine(1), "sum", root=2)
    note(world.bcast(total if rank == 2 else mine(2), root=2))
    note(world.allgather(mine(3)))
    blocks = np.concatenate([np.random.default_rng(r).standard_normal(count) for r in range(n)])
    note(world.bcast(blocks * (rank + 1), root=0))
    note(world.allgather(world.reduce_scatter(blocks.reshape(n, -1) * (rank + 1))))
    note(world.allgather(world.alltoall(blocks.reshape(n, -1) * (rank + 1))))
    gathered = world.gather(mine(4), root=1)
    scattered = world.scatter(gathered if rank == 1 else None, root=1, out=np.empty(count, "f4"))
    assert (scattered == mine(4)).all()
    got = np.empty(count, "f4")
    world.sendrecv(mine(5), (rank + 1) % n, got, (rank - 1) % n)
    note(world.allgather(got))
note(world.split(rank % 2).allreduce(np.full(3, rank, "f4")))
assert world.allgather_object(rank) == list(range(n))
place = (world.local_rank, world.local_size, world.node_rank, world.node_count)
note(world.node.allreduce(np.ones(3)))
note(world.cross.allreduce(np.ones(3)))
world.barrier()
engine = world.engine
ss.finalize()
tell(bits=bits.hexdigest() if rank % 2 == 0 else "", engine=engine, place=place)
"""


def test_all_verbs_give_the_bits_of_one_host(begin):
    two = begin(VERBS, [2, 2])
    found = two.lines()
    assert [f["engine"] for f in found] == ["hier"] * 4
    assert [f["place"] for f in found] == [[0, 2, 0, 2], [1, 2, 0, 2], [0, 2, 1, 2], [1, 2, 1, 2]]
    assert two.wait() == [0] * 4
    one = begin(
        VERBS.replace("world.node.", "world.split(rank // 2).").replace(
            "world.cross.", "world.split(rank % 2)."
        ),
        [4],
    )
    alone = one.lines()
    assert [f["engine"] for f in alone] == ["node"] * 4
    assert [f["bits"] for f in alone] == [f["bits"] for f in found]


def test_ipv6_and_a_named_interface(begin):
    script = """
world = ss.initialize("native", timeout=60)
tell(total=world.allreduce(np.full(100_000, world.rank + 1.0))[7], engine=world.engine)
ss.finalize()
"""
    job = begin(script, [1, 1], master="fd78::1", SAMESTEP_SOCKET_IFNAME="eth0")
    assert job.lines() == [{"total": 3.0, "engine": "tcp"}] * 2


def test_ranks_started_by_srun(begin):
    script = """
world = ss.initialize("native", init_method="env://", timeout=60)
tell(total=world.allreduce(np.full(3, world.rank + 1.0))[0], local=world.local_rank)
ss.finalize()
"""
    job = begin(script, [2, 1], under_slurm=True)
    assert job.lines() == [{"total": 6.0, "local": 0}, {"total": 6.0, "local": 1}, {"total": 6.0, "local": 0}]


def test_a_wrong_interface_name_lists_the_others(begin):
    script = """
try:
    ss.initialize("native", timeout=60)
except ValueError as error:
    tell(text=str(error))
"""
    for found in begin(script, [1, 1], SAMESTEP_SOCKET_IFNAME="eth7").lines():
        assert "'eth7'" in found["text"]
        assert "eth0" in found["text"]


def test_an_interface_that_leads_nowhere_is_told_on_all_ranks(begin):
    script = """
try:
    ss.initialize("native", timeout=60)
except ss.UnavailableError as error:
    tell(text=str(error))
"""
    for found in begin(script, [1, 1], SAMESTEP_SOCKET_IFNAME="lo").lines():
        assert "rank 1 cannot connect to rank 0 at node0 (127.0.0.1:" in found["text"]
        assert "Connection refused; SAMESTEP_SOCKET_IFNAME names" in found["text"]
