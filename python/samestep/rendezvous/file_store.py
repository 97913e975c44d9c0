"""A store in a file that all ranks can reach."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import struct
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from samestep._util import users
from samestep.errors import Error, InvalidArgumentError, NotInitializedError, TimeoutError, UnavailableError
from samestep.rendezvous.store import DEFAULT_TIMEOUT, WRITES, Path, Store, Table

# Locks on single bytes, far behind the contents, which end with the process that holds them. They are locks of the open
# file description (Linux): unlike those of `fcntl.lockf` they hold between threads, too, and do not end when another
# descriptor of the same file is closed.
TURN = 1 << 40
"""Held exclusively for the time of one operation."""
ALIVE = TURN + 1
"""Shared by all processes that have the store open."""

_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid
_FIRST_LOCK_PAUSE_S, _LONGEST_LOCK_PAUSE_S = 0.0005, 0.01


def _try(fd: int, kind: int, byte: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, says POSIX
        return False
    return True


@contextlib.contextmanager
def exclusive(fd: int, byte: int, timeout: float, what: str) -> Iterator[None]:
    """Holds `byte` alone. Raises TimeoutError if another process has held it for `timeout` seconds."""
    deadline = time.monotonic() + timeout
    pause = _FIRST_LOCK_PAUSE_S
    while not _try(fd, fcntl.F_WRLCK, byte):
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{what}: another process has kept it locked for {timeout:g} s; is one stopped?"
            )
        time.sleep(pause)  # not the waiting form of the lock, which has no deadline
        pause = min(2 * pause, _LONGEST_LOCK_PAUSE_S)
    try:
        yield
    finally:
        _try(fd, fcntl.F_UNLCK, byte)


def is_free(fd: int, byte: int) -> bool:
    """Whether nobody else holds or shares `byte`."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    return int(_FLOCK.unpack(answer)[0]) == fcntl.F_UNLCK


_MAGIC = "samestep store 1 "
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.02  # between looks at the file
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
_OF_OTHERS = 0o077
_NO_FILE, _OF_ANOTHER = "it is not a regular file", "it belongs to another user ({})"
_LONGEST_TURN_S = 2.0  # that a leaving process waits for another one's


class FileStore(Store):
    """A store in a file of a directory that all ranks see.

    The file is a log: a first line with a number that occurs once, then one line for each change. Everybody holds a
    lock on it while the store is open, so a file without locks is known to be left over. The last to close the store
    removes the file. It belongs to one user and nobody else may read or write it, so that what is read there was
    written by processes of this user; symbolic links are not followed.

    Args:
      file_name: absolute path of nothing yet, or of an empty file of this user.
      world_size: accepted and ignored.
      timeout: of `get` and `wait`, and of access to the file; a timedelta or seconds.

    Raises:
      InvalidArgumentError: no such path can hold a store; or a file that was left by another job, that is no store at
        all, that has several names, that belongs to another user, or that other users may read or write, is there; it
        keeps its bytes.
      UnavailableError: the file cannot be written, as on a full disk, or another program has written to it; of every
        operation.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     store = FileStore(f"{folder}/store")
      ...     store.set("key", "value")
      ...     value = store.get("key")
      ...     store.close()
      >>> value
      b'value'
    """

    def __init__(
        self, file_name: str, world_size: int = -1, timeout: timedelta | float = DEFAULT_TIMEOUT
    ) -> None:
        super().__init__(timeout)
        self.private = True
        self.where = f"file {file_name}"
        self._file_name = file_name
        self._mutex = threading.Lock()  # the file's lock does not hold between threads of one store
        self._table = Table()
        self._end = 0  # of what the table has of the file
        self._fd = self._open()
        self._leave = weakref.finalize(self, _leave, self._fd, file_name, os.getpid())

    def close(self) -> None:
        """Leaves the store; the last to do so removes the file. Idempotent."""
        self._leave()

    def remove(self) -> None:
        """Removes the file now, so that its name is free; processes that have it open keep it."""
        if self._leave.alive:
            with self._mutex:
                _unlink(self._fd, self._file_name)

    def _apply(self, operation: str, *arguments: Any) -> Any:
        with self._locked():
            self._read()
            result = self._table.apply(operation, *arguments)
            if operation in WRITES:
                self._append(json.dumps([operation, *arguments]).encode() + b"\n")
            return result

    def _append(self, line: bytes) -> None:
        try:
            _write(self._fd, line, self._end)
        except OSError as error:
            # What the file could not take has not happened: the table is read anew, and a part of a line is removed.
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._end)
            self._table, self._end = Table(), 0
            raise _cannot_write(self._file_name, error) from error
        self._end += len(line)

    def _await(self, paths: Sequence[Path], seconds: float) -> list[Path]:
        deadline = time.monotonic() + seconds
        pause = _FIRST_PAUSE_S
        missing = list(self._apply("missing", paths))
        while missing and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
            if os.fstat(self._fd).st_size != self._end:
                missing = list(self._apply("missing", paths))
            else:  # another thread of this process may have read on in the file
                with self._mutex:
                    missing = list(self._table.apply("missing", paths))
        return missing

    def _open(self) -> int:
        while True:
            fd = _open_regular(self._file_name)
            try:
                with exclusive(fd, TURN, self._timeout, self.where):
                    if _is_at(fd, self._file_name):  # else it was removed meanwhile
                        if self._join(fd):
                            return fd
                        os.unlink(self._file_name)
            except BaseException as error:
                os.close(fd)
                if isinstance(error, OSError) and not isinstance(error, Error):  # no TimeoutError of ours
                    raise _cannot_hold(self._file_name, _why_not_opened(self._file_name, error)) from error
                raise
            os.close(fd)

    def _join(self, fd: int) -> bool:
        """Takes part in the store of an open file; False if it is empty and others may have opened it, too."""
        begin = os.pread(fd, len(_MAGIC), 0)
        if begin and (begin != _MAGIC.encode() or is_free(fd, ALIVE)):
            whose = "was left by another job" if begin == _MAGIC.encode() else "is not a store of samestep"
            raise InvalidArgumentError(f"{self._file_name} {whose}: remove it, or give another path")
        is_shared = bool(os.fstat(fd).st_mode & _OF_OTHERS)
        if is_shared and begin:
            raise InvalidArgumentError(
                f"{self._file_name} may be read or written by other users: remove it, or give another path"
            )
        if is_shared:
            return False
        if not begin:
            try:
                _write(fd, f"{_MAGIC}{os.urandom(8).hex()}\n".encode(), 0)
            except OSError as error:
                os.ftruncate(fd, 0)
                raise _cannot_write(self._file_name, error) from error
        _try(fd, fcntl.F_RDLCK, ALIVE)  # until it is closed; granted, for this process has the turn
        return True

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        if not self._leave.alive:
            raise NotInitializedError(f"the store in {self._file_name} has been closed")
        with self._mutex, exclusive(self._fd, TURN, self._timeout, self.where):
            yield

    def _read(self) -> None:
        data = os.pread(self._fd, os.fstat(self._fd).st_size - self._end, self._end)
        whole = data.rfind(b"\n") + 1
        for line in data[:whole].splitlines():
            if not line.startswith(_MAGIC.encode()):
                self._replay(line)
        self._end += whole
        if whole < len(data):  # the writer was killed before it had written all
            os.ftruncate(self._fd, self._end)

    def _replay(self, line: bytes) -> None:
        try:
            operation, *arguments = json.loads(line)
            self._table.apply(operation, *arguments)
        except (ValueError, TypeError, RecursionError) as error:
            raise UnavailableError(
                f"the store in {self._file_name} is damaged: a line is {line[:40]!r}, which no store of samestep writes"
            ) from error


def _open_regular(file_name: str) -> int:
    path = os.fspath(file_name)
    if not os.path.isabs(path) or path.endswith("/"):
        raise InvalidArgumentError(f"path {path!r} of a store must be the absolute path of a file")
    try:
        is_impossible = b"\0" in os.fsencode(path)
    except UnicodeEncodeError:
        is_impossible = True
    if is_impossible:
        raise InvalidArgumentError(f"path {path!r} of a store: no file can have this name")
    if not os.path.isdir(os.path.dirname(path)):
        raise InvalidArgumentError(f"path {path!r} of a store: there is no directory {os.path.dirname(path)}")
    while True:
        try:
            fd = os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            try:
                fd = os.open(path, _FLAGS)
            except FileNotFoundError:  # removed meanwhile
                continue
            except OSError as error:
                raise _cannot_hold(path, _why_not_opened(path, error)) from error
        except OSError as error:
            raise _cannot_hold(path, _why_not_opened(path, error)) from error
        if why := _why_not(os.fstat(fd)):  # of what is open, not of what has the name by now
            os.close(fd)
            raise _cannot_hold(path, why)
        return fd


def _cannot_hold(path: str, why: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"path {path!r} cannot hold a store: {why}; give another path")


def _why_not_opened(path: str, error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return "it is a symbolic link, which is not followed"
    if error.errno in (errno.EACCES, errno.EPERM):
        with contextlib.suppress(OSError):
            if not users.is_own(owner := os.lstat(path).st_uid):
                return _OF_ANOTHER.format(users.text(owner))
    return _NO_FILE if error.errno in (errno.EISDIR, errno.ENXIO) else str(error.strerror)


def _why_not(facts: os.stat_result) -> str:
    if not stat.S_ISREG(facts.st_mode):
        return _NO_FILE
    if not users.is_own(facts.st_uid):
        return _OF_ANOTHER.format(users.text(facts.st_uid))
    # Another user may have made the link, to a file that is no store.
    return "the file has another name, too, as a hard link" if facts.st_nlink > 1 else ""


def _is_at(fd: int, file_name: str) -> bool:
    """Whether the open file is the one that has this name now."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(file_name))
    except OSError:
        return False


def _write(fd: int, data: bytes, at: int) -> None:
    while data:
        written = os.pwrite(fd, data, at)
        data, at = data[written:], at + written


def _cannot_write(file_name: str, error: OSError) -> UnavailableError:
    """The disk is full, a quota is used up, or the device fails."""
    return UnavailableError(
        f"the store in {file_name} cannot be written: {error.strerror}; free some space there, or give a path elsewhere"
    )


def _leave(fd: int, file_name: str, pid: int) -> None:
    if pid == os.getpid():  # a fork shares the locks
        _unlink(fd, file_name, when_alone=True)
    os.close(fd)


def _unlink(fd: int, file_name: str, *, when_alone: bool = False) -> None:
    """Frees the name of an open file, unless it is already the name of another one.

    Under a lock: between the check and the unlinking another leaving process might free the name and give it to the
    next store, which would then be unlinked.
    """
    turn = exclusive(fd, TURN, _LONGEST_TURN_S, file_name)
    with contextlib.suppress(OSError), turn:  # also if the lock is not granted
        if _is_at(fd, file_name) and (not when_alone or is_free(fd, ALIVE)):
            os.unlink(file_name)
