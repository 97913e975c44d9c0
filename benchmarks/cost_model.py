"""What a reduction over hosts costs, as formulas: pure.

Each formula adds up what one rank waits for: messages that follow one another (latency), messages that it handles
(processor time), bytes through the host's network card, bytes that the processor copies, and elements that it reduces.
"Bytes" are those of the buffer that each rank passes in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

KIB, MIB = 1 << 10, 1 << 20
INLINE = ((2, 16 * KIB), (4, 8 * KIB), (16, 2 * KIB))  # most bytes that travel with the headers, by ranks
SPREAD_ABOVE = 16  # ranks; above it an allgather sends from rank to rank
SPREAD_TOGETHER, LEAST_SPREAD = (
    64 * KIB,
    128,
)  # bytes with the headers then, of all ranks together and of each
HEADER, PLACES = 16, 40  # bytes of a header, and of the buffer addresses that are sent with it in levels
# Of a segment, see csrc/collectives/two_shot_reduction.cpp.
MOST_PIECE, LEAST_PIECE, TOGETHER = 256 * KIB, 16 * KIB, 2 * MIB
HALVED_WINDOW = MIB  # see csrc/collectives/recursive_halving.cpp


@dataclass(frozen=True)
class Network:
    """Hosts and what connects them.

    Attributes:
      latency_s: from the send of a short message to its receiver's going on, without the processor time below.
      message_s: processor time of a message, at each of its two ends.
      wake_s: processor time more for each end of a message, where ranks share processors: they sleep, and are woken.
      wait_s: until a rank that sleeps for a message continues, beside all that.
      bandwidth: bytes per second of a host's card, in each direction.
      copy_s: processor time per byte sent or received.
      reduce_s: processor time per byte that is read to be reduced.
      node_s: processor time of each rank, per byte of a buffer, to reduce it with the ranks of its host, in memory
        that they share, and to hand out the result.
      processors: of a host; ranks share them.
      burst: bytes that the card lets through at once after it was idle for long: what it may not send then it saves.
        Limiters are such, cards are not.
    """

    latency_s: float
    message_s: float
    bandwidth: float
    copy_s: float
    reduce_s: float
    node_s: float = 0.0
    wake_s: float = 0.0
    wait_s: float = 0.0
    processors: float = 8
    burst: float = 0.0


@dataclass(frozen=True)
class Load:
    """What one rank does, and what its host's card transmits.

    Attributes:
      rounds: messages that follow one another.
      messages: that the rank sends; it receives as many.
      rank_bytes: that the rank sends; it receives as many.
      card_bytes: that the host sends, all its ranks together; it receives as many.
      reduced: bytes that the rank reads to reduce them.
      shared: bytes of the buffer that the ranks of the host reduce together.
      overlaps: whether the processor works beside the card; else one waits for the other.
    """

    rounds: float = 0
    messages: float = 0
    rank_bytes: float = 0
    card_bytes: float = 0
    reduced: float = 0
    shared: float = 0
    overlaps: bool = True

    def __add__(self, other: Load) -> Load:
        return Load(
            self.rounds + other.rounds,
            self.messages + other.messages,
            self.rank_bytes + other.rank_bytes,
            self.card_bytes + other.card_bytes,
            self.reduced + other.reduced,
            self.shared + other.shared,
            self.overlaps and other.overlaps,
        )


def seconds(load: Load, network: Network, ranks: int = 1) -> float:
    """How long it takes, where `ranks` of a host do the same at the same time.

    Where processors and card work side by side the longer of the two counts, else both. What a card has saved while it
    was idle, before each of the messages that follow one another, makes up for as much of that.

    Example:
      >>> slow = Network(latency_s=0.5, message_s=0, bandwidth=100.0, copy_s=0.001, reduce_s=0)
      >>> load = Load(rounds=2, rank_bytes=200, card_bytes=200)
      >>> seconds(load, slow), seconds(load, replace(slow, burst=10)), seconds(load, replace(slow, burst=1000))
      (3.0, 2.8, 2.0)
    """
    turns = max(1.0, ranks / network.processors)
    asleep = 1.0 if turns > 1 else 0.0
    busy = 2 * load.messages * (network.message_s + asleep * network.wake_s)
    busy += (
        2 * load.rank_bytes * network.copy_s + load.reduced * network.reduce_s + load.shared * network.node_s
    )
    busy, card = turns * busy, load.card_bytes / network.bandwidth
    waits = load.rounds * (network.latency_s + asleep * network.wait_s)
    plain = waits + (max(busy, card) if load.overlaps else busy + card)
    return max(plain - load.rounds * network.burst / network.bandwidth, waits + busy, card)


def header_exchange(n: int, nbytes: float = 0) -> Load:
    """Every rank tells all others what it is about to do, with `nbytes` behind the header: itself, or through others.

    Example:
      >>> header_exchange(16).messages, header_exchange(17).messages
      (15, 5)
    """
    if n < 2:
        return Load()
    sent = (n - 1) * nbytes
    if n <= SPREAD_ABOVE:
        return Load(rounds=1, messages=n - 1, rank_bytes=sent, card_bytes=sent)
    steps, sent = log2_up(n), sent + (n - 1) * HEADER
    return Load(rounds=steps, messages=steps, rank_bytes=sent, card_bytes=sent)


def log2_up(n: int) -> int:
    return (n - 1).bit_length()


def inline_limit(n: int) -> int:
    """Most bytes that go with the headers of a meeting of `n` ranks.

    Example:
      >>> inline_limit(2), inline_limit(17), inline_limit(1024)
      (16384, 2048, 128)
    """
    spread = min(max(SPREAD_TOGETHER // n, LEAST_SPREAD), INLINE[-1][1])
    return next((limit for most, limit in INLINE if n <= most), spread)


def short(n: int, nbytes: float) -> Load:
    """All bytes travel with the headers, and every rank reduces all of them."""
    return header_exchange(n, nbytes) + Load(reduced=n * nbytes)


def windows(n: int, nbytes: float) -> int:
    """Into how many windows a long buffer is cut."""
    piece = min(max(TOGETHER // n, LEAST_PIECE), MOST_PIECE)
    return max(1, math.ceil(nbytes / (n * piece)))


def two_shot(n: int, nbytes: float) -> Load:
    """Each rank owns a part: the others send it theirs, it reduces, and sends the result to all."""
    if n == 1:
        return Load()
    sent = 2 * (n - 1) / n * nbytes
    return Load(2, 2 * (n - 1) * windows(n, nbytes), sent, sent, nbytes)


def steps_in_pairs(n: int, *, scatter_first: bool) -> tuple[int, int]:
    """Messages that follow one another, and messages of the busiest rank: as `halving_cost` of the engine.

    n is a sum of powers of two, whose ranks add up for themselves; the sums go from block to block, and back.

    Example:
      >>> steps_in_pairs(64, scatter_first=True), steps_in_pairs(6, scatter_first=False)
      ((12, 12), (3, 3))
    """
    blocks = [1 << bit for bit in reversed(range(n.bit_length())) if n >> bit & 1]
    turns = 2 if scatter_first else 1
    most = 0
    for larger, own, smaller in zip([0, *blocks], blocks, [*blocks[1:], 0], strict=False):
        most = max(most, turns * (own.bit_length() - 1) + larger // own + (smaller > 0))
    return turns * (blocks[0].bit_length() - 1) + (0 if scatter_first else len(blocks) - 1), most


def recursive_halving(n: int, nbytes: float) -> Load:
    """In each of log2(n) steps half of what is left is exchanged with one partner; then the same backwards."""
    if n == 1:
        return Load()
    (rounds, messages), sent = steps_in_pairs(n, scatter_first=True), 2 * (n - 1) / n * nbytes
    return Load(rounds, messages * max(1, math.ceil(nbytes / HALVED_WINDOW)), sent, sent, sent)


def recursive_doubling(n: int, nbytes: float) -> Load:
    """In each of log2(n) steps everything is exchanged with one partner."""
    if n == 1:
        return Load()
    rounds, messages = steps_in_pairs(n, scatter_first=False)
    sent = messages * nbytes
    return Load(rounds, messages, sent, sent, 2 * sent, overlaps=False)


def ring(n: int, nbytes: float) -> Load:
    """Parts go around twice: once they are summed up, once they are handed out."""
    if n == 1:
        return Load()
    sent = 2 * (n - 1) / n * nbytes
    return Load(2 * (n - 1), 2 * (n - 1), sent, sent, 2 * (n - 1) / n * nbytes)


ALGORITHMS: dict[str, Callable[[int, float], Load]] = {
    "two_shot": two_shot,
    "recursive_halving": recursive_halving,
    "recursive_doubling": recursive_doubling,
    "ring": ring,
}
"""What follows the meeting, in which all ranks say what they are about to do."""

IN_USE = ("two_shot", "recursive_halving", "recursive_doubling")
SHORT = "short"

REFERENCE = Network(latency_s=15e-6, message_s=5e-6, bandwidth=1.19e9, copy_s=0.22e-9, reduce_s=0.0133e-9)
"""What an allreduce is selected by: csrc/collectives/select_algorithm.cpp."""


def select_algorithm(n: int, nbytes: float) -> str:
    """The cheapest of what samestep can do, of what does not go with the headers.

    Example:
      >>> select_algorithm(8, 4096), select_algorithm(64, 65536), select_algorithm(8, 2**26)
      ('recursive_doubling', 'recursive_halving', 'two_shot')
    """
    return (
        min(IN_USE, key=lambda name: seconds(ALGORITHMS[name](n, nbytes), REFERENCE)) if n > 1 else "two_shot"
    )


def chosen(n: int, nbytes: float) -> str:
    """What samestep does among `n` ranks that send the same.

    Example:
      >>> chosen(2, 4096), chosen(64, 4096)
      ('short', 'recursive_doubling')
    """
    return SHORT if nbytes + 8 <= inline_limit(n) else select_algorithm(n, nbytes)


def flat(network: Network, hosts: int, ranks: int, nbytes: float, algorithm: str = "") -> float:
    """Seconds of an allreduce in which all ranks take the same part; the card transmits what leaves the host."""
    n = hosts * ranks
    name = algorithm or chosen(n, nbytes)
    load = short(n, nbytes) if name == SHORT else header_exchange(n) + ALGORITHMS[name](n, nbytes)
    return seconds(_through_one_card(load, hosts, ranks), network, ranks)


def _through_one_card(load: Load, hosts: int, ranks: int) -> Load:
    n = hosts * ranks
    return replace(load, card_bytes=load.card_bytes * ranks * (n - ranks) / max(1, n - 1))


def levels(network: Network, hosts: int, ranks: int, nbytes: float, algorithm: str = "") -> float:
    """Seconds of an allreduce in levels: inside the hosts, then each rank with its like on all hosts, on its share.

    Before that all ranks meet, and at the end those of a host tell each other.
    """
    n, share = hosts * ranks, nbytes / ranks
    if algorithm == SHORT or (not algorithm and nbytes + 8 <= inline_limit(n)):
        return flat(network, hosts, ranks, nbytes, SHORT)
    load = ALGORITHMS[algorithm or select_algorithm(hosts, share)](hosts, share)
    met = seconds(_through_one_card(header_exchange(n, PLACES), hosts, ranks), network, ranks)
    if ranks > 1:
        load += Load(rounds=1, messages=ranks - 1, shared=nbytes)
    return met + seconds(replace(load, card_bytes=load.card_bytes * ranks), network, ranks)


def reductions(network: Network, hosts: int, ranks: int, buckets: Sequence[float]) -> float:
    """Seconds to reduce the messages of a step, of so many bytes each, one after the other.

    Example:
      >>> reductions(REFERENCE, 2, 1, [MIB, MIB]) == 2 * levels(REFERENCE, 2, 1, MIB)
      True
    """
    return sum(levels(network, hosts, ranks, nbytes) for nbytes in buckets)


def step(
    network: Network,
    hosts: int,
    ranks: int,
    buckets: Sequence[float],
    *,
    compute_s: float,
    overlap: float = 0.0,
) -> float:
    """Seconds of a training step whose gradients are these messages.

    Args:
      overlap: part of `compute_s` that the reductions may go beside, 0 to 1.
    """
    return compute_s + max(0.0, reductions(network, hosts, ranks, buckets) - overlap * compute_s)


def resnet50() -> list[int]:
    """Elements of each parameter of ResNet-50 (He et al., CVPR 2016), in order.

    Example:
      >>> len(resnet50()), sum(resnet50())
      (161, 25557032)
    """
    counts = [64 * 3 * 49, 64, 64]
    before = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes = [(before, width), (9 * width, width), (width, 4 * width)]
            if block == 0:
                shapes.append((before, 4 * width))
            for inputs, outputs in shapes:
                counts += [inputs * outputs, outputs, outputs]
            before = 4 * width
    return [*counts, 2048 * 1000, 1000]
