#!/usr/bin/env python3
"""Check that every file of csrc and of the Python package uses only what lies below it.

In csrc a folder includes from the folders of its row in csrc/README.md, which stand above it there. In Python a module
imports from rows above its own in PYTHON, wherever in the file the import stands, and no modules import each other in a
circle. `samestep._settings` alone spells the names of environment variables, and reads them. Beside each memory order
of csrc a comment gives the reason.
"""

import ast
import graphlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
PREPROCESSOR_HOMES = {"os", "kernels"}
PYTHON_HOMES = {"arrays", "calls", "bindings", "jax"}

PYTHON = [  # from the bottom; what stands in one row does not know the others in it
    {"_core"},
    {"errors"},
    {"_settings"},
    {"_util", "reduce_ops"},
    {"rendezvous", "gpu"},
    {"launch"},
    {"arrays"},
    {"group"},
    {"trees"},
    {"step"},
    {"backend", "optimizer"},
    {"data"},
    {"world"},
    {"internal", "state_file", "train_step"},
    {
        "functions",
        "fluxmpi",
        "train_state",
        "bench",
        "distributed",
        "torch",
        "multiprocessing",
        "testing",
        "jax",
        "doctor",
        "dask",
        "ray",
    },
    {"notebook", "torchft"},
    {"__main__"},
]
NAMES_ONLY = {"samestep", "samestep.torch"}  # for users: they import what they like, and nobody imports them
OF_GROUPS = {  # what the rows above `internal` use of a group by that module alone
    *(
        "_comm",
        "_bootstrap_comm",
        "_hosts",
        "_trusted",
        "_children",
        "_child",
        "_adopt",
        "_abandon",
        "_cache",
    ),
    *("_call_at_end", "_allgather_facts", "_await_streams", "_enqueue_allreduce", "_enqueue_reduce"),
}
WITHOUT_CORE = {"_util", "launch", "rendezvous"}  # programs without NumPy and the core run these
SETTINGS = {"samestep._settings"}
PACKAGES = ("samestep",)


def python_modules(folder: Path) -> dict[str, Path]:
    """Dotted name -> file of all modules of both packages."""
    found = {}
    for path in sorted(p for package in PACKAGES for p in (folder / package).rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, modules: dict[str, Path]) -> Iterator[tuple[int, str]]:
    """Line and dotted name of each module of ours that a file imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        if isinstance(node, ast.ImportFrom):
            of = node.module or ""
            names = [f"{of}.{name}" if name == "_core" or f"{of}.{name}" in modules else of for name in names]
        yield from ((node.lineno, name) for name in names if name.split(".")[0] in PACKAGES)


def row_of(module: str) -> tuple[str, int]:
    """Name and number of the row that a module stands in; -1 = in none."""
    parts = module.split(".")
    name = parts[1] if parts[0] == "samestep" and len(parts) > 1 else parts[0]
    return name, next((i for i, row in enumerate(PYTHON) if name in row), -1)


def settings_named(path: Path) -> Iterator[tuple[int, str]]:
    """Line and name of each environment variable of ours that a file spells in code, but for docstrings and texts."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) and id(node) not in docstrings else None
        if isinstance(text, str) and re.fullmatch(r"SAMESTEP_[A-Z_]*[A-Z]", text):
            yield node.lineno, text


def settings_read(path: Path) -> Iterator[int]:
    """Lines at which a file reads a variable of ours without `_settings.get`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        key: ast.AST | None = None
        mapping: ast.AST | None = None
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "get"
            and node.args
        ):
            key, mapping = node.args[0], node.func.value
        elif isinstance(node, ast.Subscript):
            key, mapping = node.slice, node.value
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
            key, mapping = node.left, node.comparators[0]
        of_ours = isinstance(key, ast.Attribute) and ast.unparse(key.value) == "_settings"
        if of_ours and mapping is not None and ast.unparse(mapping) in ("env", "os.environ"):
            yield node.lineno  # type: ignore[attr-defined]


def insides_of_groups(path: Path) -> Iterator[tuple[int, str]]:
    """Line and name of each of OF_GROUPS that a file takes from anything but `self`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr in OF_GROUPS and ast.unparse(node.value) != "self":
            yield node.lineno, node.attr


def wrong_in_python(folder: Path) -> list[str]:
    """What does not follow PYTHON."""
    modules, found = python_modules(folder), []
    graph: dict[str, set[str]] = {module: set() for module in modules}
    for module, path in modules.items():
        name, number = row_of(module)
        if module not in NAMES_ONLY and number < 0:
            found.append(f"{module}: a package without a row in {Path(__file__).name}")
        if module not in SETTINGS:
            file = path.relative_to(folder.parent)
            found += [
                f"{file}:{line}: only _settings may spell {text}" for line, text in settings_named(path)
            ]
            found += [f"{file}:{line}: read it by _settings.get" for line in settings_read(path)]
        if number > row_of("samestep.internal")[1]:
            found += [
                f"{path.relative_to(folder.parent)}:{line}: use samestep.internal, not {attribute}"
                for line, attribute in insides_of_groups(path)
            ]
        for line, used in imports(path, modules):
            where = f"{path.relative_to(folder.parent)}:{line}"
            graph[module].add(used)
            of, below = row_of(used)
            if used in NAMES_ONLY:
                found.append(f"{where}: {used} is for users; import from the module that defines the name")
            elif module not in NAMES_ONLY and of != name and below >= number:
                found.append(f"{where}: {name} must not import {of}")
            elif of == "_core" and name in WITHOUT_CORE:
                found.append(f"{where}: {name} runs without the core")
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        found.append(f"modules import each other: {' <- '.join(error.args[1])}")
    return found


def allowed_in_csrc(table: str) -> dict[str, set[str]]:
    """What each folder may include, by the table of csrc/README.md; only rows above a row may be in it."""
    allowed: dict[str, set[str]] = {}
    for folder, text in re.findall(r"^\| `([a-z]+)/` \|([a-z, ]*)\|", table, re.MULTILINE):
        named = set(allowed) if text.strip() == "all" else set(re.findall("[a-z]+", text))
        if not named <= set(allowed):
            sys.exit(
                f"csrc/README.md: {folder}/ names {sorted(named - set(allowed))}, which does not stand above it"
            )
        allowed[folder] = named
    return allowed


def orders_without_reason(lines: list[str]) -> Iterator[int]:
    """Lines with a memory order that no comment explains, there or in the 3 lines before."""
    reason = re.compile(r"//.*([Pp]airs with|[Rr]elaxed|[Oo]rder)")
    for number, line in enumerate(lines, 1):
        code = line.partition("//")[0]
        if re.search(r"memory_order_|__ATOMIC_|_mm_[slm]fence", code) and not any(
            map(reason.search, lines[max(0, number - 4) : number])
        ):
            yield number


def wrong_in_csrc(folder: Path) -> list[str]:
    """What does not follow the table of csrc/README.md."""
    allowed, found = allowed_in_csrc((folder / "README.md").read_text(encoding="utf-8")), []
    homes = {path.name for path in folder.iterdir() if path.is_dir()}
    found += [f"csrc/README.md: {name}/ has no row, or no folder" for name in sorted(homes ^ set(allowed))]
    for path in sorted(p for p in folder.rglob("*") if p.suffix in {".h", ".cpp"}):
        home = path.relative_to(folder).parts[0]
        lines = path.read_text(encoding="utf-8").splitlines()
        found += [
            f"csrc/{path.relative_to(folder)}:{number}: say what this memory order pairs with, or why relaxed is enough"
            for number in orders_without_reason(lines)
        ]
        for number, line in enumerate(lines, 1):
            where = f"csrc/{path.relative_to(folder)}:{number}"
            include = re.match(r'\s*#\s*include\s+"([^"/]+)/', line)
            if include and include[1] != home and include[1] not in allowed.get(home, set()):
                found.append(f"{where}: {home}/ must not include {include[1]}/")
            if re.match(r"\s*#\s*include\s+<(Python\.h|pybind11/)", line) and home not in PYTHON_HOMES:
                found.append(f"{where}: only {sorted(PYTHON_HOMES)} may know Python")
            if re.match(r"\s*#\s*if", line) and home not in PREPROCESSOR_HOMES:
                found.append(f"{where}: conditional compilation belongs to {sorted(PREPROCESSOR_HOMES)}")
    return found


if __name__ == "__main__":
    wrong = wrong_in_csrc(CSRC) + wrong_in_python(ROOT / "python")
    print("\n".join(wrong) or "layers: every include and import follows the table")
    sys.exit(bool(wrong))
