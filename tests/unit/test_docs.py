"""Every public name has a docstring and a place in the pages, and every example runs."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import samestep
from running import script

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PACKAGE = Path(samestep.__file__).parent
PUBLIC = ["samestep", "samestep.fluxmpi", "samestep.distributed", "samestep.multiprocessing"]
SAME_AS = {"total_workers": "size"}  # functions named otherwise than the member of Backend they return
NEEDS = {  # library -> what is below these, and its example, needs it
    "torch": ("samestep.torch.", "samestep.rendezvous.torch_store."),
    "ray": ("samestep.ray.",),
    "torchft": ("samestep.torchft",),
    "jax": ("samestep.group.jax_primitive.",),
}
OUT_OF_REACH = tuple(
    name for library, names in NEEDS.items() if importlib.util.find_spec(library) is None for name in names
)
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]

RUN_DOCTESTS = script("unit/run_doctests")

pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="the pages are not part of this tree")


def alone() -> dict[str, str]:
    """The environment without what a launcher has put there: a program run with it is a world of one."""
    launchers = (
        "OMPI_",
        "PMIX_",
        "PRTE_",
        "PMI_",
        "MPI_",
        "HYDRA_",
        "SLURM_",
        "WORLD_SIZE",
        "RANK",
        "SAMESTEP_",
    )
    return {name: value for name, value in os.environ.items() if not name.startswith(launchers)}


def python(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run Python as a world of one."""
    command = [sys.executable, *argv]
    settings: dict[str, Any] = {"cwd": cwd, "env": alone(), "timeout": 120}
    return subprocess.run(command, capture_output=True, text=True, check=False, **settings)


def run(*argv: str, cwd: Path) -> None:
    """Run Python; the test fails with its output if it fails."""
    done = subprocess.run(
        [sys.executable, *argv],
        cwd=cwd,
        env=alone(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def documented() -> set[str]:
    """The names after `:::` in the API pages, but those that cannot be looked up here."""
    pages = (page.read_text() for page in (DOCS / "api").glob("*.md"))
    names = {name for text in pages for name in re.findall(r"^::: (\S+)", text, re.M)}
    return {name for name in names if not name.startswith(OUT_OF_REACH)}


def resolve(path: str) -> object:
    """The object at a dotted path, e.g. `samestep.fluxmpi.Init`."""
    parts = path.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(path)


def has_place(path: str) -> bool:
    """Whether a name is on a page: itself, its module, or the method or function that is the same thing."""
    owner, _, name = path.rpartition(".")
    value = resolve(path)
    pages = {path, f"samestep.Backend.{SAME_AS.get(name, name)}", f"samestep.{name}"}
    if inspect.ismodule(resolve(owner)) and owner != "samestep":
        pages.add(owner)  # a small module, shown whole
    if isinstance(value, samestep.ReduceOp):
        pages.add("samestep.ReduceOp")
    return bool(pages & documented())


def public_names() -> list[str]:
    """Dotted paths of everything a user may rely on."""
    names = [f"{module}.{n}" for module in PUBLIC for n in importlib.import_module(module).__all__]
    backend = samestep.Backend  # its class also lists the names of MPI and torch, to answer with its own
    return names + [
        f"samestep.Backend.{n}" for n in dir(backend) if not n.startswith("_") and hasattr(backend, n)
    ]


def test_every_public_name_has_a_place_in_the_api_pages() -> None:
    missing = [name for name in public_names() if not has_place(name)]
    assert not missing, f"add `::: name` to docs/api for {missing}"


def test_every_name_in_the_api_pages_exists_and_is_public() -> None:
    for path in documented():
        owner, _, name = path.rpartition(".")
        if inspect.ismodule(resolve(path)):
            continue
        assert name in getattr(resolve(owner), "__all__", [name]), f"{path} is in docs/api but not public"


def test_every_public_name_has_a_docstring() -> None:
    silent = []
    for path in public_names():
        value = resolve(path)
        if isinstance(value, type) and value.__module__.startswith("samestep"):
            silent += [f"{path}.{m}" for m in vars(value) if not m.startswith("_") and not has_text(value, m)]
        if (inspect.isclass(value) or inspect.isroutine(value)) and not inspect.getdoc(value):
            silent.append(path)
    assert not silent, f"no docstring: {silent}"


def has_text(owner: type, name: str) -> bool:
    """Whether a method or property says something; plain attributes need not."""
    value = inspect.getattr_static(owner, name)
    is_code = inspect.isroutine(value) or isinstance(value, property | classmethod | staticmethod)
    return not is_code or bool(inspect.getdoc(getattr(owner, name)))


def test_docstring_examples_run(tmp_path: Path) -> None:
    modules = [
        ".".join(["samestep", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")
        for path in sorted(PACKAGE.rglob("*.py"))
        if ">>>" in path.read_text() and "__main__" not in path.name
    ]
    assert modules
    modules = [module for module in modules if not f"{module}.".startswith(OUT_OF_REACH)]
    run(RUN_DOCTESTS, *modules, cwd=tmp_path)


def blocks(page: Path) -> str:
    """The `python` blocks of a page, one after the other; `py` blocks are fragments."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S))


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.stem)
def test_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    if "import jax\n" in blocks(page):
        pytest.importorskip("jax")
    program = tmp_path / "blocks.py"
    program.write_text(blocks(page))
    run(str(program), cwd=tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_only_blocks_with_output_have_prompts(page: Path) -> None:
    """What the button of a block copies can be run, prompts cannot. On the site, those beside output are not copied."""
    for _, language, block in re.findall(r"^( *)```(\w+)\n(.*?)^\1```$", page.read_text(), re.M | re.S):
        prompts = [line.startswith("$ ") for line in textwrap.dedent(block).splitlines()]
        assert any(prompts) == (language == "console"), (
            f"a block of commands alone is sh, without prompts:\n{block}"
        )
        assert language != "console" or not all(prompts), f"no output, so no prompts:\n{block}"


def test_every_flag_of_run_has_a_row(tmp_path: Path) -> None:
    shown = python("-m", "samestep", "run", "--help", cwd=tmp_path).stdout
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", shown)) - {"--help"}
    rows = set(re.findall(r"--[a-z][a-z-]*", (DOCS / "launching.md").read_text()))
    assert flags <= rows, f"add to docs/launching.md: {sorted(flags - rows)}"


def test_the_figures_of_a_gpu_are_those_of_its_results():
    results = ROOT / "benchmarks/results/gpu/h200.json"
    if not results.exists():
        pytest.skip("the results are not part of this tree")
    words = [sys.executable, ROOT / "benchmarks/gpu/summary.py", "--figures", results]
    made = subprocess.run(words, check=True, capture_output=True, text=True)
    assert results.with_suffix(".md").read_text() == made.stdout
