"""The command line of `samestep run`."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from samestep import _settings
from samestep.launch import clusters
from samestep.launch.plan import HostSlots, parse_hostfile, parse_hosts

_USAGE = "samestep run -n N [flags] script.py [its arguments]"
_DESCRIPTION = "Starts N ranks of a program, shows what they print, and ends all of them when one fails."
_EPILOG = """\
examples:
  samestep run -n 4 train.py --lr 0.1            four ranks on this host
  samestep run -n 4 -m package.train             a module, as python -m
  samestep run -n 4 --no-python ./train          a program that is not Python
  samestep run --hosts a:2,b:2 train.py          two ranks on each of two hosts, by ssh
  samestep run -n 2 --nnodes 2 --node-rank 0 --master-addr a train.py
                                                 the same, started on each host; 1 on the other
  samestep run -n 2 --min-ranks 1 --listen 29400 train.py
  samestep run -n 2 --join a:29400 train.py      two more ranks, from another host, while it runs

exit code: that of the first rank that failed, 128 + the signal that killed it, or 0;
130 after Ctrl-C, 143 after SIGTERM, 124 after --timeout, 2 for a wrong command line.
"""


@dataclass(frozen=True)
class Options:
    """What to run and how: the flags, whose help says what they mean, and what is made of them.

    Attributes:
      program: script, module or program, by `kind` ("script", "module", "program"); `arguments` follow it, unchanged.
      hosts: where, in rank order; empty = this host, or what a batch system allotted.
      log_names: what the files of `logs` are called, with `{rank}`, `{node}` and `{local_rank}`, for stdout and stderr.
      shown: which of stdout (1) and stderr (2) are passed on, too.
      cluster: the system that said which node this is; "" = the command line.
      n_restarts: how often all ranks have been started anew.
      rank_argument: first argument of each rank, with `{local_rank}`; "" = none.
    """

    n_ranks: int
    program: str
    kind: str = "script"
    arguments: tuple[str, ...] = ()
    hosts: tuple[HostSlots, ...] = ()
    mpi: bool = False
    rsh: tuple[str, ...] = ("ssh",)
    raw: bool = False
    logs: str | None = None
    log_names: tuple[str, str] = ("rank_{rank}.out", "rank_{rank}.err")
    shown: tuple[int, ...] = (1, 2)
    env: dict[str, str] = field(default_factory=dict)
    timeout_s: float | None = None
    master_addr: str | None = None
    master_port: int | None = None
    n_nodes: int = 1
    node_rank: int = 0
    cluster: str = ""
    secret_file: str | None = None
    max_restarts: int = 0
    n_restarts: int = 0
    min_ranks: int | None = None
    chaos_s: float | None = None
    listen: int | None = None
    join: tuple[str, int] | None = None
    jax: bool | None = None
    rank_argument: str = ""

    @property
    def first_rank(self) -> int:
        """The number of this run's first rank in the whole job."""
        return self.node_rank * self.n_ranks

    def rank_argv(self, python: str, local_rank: int = 0) -> list[str]:
        """The command of a rank, with `python` as the interpreter."""
        start = {"script": [python, "-u"], "module": [python, "-u", "-m"], "program": []}[self.kind]
        own = [self.rank_argument.format(local_rank=local_rank)] if self.rank_argument else []
        return [*start, self.program, *own, *self.arguments]

    def log_file(self, rank: int, fd: int) -> str:
        """Name of the file in `logs` for a rank of the whole job, such as one that joins, and 1 or 2."""
        local_rank = rank - self.first_rank
        return self.log_names[fd - 1].format(rank=rank, node=self.node_rank, local_rank=local_rank)


def parse(argv: Sequence[str], env: Mapping[str, str] = os.environ) -> Options:
    """Reads what follows `samestep run`. Everything after the program is the program's.

    Args:
      env: says what the words leave out where a cluster system started the launcher on each node: see `clusters`.

    Raises:
      SystemExit: with code 2 and a usage line for a wrong command line, with 0 for `--help`.

    Example:
      >>> parse(["-n", "2", "train.py", "-n", "7"]).arguments
      ('-n', '7')
    """
    ours = parser()
    own, command = ours.split(list(argv))
    if other := next((word for word in own if word.partition("=")[0] in _OF_OTHERS), None):
        ours.error(f"there is no {other}; the number of ranks is -n N, for example -n 4")
    flags = ours.parse_args(own)
    if not command:
        ours.error("what to run? Give a script, or -m module, or --no-python program")
    if flags.hostfile:
        if flags.hosts:
            ours.error("--hosts and --hostfile exclude each other")
        flags.hosts = flags.hostfile
    _check_join(ours, flags)
    cluster = _ask_cluster(ours, flags, env)
    hosts = flags.hosts or ()
    n_from_hosts = sum(host.n_ranks for host in hosts)
    n_ranks = flags.n or n_from_hosts
    if not n_ranks:
        after = "; flags stand before the program" if "-n" in command[1:] else ""
        ours.error(f"how many ranks? Give -n N, for example -n 4{after}")
    if hosts and n_ranks != n_from_hosts:
        ours.error(f"-n {n_ranks} and --hosts, which has room for {n_from_hosts}, must agree; leave -n out")
    if flags.module and flags.no_python:
        ours.error("-m and --no-python exclude each other")
    if flags.mpi and flags.native:
        ours.error("--mpi and --native exclude each other")
    _check_nodes(ours, flags)
    _check_losses(ours, flags, n_ranks)
    env_of_ranks = dict(flags.env or ())
    if flags.max_restarts and not flags.min_ranks:
        env_of_ranks[_settings.RESTART_COUNT] = str(flags.restarted)
    given = {_FIELDS.get(name, name): value for name, value in vars(flags).items()}
    given |= {"n_ranks": n_ranks, "hosts": hosts, "env": env_of_ranks, "cluster": cluster}
    given["kind"] = "module" if flags.module else "program" if flags.no_python else "script"
    if flags.nnodes > 1:
        given["master_port"] = flags.master_port or _PORT
    known = {one.name: given[one.name] for one in fields(Options) if one.name in given}
    return Options(program=command[0], arguments=tuple(command[1:]), **known)


_FIELDS = {"nnodes": "n_nodes", "timeout": "timeout_s", "chaos": "chaos_s", "restarted": "n_restarts"}
"""Of flags that `Options` calls otherwise."""
_OF_OTHERS = ("-np", "--np", "--nproc", "--nproc-per-node", "--ntasks")  # what other launchers call -n
RESTARTED = "--restarted"  # what the launcher tells itself
_PORT = 29500  # of a job of several runs, which could not tell each other of a free one


def _ask_cluster(parser: argparse.ArgumentParser, flags: argparse.Namespace, env: Mapping[str, str]) -> str:
    """Completes the flags by what the cluster system says; returns its name, "" for none."""
    found = None
    if not (flags.hosts or flags.mpi or flags.join or flags.node_rank is not None or flags.nnodes == 1):
        try:
            found = clusters.nodes(env, socket.getfqdn(), flags.nnodes)
        except ValueError as error:
            parser.error(str(error))
    if found is None:
        flags.nnodes, flags.node_rank = flags.nnodes or 1, flags.node_rank or 0
        return ""
    if flags.nnodes not in (None, found.n_nodes):
        parser.error(f"--nnodes {flags.nnodes}, but {found.system} says {found.n_nodes}; leave --nnodes out")
    flags.nnodes, flags.node_rank = found.n_nodes, found.node_rank
    flags.master_addr = flags.master_addr or found.master_addr
    flags.master_port = flags.master_port or found.master_port
    flags.n = flags.n or found.n_ranks
    return found.system if found.n_nodes > 1 else ""


def _check_nodes(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    if flags.node_rank >= flags.nnodes:
        parser.error(f"--node-rank {flags.node_rank} is outside the {flags.nnodes} nodes, counted from 0")
    if flags.nnodes > 1 and (flags.hosts or flags.mpi):
        parser.error(
            "--nnodes is for a run on each node, and --hosts and --mpi for one run that starts them all"
        )
    if flags.nnodes > 1 and flags.max_restarts:
        parser.error("--max-restarts is for one run that starts all ranks; the other nodes would not know")
    if flags.nnodes > 1 and not flags.master_addr:
        parser.error("--nnodes needs --master-addr, the address of node 0")


def _check_losses(parser: argparse.ArgumentParser, flags: argparse.Namespace, n_ranks: int) -> None:
    if flags.min_ranks is None:
        if flags.chaos is not None:
            parser.error("--chaos kills ranks, and needs --min-ranks K: with how many the job goes on")
        if flags.listen is not None:
            parser.error(
                "--listen lets ranks join, and needs --min-ranks K: the job goes on when they are lost"
            )
        return
    if flags.min_ranks > n_ranks:
        parser.error(f"--min-ranks {flags.min_ranks}, but there are {n_ranks} ranks")
    if flags.mpi:
        parser.error("--min-ranks and --mpi exclude each other: MPI ends the job when a rank is lost")
    if flags.nnodes > 1:
        parser.error("--min-ranks is for one run that starts all ranks, as with --hosts; leave --nnodes out")


def _check_join(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    of_ranks = ("join", "n", "module", "no_python", "native", "env", "secret_file")
    given = [name for name, value in vars(flags).items() if value != parser.get_default(name)]
    if flags.join is not None and (others := [name for name in given if name not in of_ranks]):
        parser.error(
            f"--{others[0].replace('_', '-')} is for the launcher of the job, which --join does not start"
        )


def parser() -> CommandLine:
    """Of `samestep run`, for its own flags; what follows them is the program."""
    parser = CommandLine(
        prog="samestep run",
        usage=_USAGE,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-n", type=whole_number, metavar="N", help="number of ranks")
    add("-m", "--module", action="store_true", help="the program is a module, run as python -m")
    add("--no-python", action="store_true", help="run the program itself, not python with it")
    add("--mpi", action="store_true", help="use the mpirun of the MPI library that mpi4py loads")
    add("--native", action="store_true", help="start the ranks without MPI (the default)")
    add("--hosts", type=_hosts, metavar="A:2,B:2", help="hosts and ranks on each, in rank order")
    add(
        "--hostfile",
        type=_hostfile,
        metavar="FILE",
        help="the same from a file, as mpirun, PBS and LSF have it",
    )
    rsh = "remote shell for other hosts without MPI (default: ssh)"
    add("--rsh", type=_words, default=("ssh",), metavar="CMD", help=rsh)
    add("--nnodes", type=whole_number, metavar="N", help="runs that make the job, one per node")
    add("--node-rank", type=count, metavar="R", help="which of them this is, from 0")
    secret = "the job's secret, made where there is none (with --nnodes: ~/.config/samestep/secret)"
    add("--secret-file", metavar="FILE", help=secret)
    add(
        "--env",
        type=_variable,
        action="append",
        metavar="NAME[=VALUE]",
        help="a variable for all ranks; repeatable",
    )
    add("--raw", action="store_true", help="do not put the rank in front of each line")
    add("--logs", metavar="DIR", help="also write DIR/rank_<r>.out and .err")
    for_jax = (
        "run the CPU collectives of JAX on samestep, or not (default: with versions of JAX that were tested)"
    )
    add("--jax", action=argparse.BooleanOptionalAction, default=None, help=for_jax)
    add("--timeout", type=_seconds, metavar="S", help="end the run after S seconds, exit code 124")
    restarts = "start all ranks anew, up to N times, after one has failed"
    add("--max-restarts", type=count, default=0, metavar="N", help=restarts)
    goes_on = (
        "go on with at least K ranks after a loss (see TrainState); --max-restarts then counts single ranks"
    )
    add("--min-ranks", type=whole_number, metavar="K", help=goes_on)
    chaos = "with --min-ranks: kill a random rank about every S seconds, to try the program"
    add("--chaos", type=_seconds, metavar="S", help=chaos)
    listen = "with --min-ranks: port at which more ranks may join while the job runs; 0: a free one"
    add("--listen", type=lambda text: 0 if text == "0" else port(text), metavar="P", help=listen)
    add("--join", type=_address, metavar="HOST:P", help="the ranks join the job whose launcher listens there")
    add(RESTARTED, type=count, default=0, help=argparse.SUPPRESS)
    add("--master-addr", metavar="HOST", help="MASTER_ADDR of the ranks (default: the first host)")
    add("--master-port", type=port, metavar="P", help="MASTER_PORT of the ranks (default: a free port)")
    return parser


class CommandLine(argparse.ArgumentParser):
    """Flags of ours, followed by a program with its own."""

    def __init__(self, **how: Any) -> None:
        self._with_value: set[str] = set()  # flags whose value may be the next word
        super().__init__(**how)

    def add_argument(self, *names: str, **how: Any) -> argparse.Action:
        """As in the base class."""
        added = super().add_argument(*names, **how)
        if added.nargs is None:
            self._with_value.update(added.option_strings)
        return added

    def split(self, argv: list[str]) -> tuple[list[str], list[str]]:
        """Our own flags, with dashes for underscores, and the program with its arguments."""
        i = 0
        while i < len(argv):
            word = argv[i]
            if word == "--":
                return argv[:i], argv[i + 1 :]
            if not word.startswith("-"):
                return argv[:i], argv[i:]
            if word.startswith("--"):
                name, equals, value = word.partition("=")
                argv[i] = name.replace("_", "-") + equals + value
            i += 2 if argv[i] in self._with_value else 1
        return argv, []


def _whole(what: str, least: int, most: float = math.inf) -> Callable[[str], int]:
    """For argparse: a number in a range."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return int(text)

    return read


whole_number = _whole("a whole number above 0", 1)
count = _whole("a whole number of at least 0", 0)
port = _whole("a port, 1 to 65535", 1, 65535)


def _words(text: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a command: {error}") from None
    if not words:
        raise argparse.ArgumentTypeError("an empty command")
    return words


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def _address(text: str) -> tuple[str, int]:
    host, colon, number = text.rpartition(":")
    if not (host and colon):
        raise argparse.ArgumentTypeError(f"{text!r} is not an address as HOST:PORT")
    return host.strip("[]"), port(number)


def _hosts(text: str) -> tuple[HostSlots, ...]:
    try:
        return parse_hosts(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _hostfile(path: str) -> tuple[HostSlots, ...]:
    try:
        with open(path) as file:
            return parse_hostfile(file.read())
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} names no variable; write NAME or NAME=VALUE")
    if not equals and name not in os.environ:
        raise argparse.ArgumentTypeError(f"{name} is not set here; write {name}=VALUE")
    return name, value if equals else os.environ[name]
