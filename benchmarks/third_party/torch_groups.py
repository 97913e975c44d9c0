"""60 groups as Megatron makes them, for parts of the model and of the data in turn: each is used, and destroyed."""

import torch
import torch.distributed as dist

GROUPS = 60


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    partitions = [[list(range(size))], [[r] for r in range(size)], [[r, (r + 1) % size] for r in range(size)]]
    wanted = [sorted(set(members)) for partition in partitions for members in partition]
    groups = [(wanted[i % len(wanted)], f"part {i}") for i in range(GROUPS)]
    made = [(members, dist.new_group(members, group_desc=name)) for members, name in groups]
    for members, group in made:
        if rank in members:
            x = torch.tensor([float(rank)])
            dist.all_reduce(x, group=group)
            assert x.item() == sum(members), (members, x)
            dist.broadcast(x, members[-1], group=group)
    for members, group in made[::2]:
        if rank in members:
            dist.destroy_process_group(group)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == size
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
