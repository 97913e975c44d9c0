"""One way to break what each step of `.ci/run` checks, and what that step has to say then; for broken.py."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Break:
    """One line of one file is replaced, and step `fails` of `.ci/run step` has to say so.

    Attributes:
      fails: the name after "FAILED:".
      old: a regular expression; "" = `new` is put at the end of the file.
      why: a regular expression; the reason that the output of the step has to give.
      whole: pytest must not stop at the first failure, as only a whole run is compared with what is expected of it.
    """

    step: str
    fails: str
    file: str
    old: str
    new: str
    why: str
    whole: bool = False


BROKEN_TEST = "\n\n@pytest.mark.ranks({})\ndef test_broken(group):\n    assert group.size == 0\n"

BROKEN_WORLD = """

@pytest.mark.ranks(2)
def test_broken(group, request):
    assert "{}" not in request.node.name
"""

BREAKS = {
    # lint
    "ruff-check": Break(
        "lint", "ruff-check", "python/samestep/errors.py", "", "\nimport os\n", why="`os` imported but unused"
    ),
    "ruff-format": Break(
        "lint",
        "ruff-format",
        "python/samestep/errors.py",
        "",
        "\n\nX = { 1:2 }\n",
        why=r"would be reformatted\n +--> python/samestep/errors\.py",
    ),
    "clang-format": Break(
        "lint",
        "clang-format",
        "csrc/core/deadline.h",
        r"^namespace samestep",
        "namespace  samestep",
        why=r"deadline\.h.*clang-format-violations",
    ),
    "layers": Break(
        "lint",
        "layers",
        "csrc/core/deadline.h",
        r"^#include <chrono>$",
        '#include <chrono>\n\n#include "shm/shm_region.h"',
        why=r"deadline\.h.* must not include shm/",
    ),
    "python-layers": Break(
        "lint",
        "layers",
        "python/samestep/errors.py",
        "",
        "\n\ndef _broken() -> object:\n    from samestep.group import group\n\n    return group\n",
        why=r"errors must not import (samestep\.)?group",
    ),
    "python-settings": Break(
        "lint",
        "layers",
        "python/samestep/errors.py",
        "",
        '\n\n_BROKEN = "SAMESTEP_TIMEOUT"\n',
        why="only _settings may spell SAMESTEP_TIMEOUT",
    ),
    "python-reads": Break(
        "lint",
        "layers",
        "python/samestep/group/trust.py",
        "",
        "\n\n_BROKEN = os.environ.get(_settings.TIMEOUT)\n",
        why=r"trust\.py:\d+: read it by _settings\.get",
    ),
    "memory-order": Break(
        "lint",
        "layers",
        "csrc/engine/operation.h",
        r"  // pairs with finish$",
        "",
        why=r"operation\.h:\d+: say what this memory order pairs with",
    ),
    "words": Break(
        "lint",
        "words",
        "csrc/core/deadline.h",
        r"^#pragma once",
        "#pragma once\n// As LineMeeting.",  # retired: ok
        why=r"deadline\.h.* is retired",
    ),
    "words-of-python": Break(
        "lint",
        "words",
        "python/samestep/errors.py",
        "",
        "\n# what ranks are told\n",
        why=r"errors\.py.*'told' is retired",
    ),
    "mypy": Break(
        "lint",
        "mypy",
        "python/samestep/errors.py",
        "",
        '\n\ndef _broken() -> int:\n    return "text"\n',
        why="Incompatible return value type",
    ),
    # C++
    "asan": Break(
        "cpp",
        "test-asan",
        "tests/cpp/test_deadline.cpp",
        "",
        '\nTEST_CASE("broken") { int* p = new int[2]{}; volatile int i = 2; CHECK(p[i] == p[i]); delete[] p; }\n',
        why="heap-buffer-overflow",
    ),
    "compiler-warning": Break(
        "cpp",
        "build-asan",
        "csrc/core/deadline.h",
        "",
        "\nstatic inline int broken(int unused) { return 0; }\n",
        why="Werror=unused-parameter",
    ),
    "tsan": Break(
        "cpp",
        "test-tsan",
        "tests/cpp/test_deadline.cpp",
        "",
        "\n#include <thread>\n"
        'TEST_CASE("broken") {\n  int x = 0;\n  std::thread t([&] { x = 1; });\n  x = 2;\n  t.join();\n}\n',
        why="ThreadSanitizer: data race",
    ),
    # README's commands
    "demo": Break(
        "demo", "demo", "examples/digits.py", "", '\nraise SystemExit("broken")\n', why=r"\] broken$"
    ),
    "readme-command": Break(
        "demo",
        "demo",
        "README.md",
        r"examples/digits\.py$",
        "examples/figures.py",
        why="there is no file examples/figures.py",
    ),
    "demo-warning": Break(
        "demo",
        "demo",
        "examples/digits.py",
        "",
        '\nimport warnings\nwarnings.warn("broken")\n',
        why="UserWarning: broken",
    ),
    "dependency": Break(
        "test",
        "test",
        "pyproject.toml",
        r'^test = \["samestep\[openmpi\]", "pytest>=8", "hypothesis"',
        'test = ["samestep[openmpi]", "pytest>=8"',
        why="No module named 'hypothesis'",
    ),
    "torch-needed": Break(
        "test",
        "test",
        "tests/unit/test_sampler.py",
        r"^import pytest$",
        "import pytest\nimport torch",
        why="No module named 'torch'",
    ),
    "promise": Break(
        "test",
        "test",
        "pyproject.toml",
        r'^testpaths = \["tests"\]',
        'testpaths = ["tests/unit"]',
        why=r"promises \d+ tests on 3 ranks, but \d+ ran",
        whole=True,
    ),
    "promise-of-all": Break(
        "all",
        "all",
        "pyproject.toml",
        r'^testpaths = \["tests"\]',
        'testpaths = ["tests/chaos"]',
        why=r"promises \d+ tests on 4 ranks, but \d+ ran",
        whole=True,
    ),
    # with torch, JAX and the others
    "stubs": Break(
        "full",
        "stubs",
        "python/samestep/_core.pyi",
        "",
        "\ndef no_such_function() -> int: ...\n",
        why=r"no_such_function is not present at runtime",
    ),
    "full": Break(
        "full",
        "full",
        "tests/interop/test_torch_trees.py",
        "",
        "\n\ndef test_broken():\n    assert torch.ones(1).item() == 0\n",
        why=r"FAILED \S*test_torch_trees\.py::test_broken",
    ),
    # packages
    "link": Break(
        "package",
        "links",
        "README.md",
        "",
        "\n[gone](docs/no-such-page.md)\n",
        why="links to docs/no-such-page",
    ),
    "sdist": Break(
        "package",
        "links",
        "pyproject.toml",
        r'^sdist\.exclude = \["\.ci"',
        'sdist.exclude = [".ci", "docs"',
        why="links to docs/.*, which is not in the sdist",
    ),
    "sdist-without-sources": Break(
        "package",
        "package-build",
        "pyproject.toml",
        r'^sdist\.exclude = \["\.ci"',
        'sdist.exclude = [".ci", "csrc"',
        why=r'csrc/README\.md"\s+cannot be read',
    ),
    "wheel": Break(
        "package",
        "smoke",
        "pyproject.toml",
        r"^wheel\.exclude = \[",
        'wheel.exclude = ["**/objects.py", ',
        why=r"No module named 'samestep\.group\.objects'",
    ),
    "example": Break(
        "package",
        "example",
        "docs/testing.md",
        r"\(group\.size - 1\) / 2$",
        "group.size",
        why=r"assert .* == 1",
    ),
    "example-left-out": Break(
        "package",
        "example",
        "docs/testing.md",
        r"^@pytest\.mark\.ranks\(1, 2, 3\)",
        "@pytest.mark.ranks(1)",
        why="1 tests passed, 3 were expected",
    ),
    "example-needs-mpi": Break(
        "package",
        "example",
        "python/samestep/testing/options.py",
        r'\["self", "native"\]',
        '["self", "mpi"]',
        why="MPI library",
    ),
    # other libraries and worlds
    "mpich": Break(
        "mpich",
        "mpich",
        "tests/conformance/test_bad_input.py",
        "",
        BROKEN_TEST.format(1),
        why="::test_broken",
    ),
    "more": Break(
        "more",
        "test-hosts",
        "tests/conformance/test_schedules.py",
        "",
        BROKEN_TEST.format(2),
        why="::test_broken",
    ),
    "halving": Break(
        "more",
        "test-halving",
        "tests/conformance/test_reductions.py",
        "",
        BROKEN_WORLD.format("halving"),
        why="::test_broken",
    ),
    "nccl": Break(
        "more",
        "test-nccl",
        "tests/conformance/test_bad_input.py",
        "",
        BROKEN_WORLD.format("device-fakes"),
        why="::test_broken",
    ),
    "staged": Break(
        "more",
        "test-staged",
        "tests/conformance/test_groups.py",
        "",
        BROKEN_WORLD.format("device-staged"),
        why="::test_broken",
    ),
    "devices": Break(
        "devices",
        "device-fakes-1",
        "tests/conformance/test_bad_input.py",
        "",
        BROKEN_TEST.format(1),
        why="::test_broken",
    ),
    "newest-jax": Break(
        "newest_jax",
        "newest-jax",
        "tests/interop/test_jax_collectives.py",
        "",
        "\n\ndef test_broken():\n    assert len(jax.devices()) == 0\n",
        why="::test_broken",
    ),
    "clusters": Break(
        "others",
        "clusters",
        "tests/interop/test_dask.py",
        "",
        "\n\ndef test_broken():\n    assert not __file__\n",
        why="::test_broken",
    ),
    "torchft": Break(
        "others",
        "clusters",
        "python/samestep/torchft.py",
        "group_rank=rank,",
        "group_rank=0,",
        why="test_torchft",
    ),
    "third-party": Break(
        "others",
        "third-party",
        "benchmarks/third_party/torchmetrics_ragged.py",
        "",
        '\n\nimport os\n\nassert "SAMESTEP_REPLACE_GLOO" not in os.environ\n',
        why="torchmetrics.* fails",
    ),
    "arm": Break(
        "arm",
        "test-arm",
        "csrc/kernels/rules.h",
        r"^    return a \+ b;$",
        "    return a - b;",
        why=r"assertions: .* passed \| [1-9]\d* failed",
    ),
    # the libraries of GPUs
    "headers": Break(
        "headers",
        "headers",
        "csrc/nccl/nccl_library.h",
        r"^  kInProgress = 7,$",
        "  kInProgress = 6,",
        why="kInProgress",
    ),
    "kit-build": Break(
        "headers",
        "kit-build",
        "benchmarks/gpu/kit_build.py",
        r"-std=c\+\+20",
        "-std=c++11",
        why="error: ",
    ),
    "kit": Break(
        "headers",
        "kit",
        "benchmarks/gpu/kit_checks.py",
        r"if not np\.array_equal\(",
        "if np.array_equal(",
        why=r"failed +[0-9.]+ s +one rank: verbs",
    ),
    # the protocol
    "model": Break(
        "model",
        "model",
        "csrc/shm/shm_region.h",
        r"std::memory_order_release",
        "std::memory_order_relaxed",
        why="VIOLATED: ",
    ),
    "blind-model": Break(
        "model",
        "mutants",
        "tests/model/memory.cpp",
        r"return order == std::memory_order_release",
        "return true || order == std::memory_order_release",
        why="MISSED: ",
    ),
    # pages
    "nav": Break("docs", "docs", "mkdocs.yml", r"^      - concepts\.md\n", "", why=r"concepts\.md"),
    "page-link": Break(
        "docs", "docs", "docs/concepts.md", "", "\n[gone](no-such-page.md)\n", why=r"link 'no-such-page\.md'"
    ),
    "docstring": Break(
        "docs",
        "docs",
        "python/samestep/distributed/backends.py",
        r"^    Raises:\n      InvalidArgumentError: not a string",
        "    Args:\n      no_such: parameter.\n\n    Raises:\n      InvalidArgumentError: not a string",
        why="no_such",
    ),
    "signatures": Break(
        "docs",
        "signatures",
        "mkdocs.yml",
        r"^            line_length: 64$",
        "            line_length: 200",
        why=r"operations: \d+ characters: ",
    ),
    "wide-page": Break(
        "browser",
        "browser",
        "docs/concepts.md",
        "",
        '\n<p style="width: 600px">too wide for a phone</p>\n',
        why="phone, concepts: .*too wide for a phone",
    ),
}

BREAKS["urls"] = Break(
    "wheels",
    "sdist-urls",
    ".ci/project_urls.py",
    '"Issues": f"{repository}/issues"',
    '"Issues": "https://forge.example"',
    why="the source distribution lacks an address",
)

# What another step checks, too.
BREAKS["wheels"] = replace(BREAKS["wheel"], step="wheels", fails="wheel-3")
BREAKS["all-mutants"] = replace(BREAKS["blind-model"], step="mutants", fails="all-mutants")
