"""The loop of a server of models: all ranks gather 48 bytes in each step, and rank 0 sends requests."""

import torch
import torch.distributed as dist

STEPS = 300


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    host = dist.new_group(backend="gloo")
    for step in range(STEPS):
        mine = torch.tensor([rank, step, step % 5, 0, 0, step % 7 == rank], dtype=torch.int64)
        gathered = torch.zeros(size * 6, dtype=torch.int64)
        dist.all_gather_into_tensor(gathered, mine, group=host)
        everywhere = gathered.view(size, 6)
        assert everywhere[:, 0].tolist() == list(range(size))
        assert everywhere[:, 1].eq(step).all()
        requests = [{"step": step, "tokens": list(range(step % 4))} if rank == 0 else None]
        dist.broadcast_object_list(requests, 0, group=host)
        assert requests[0]["tokens"] == list(range(step % 4))
        if everywhere[:, 5].any():
            finished = [None] * size
            dist.all_gather_object(finished, (rank, step), group=host)
            assert finished == [(r, step) for r in range(size)]
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
