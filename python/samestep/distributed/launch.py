"""`python -m samestep.distributed.launch [flags] script [its arguments]`: the flags of 2019 over `samestep run`.

Starts `--nproc_per_node` ranks on this host, as one of `--nnodes` nodes, and ends all of them when one fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from samestep.launch import run
from samestep.launch.arguments import CommandLine, Options, count, port, whole_number

_COMMAND = "python -m samestep.distributed.launch"
_ADDRESS, _PORT = "127.0.0.1", 29500
_STYLES = {"underscore": "--local_rank={local_rank}", "dash": "--local-rank={local_rank}"}


def parse(argv: Sequence[str]) -> Options:
    """Reads the command line. Everything after the script is the script's.

    Raises:
      SystemExit: with code 2 and a usage line for a wrong command line, with 0 for `--help`.

    Example:
      >>> options = parse(["--nproc_per_node=2", "train.py", "--lr", "0.1"])
      >>> options.rank_argv("python", local_rank=1)
      ['python', '-u', 'train.py', '--local_rank=1', '--lr', '0.1']
    """
    parser = _parser()
    own, command = parser.split(list(argv))
    flags = parser.parse_args(own)
    if not command:
        parser.error("what to run? Give a script, or -m module, or --no_python program")
    if flags.module and flags.no_python:
        parser.error("-m and --no_python exclude each other")
    if flags.no_python and not flags.use_env:
        parser.error("--no_python needs --use_env: a program that is not Python gets no --local_rank")
    if flags.node_rank >= flags.nnodes:
        parser.error(f"--node_rank {flags.node_rank} is outside the {flags.nnodes} nodes, counted from 0")
    return Options(
        n_ranks=flags.nproc_per_node,
        program=command[0],
        kind="module" if flags.module else "program" if flags.no_python else "script",
        arguments=tuple(command[1:]),
        raw=True,
        logs=flags.logdir,
        log_names=(
            "node_{node}_local_rank_{local_rank}",
            "node_{node}_local_rank_{local_rank}_stderr",
        ),
        shown=(2,) if flags.logdir else (1, 2),
        master_addr=flags.master_addr,
        master_port=flags.master_port or (_PORT if flags.nnodes > 1 else None),
        n_nodes=flags.nnodes,
        node_rank=flags.node_rank,
        rank_argument="" if flags.use_env else _STYLES[flags.local_rank_style],
    )


def _parser() -> CommandLine:
    parser = CommandLine(
        prog=_COMMAND,
        usage=f"{_COMMAND} [flags] script.py [its arguments]",
        description=f"{__doc__}".partition("\n\n")[2],
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nnodes", type=whole_number, default=1, metavar="N", help="number of nodes (1)")
    add("--node-rank", type=count, default=0, metavar="R", help="number of this node, from 0")
    add("--nproc-per-node", type=whole_number, default=1, metavar="N", help="ranks on this node (1)")
    add("--master-addr", default=_ADDRESS, metavar="HOST", help=f"address of node 0 ({_ADDRESS})")
    add(
        "--master-port",
        type=port,
        metavar="P",
        help=f"port of node 0 (a free one; {_PORT} for several nodes)",
    )
    add(
        "--use-env",
        nargs="?",
        type=_yes_or_no,
        const=True,
        default=False,
        metavar="=True|False",
        help="leave the local rank to LOCAL_RANK; do not pass it as an argument",
    )
    add("--local-rank-style", choices=_STYLES, default="underscore", help="how that argument is written")
    add("-m", "--module", action="store_true", help="the script is a module, run as python -m")
    add("--no-python", action="store_true", help="run the script itself, not python with it")
    add("--logdir", metavar="DIR", help="stdout of each rank to a file there, stderr to another one as well")
    return parser


def _yes_or_no(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")
    return text.lower() == "true"


def main(argv: Sequence[str]) -> int:
    """Runs what the command line says; returns the exit code."""
    return run.start(lambda: parse(argv), _COMMAND)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
