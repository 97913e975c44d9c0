"""How ranks find each other: stores, and the rendezvous at a store.

`open_rendezvous(url, rank, world_size, timeout)` waits for all ranks of a job.
Nothing here imports the compiled core.
"""

from samestep.rendezvous.file_store import FileStore
from samestep.rendezvous.rendezvous import Rendezvous, join, open_rendezvous
from samestep.rendezvous.store import HashStore, PrefixStore, Store
from samestep.rendezvous.tcp_store import TCPStore
from samestep.rendezvous.url import register_rendezvous_handler

__all__ = [
    "FileStore",
    "HashStore",
    "PrefixStore",
    "Rendezvous",
    "Store",
    "TCPStore",
    "join",
    "open_rendezvous",
    "register_rendezvous_handler",
]
