"""What a reduction over hosts costs, as formulas: pure.

Each formula adds up what one rank waits for: messages that follow one another (latency), messages that it handles
(processor time), bytes through the host's network card, bytes that the processor copies, and elements that it reduces.
"Bytes" are those of the buffer that each rank passes in.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

KIB, MIB = 1 << 10, 1 << 20
INLINE = (
    (2, 16 * KIB),
    (4, 8 * KIB),
    (16, 2 * KIB),
)  # most bytes that travel with the headers, by ranks; else
INLINE_OF_MANY = 512
MOST_PIECE, LEAST_PIECE, TOGETHER = 256 * KIB, 16 * KIB, 2 * MIB  # of a window; see csrc/exchange/windows.cpp


@dataclass(frozen=True)
class Network:
    """Hosts and what connects them.

    Attributes:
      latency_s: from the send of a short message to its receiver's going on, without the processor time below.
      message_s: processor time of a message, at each of its two ends.
      bandwidth: bytes per second of a host's card, each way.
      copy_s: processor time per byte sent or received.
      reduce_s: processor time per byte that is read to be reduced.
      node_s: time per byte of a buffer to reduce it over the ranks of a host and to hand out the result.
      processors: of a host; ranks share them.
    """

    latency_s: float
    message_s: float
    bandwidth: float
    copy_s: float
    reduce_s: float
    node_s: float = 0.0
    processors: float = 8


@dataclass(frozen=True)
class Load:
    """What one rank does, and what its host's card carries.

    Attributes:
      rounds: messages that follow one another.
      messages: that the rank sends; it receives as many.
      rank_bytes: that the rank sends; it receives as many.
      card_bytes: that the host sends, all its ranks together; it receives as many.
      reduced: bytes that the rank reads to reduce them.
    """

    rounds: float = 0
    messages: float = 0
    rank_bytes: float = 0
    card_bytes: float = 0
    reduced: float = 0

    def __add__(self, other: Load) -> Load:
        return Load(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


def seconds(load: Load, network: Network, ranks: int = 1) -> float:
    """How long it takes, where `ranks` of a host do the same at the same time.

    Processors and card work side by side, so the longer of the two counts.

    Example:
      >>> slow = Network(latency_s=0, message_s=0, bandwidth=100.0, copy_s=0.001, reduce_s=0)
      >>> seconds(Load(rank_bytes=200, card_bytes=200), slow)
      2.0
    """
    turns = max(1.0, ranks / network.processors)
    busy = 2 * load.messages * network.message_s + 2 * load.rank_bytes * network.copy_s
    busy = turns * (busy + load.reduced * network.reduce_s)
    return load.rounds * network.latency_s + max(busy, load.card_bytes / network.bandwidth)


def meeting(n: int, ranks: int = 1) -> Load:
    """Every rank tells all others what it is about to do, before anything is moved."""
    return Load(rounds=1, messages=n - 1) if n > 1 else Load()


def inline_limit(n: int) -> int:
    """Most bytes that go with the headers of a meeting of `n` ranks.

    Example:
      >>> inline_limit(2), inline_limit(17)
      (16384, 512)
    """
    return next((limit for most, limit in INLINE if n <= most), INLINE_OF_MANY)


def short(n: int, nbytes: float) -> Load:
    """All bytes travel with the headers, and every rank reduces all of them."""
    sent = (n - 1) * nbytes
    return meeting(n) + Load(rank_bytes=sent, card_bytes=sent, reduced=n * nbytes)


def windows(n: int, nbytes: float) -> int:
    """Into how many windows a long buffer is cut."""
    piece = min(max(TOGETHER // n, LEAST_PIECE), MOST_PIECE)
    return max(1, math.ceil(nbytes / (n * piece)))


def direct(n: int, nbytes: float) -> Load:
    """Each rank owns a part: the others send it theirs, it reduces, and sends the result to all."""
    if n == 1:
        return Load()
    sent = 2 * (n - 1) / n * nbytes
    moved = Load(2, 2 * (n - 1) * windows(n, nbytes), sent, sent, nbytes)
    return meeting(n) + moved


def halving(n: int, nbytes: float) -> Load:
    """In each of log2(n) steps half of what is left is exchanged with one partner; then the same backwards."""
    if n == 1:
        return Load()
    steps, sent = math.ceil(math.log2(n)), 2 * (n - 1) / n * nbytes
    return Load(2 * steps, 2 * steps, sent, sent, 2 * (n - 1) / n * nbytes)


def ring(n: int, nbytes: float) -> Load:
    """Parts go around twice: once they are summed up, once they are handed out."""
    if n == 1:
        return Load()
    sent = 2 * (n - 1) / n * nbytes
    return Load(2 * (n - 1), 2 * (n - 1), sent, sent, 2 * (n - 1) / n * nbytes)


ALGORITHMS: dict[str, Callable[[int, float], Load]] = {
    "short": short,
    "direct": direct,
    "halving": halving,
    "ring": ring,
}
IN_USE = ("short", "direct")


def chosen(n: int, nbytes: float) -> str:
    """What samestep does among `n` ranks.

    Example:
      >>> chosen(2, 4096), chosen(64, 4096)
      ('short', 'direct')
    """
    return "short" if nbytes + 8 <= inline_limit(n) else "direct"


def flat(network: Network, hosts: int, ranks: int, nbytes: float, algorithm: str = "") -> float:
    """Seconds of an allreduce in which all ranks take part alike; the card carries what leaves the host."""
    n = hosts * ranks
    load = ALGORITHMS[algorithm or chosen(n, nbytes)](n, nbytes)
    outside = ranks * (n - ranks) / max(1, n - 1)
    return seconds(replace(load, card_bytes=load.card_bytes * outside), network, ranks)


def levels(network: Network, hosts: int, ranks: int, nbytes: float, algorithm: str = "") -> float:
    """Seconds of an allreduce in levels: inside the hosts, then each rank with its like on all hosts, on its share."""
    share = nbytes / ranks
    load = ALGORITHMS[algorithm or chosen(hosts, share)](hosts, share)
    inside = nbytes * network.node_s if ranks > 1 else 0.0
    return inside + seconds(replace(load, card_bytes=load.card_bytes * ranks), network, ranks)


def cheapest(network: Network, hosts: int, ranks: int, nbytes: float) -> str:
    """The algorithm between hosts, of all, that costs least in levels."""
    return min(ALGORITHMS, key=lambda name: levels(network, hosts, ranks, nbytes, name))


def step(
    network: Network, hosts: int, ranks: int, nbytes: float, *, compute_s: float, overlap: float = 0.0
) -> float:
    """Seconds of a training step that reduces `nbytes` of gradients, of which `overlap` hides behind the computation.

    Args:
      overlap: part of `compute_s` that the reduction may go beside, 0 to 1.
    """
    return compute_s + max(0.0, levels(network, hosts, ranks, nbytes) - overlap * compute_s)
