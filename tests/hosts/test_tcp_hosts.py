"""NativeBackend over two hosts, which nothing but a network connects."""

from running import program


def start(begin, function, *values, n_each=(1, 1), **options):
    return begin(program("hosts/tcp_hosts", function, *values), n_each, **options)


def test_all_verbs_give_the_bits_of_one_host(begin):
    two = start(begin, "use_each_operation", True, n_each=[2, 2])
    found = two.lines()
    assert [f["transport"] for f in found] == ["hierarchical"] * 4
    assert [f["place"] for f in found] == [[0, 2, 0, 2], [1, 2, 0, 2], [0, 2, 1, 2], [1, 2, 1, 2]]
    assert two.wait() == [0] * 4
    one = start(begin, "use_each_operation", False, n_each=[4])
    alone = one.lines()
    assert [f["transport"] for f in alone] == ["shm"] * 4
    assert [f["bits"] for f in alone] == [f["bits"] for f in found]


def test_ipv6_and_a_named_interface(begin):
    job = start(begin, "reduce_once", master="fd78::1", SAMESTEP_SOCKET_IFNAME="eth0")
    assert job.lines() == [{"total": 3.0, "transport": "tcp"}] * 2


def test_ranks_started_by_srun(begin):
    job = start(begin, "reduce_under_srun", n_each=[2, 1], under_slurm=True)
    assert job.lines() == [{"total": 6.0, "local": 0}, {"total": 6.0, "local": 1}, {"total": 6.0, "local": 0}]


def test_a_wrong_interface_name_lists_the_others(begin):
    for found in start(begin, "name_a_wrong_interface", SAMESTEP_SOCKET_IFNAME="eth7").lines():
        assert "'eth7'" in found["text"]
        assert "eth0" in found["text"]


def test_an_interface_that_leads_nowhere_is_an_error_on_all_ranks(begin):
    for found in start(begin, "name_an_interface_that_leads_nowhere", SAMESTEP_SOCKET_IFNAME="lo").lines():
        assert "rank 1 cannot connect to rank 0 at node0 (127.0.0.1:" in found["text"]
        assert "Connection refused; SAMESTEP_SOCKET_IFNAME names" in found["text"]
