"""samestep.distributed on device arrays: through NCCL, and through the host."""

import device_jobs
import pytest

SCRIPT = """
import samestep.distributed as dist
dist.init_process_group(BACKEND, init_method=f"file://{place}/meeting", rank=rank, world_size=size)
stream = Stream()
x = Array.of(np.full(7, rank + 1.0), stream)
tell(nccl=dist.is_nccl_available(), device=dist.group.WORLD is not None)
dist.all_reduce(x)
tell(sum=x.get().tolist())
dist.broadcast(x, src=size - 1)
parts = [Array((7,), "float64", stream) for _ in range(size)]
dist.all_gather(parts, Array.of(np.full(7, float(rank)), stream))
tell(parts=[part.get().tolist() for part in parts])
mine = Array((7,), "float64", stream)
dist.scatter(mine, parts if rank == 0 else None, src=0)
dist.gather(mine, parts if rank == 1 else None, dst=1)
tell(mine=mine.get().tolist(), parts=[part.get().tolist() for part in parts])
wide = Array.of(np.full((2, 3), rank + 1.0), stream)
dist.all_reduce(wide)
tell(wide=wide.get().tolist())
other = (rank + 1) % size
request = dist.isend(Array.of(np.full(3, float(rank)), stream), other)
got = Array((3,), "float64", stream)
dist.recv(got, (rank - 1) % size)
request.wait()
tell(got=got.get().tolist())
with_two = dist.new_group([0, 1])
if rank < 2:
    dist.all_reduce(x, op=dist.ReduceOp.MAX, group=with_two)
lists = []
for index in range(2):
    fake_arrays.call("SetDevice", index)
    lists.append(Array.of(np.full(5, 10.0 * rank + index), Stream()))
dist.all_reduce_multigpu(lists)
tell(lists=[part.get().tolist() for part in lists])
dist.destroy_process_group()
"""


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_the_verbs_of_2019(tmp_path, backend):
    size = 3
    ended = device_jobs.run(tmp_path, SCRIPT.replace("BACKEND", repr(backend)), size)
    for number, rank in enumerate(ended):
        assert rank.code == 0, ended
        start, reduced, parts, routed, wide, got, lists = rank.told
        assert routed == {"mine": [float(number)] * 7, "parts": [[float(r)] * 7 for r in range(size)]}
        assert wide == {"wide": [[6.0] * 3] * 2}
        assert start["nccl"] is True
        assert reduced["sum"] == [6.0] * 7
        assert parts["parts"] == [[float(r)] * 7 for r in range(size)]
        assert got["got"] == [float((number - 1) % size)] * 3
        assert lists["lists"] == [[sum(10.0 * r + i for r in range(size) for i in range(2))] * 5] * 2
