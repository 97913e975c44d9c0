"""How ranks find each other: stores, and meetings at them.

`meet(url, rank, world_size, timeout)` brings all ranks of a job together; nothing here imports the compiled core.
"""

from samestep.rendezvous.file_store import FileStore
from samestep.rendezvous.handlers import register_rendezvous_handler
from samestep.rendezvous.meeting import Meeting, join, meet
from samestep.rendezvous.store import HashStore, PrefixStore, Store
from samestep.rendezvous.tcp_store import TCPStore

__all__ = [
    "FileStore",
    "HashStore",
    "Meeting",
    "PrefixStore",
    "Store",
    "TCPStore",
    "join",
    "meet",
    "register_rendezvous_handler",
]
