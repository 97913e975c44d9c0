"""`samestep completion`: scripts for bash and zsh, made from the parsers of the commands' flags.

eval "$(samestep completion bash)"      # in ~/.bashrc
eval "$(samestep completion zsh)"       # in ~/.zshrc, after compinit
"""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

SHELLS = ("bash", "zsh")
_WITH_PARSER = {
    "run": "samestep.launch.arguments",
    "doctor": "samestep.doctor",
    "bench": "samestep.bench",
    "same": "samestep.testing.compare_bits",
    "completion": "samestep.completion",
}
_FILE, _FOLDER = "FILE", "DIR"  # names of values in the parsers

_BASH = """\
_samestep() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" flags="" word i
  if ((COMP_CWORD == 1)); then COMPREPLY=($(compgen -W {commands} -- "$cur")); return; fi
  COMPREPLY=()
  case "${{COMP_WORDS[1]}} $prev" in
{values}
  esac
  for ((i = 2; i < COMP_CWORD; i++)); do  # a word that is no flag, nor the value of one, is the program
    word="${{COMP_WORDS[i]}}"
    case "${{COMP_WORDS[1]}} $word" in
      {valued}) i=$((i + 1)) ;;
      *\\ -*) ;;
      *) return ;;
    esac
  done
  case "${{COMP_WORDS[1]}}" in
{flags}
  esac
  [[ $cur == -* ]] || [[ ${{COMP_WORDS[1]}} == completion ]] && COMPREPLY=($(compgen -W "$flags" -- "$cur"))
}}
complete -o default -F _samestep samestep
"""

_ZSH = """\
#compdef samestep
_samestep() {{
  local -a commands=({commands})
  if ((CURRENT == 2)); then _describe command commands; return; fi
  local command=$words[2]
  shift words; ((CURRENT--))
  case $command in
{cases}
  esac
}}
compdef _samestep samestep
"""


def parser() -> argparse.ArgumentParser:
    """Of `samestep completion`."""
    parser = argparse.ArgumentParser(
        prog="samestep completion",
        description="Prints a script with which a shell completes this command.",
        epilog='for good: eval "$(samestep completion bash)" in ~/.bashrc; for zsh in ~/.zshrc, after compinit',
    )
    parser.add_argument("shell", choices=SHELLS, help="for which shell")
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs `samestep completion`; returns the exit code."""
    from samestep._util.commands import COMMANDS

    flags = parser().parse_args(argv)
    script = {"bash": bash, "zsh": zsh}[flags.shell]
    print(script({name: text for name, (_, text) in COMMANDS.items()}), end="")
    return 0


def bash(commands: Mapping[str, str]) -> str:
    """The script for bash: commands, flags, fixed values; files elsewhere."""
    flags: list[str] = []
    values: list[str] = []
    valued: list[str] = []
    for command in commands:
        words: list[str] = []
        for action in _actions(command):
            choices = list(map(str, action.choices or ()))
            words += action.option_strings or choices
            what = "-d" if action.metavar == _FOLDER else choices and f"-W {shlex.quote(' '.join(choices))}"
            for flag in action.option_strings if action.nargs != 0 else ():
                valued.append(f"{command}\\ {flag}")
                if what:
                    values.append(
                        f'    {command}\\ {flag}) COMPREPLY=($(compgen {what} -- "$cur")); return ;;'
                    )
        flags.append(f"    {command}) flags={shlex.quote(' '.join(words))} ;;")
    return _BASH.format(
        commands=shlex.quote(" ".join([*commands, "--help", "--version"])),
        values="\n".join(values),
        valued="|".join(valued),
        flags="\n".join(flags),
    )


def zsh(commands: Mapping[str, str]) -> str:
    """The script for zsh: the same, with what each flag means."""
    cases = []
    for command in commands:
        specs = [spec for action in _actions(command) for spec in _zsh_specs(action)]
        operands = ["'*::program and its arguments:_files'"] if command in ("run", "same") else []
        cases.append(f"    {command}) _arguments {' '.join([*specs, *operands])} ;;")
    listed = " ".join(shlex.quote(f"{name}:{text}") for name, text in commands.items())
    return _ZSH.format(commands=listed, cases="\n".join(cases))


def _zsh_specs(action: argparse.Action) -> Iterator[str]:
    choices = f"({' '.join(map(str, action.choices))})" if action.choices else ""
    values = choices or {_FILE: "_files", _FOLDER: "_files -/"}.get(str(action.metavar), " ")
    value = f":{_zsh_text(str(action.metavar or action.dest))}:{values}"
    text = _zsh_text((action.help or "").replace("%(default)s", str(action.default)))
    for flag in action.option_strings:
        yield shlex.quote(f"{flag}[{text}]{value if action.nargs != 0 else ''}")
    if not action.option_strings:
        yield shlex.quote(f"1{value}")


def _zsh_text(text: str) -> str:
    return re.sub(r"[]\[:\\]", r"\\\g<0>", text)


def _actions(command: str) -> list[argparse.Action]:
    """The flags and arguments of a command, without those that are hidden."""
    made: argparse.ArgumentParser = importlib.import_module(_WITH_PARSER[command]).parser()
    shown = [action for action in made._actions if action.help != argparse.SUPPRESS]
    if command == "same":  # its arguments are a program and what that takes
        return [action for action in shown if action.option_strings]
    return shown
