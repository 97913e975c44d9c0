"""Ranks from a notebook: `launch`, and `%%ranks` in a real one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cloudpickle")
PROGRAM = Path(__file__).parent / "programs" / "notebook_launch.py"


def run(*words):
    done = subprocess.run(
        [sys.executable, PROGRAM, *map(str, words)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    return json.loads(last), lines, done.stderr.splitlines()


def test_results_and_output_by_rank():
    found, lines, errors = run("total")
    assert found[0] == {"results": [[0, 1, 1.0]]}
    assert found[1] == {"results": [[rank, 3, 6.5] for rank in range(3)]}
    assert found[2] == {"results": [[rank, 3, 3.0] for rank in range(3)]}
    ranks = [0, 0, 1, 2, 0, 1, 2]
    assert sorted(lines) == sorted([f"[{r}] out {r}" for r in ranks] + [f"[{r}] no newline" for r in ranks])
    assert sorted(errors) == sorted(f"[{rank}] err {rank}" for rank in ranks)


@pytest.mark.slow
def test_the_rank_that_fails_first_is_the_error():
    raised, exited, killed, no_result = run("fails")[0]
    assert (raised["error"], raised["index"]) == ("ProcessRaisedException", 2)
    assert "KeyError: 'bad batch'" in raised["text"] and "rank.py" not in raised["text"]
    assert (exited["index"], exited["text"]) == (2, "rank 2 ended with exit code 7")
    assert (killed["index"], killed["text"]) == (2, "rank 2 ended with signal SIGKILL")
    assert "cannot pickle" in no_result["text"]


def test_what_cannot_be_started_is_refused():
    found = run("refused")[0]
    kinds = ["InvalidArgumentError"] * 2 + ["TypeError"] * 3 + ["InvalidArgumentError"]
    assert [one["error"] for one in found] == kinds
    assert "cannot be pickled" in found[-1]["text"]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["interrupt", "alone"])
def test_all_ranks_are_ended(case, tmp_path):
    error, all_gone = run(case, tmp_path)[0]
    assert all_gone
    if case == "interrupt":
        assert error == {"error": "KeyboardInterrupt"}
    else:
        assert error["index"] == 1 and "Still busy, and ended: rank 0" in error["text"]


def execute(*cells, allow_errors=False):
    """The outputs of the cells of a notebook, each as text."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(book, timeout=240, kernel_name="python3", allow_errors=allow_errors).execute()
    return ["".join(map(text_of, cell.outputs)) for cell in book.cells]


def text_of(output):
    """What the output of a cell says: printed, an error, or a value."""
    if output.output_type == "error":
        return f"{output.ename}: {output.evalue}"
    return output.text if output.output_type == "stream" else output.data["text/plain"]


TOTAL = """
def total(x):
    backend = ss.initialize()
    print("here")
    return float(backend.allreduce(np.ones(1))[0]) * x
"""


@pytest.mark.slow
def test_a_function_of_a_cell():
    found = execute("import numpy as np\nimport samestep as ss", TOTAL, "ss.launch(total, 3, 2.0)")
    assert sorted(found[2].splitlines()) == ["[0] here", "[1] here", "[2] here", "[6.0, 6.0, 6.0]"]


START = """%%ranks 3
import os
import numpy as np
import samestep as ss
backend = ss.initialize()
pid = os.getpid()
"""


@pytest.mark.slow
def test_ranks_live_on_between_cells():
    found = execute(
        "%load_ext samestep",
        START,
        "%%ranks\npid == os.getpid() and float(backend.allreduce(np.ones(1))[0])",
        "%%ranks\nif backend.rank == 1:\n    raise ValueError('bad batch')\nbackend.barrier()",
        "%%ranks\nint(backend.allreduce(backend.rank))",  # ranks and group are as before
        "%%ranks\n1 +",
        "%%ranks 2\n'pid' in globals()",  # other ranks
        "%ranks",
        "%%ranks\nimport os\nos._exit(3 * int(os.environ['RANK']))",
        "%%ranks\n1",
        "%ranks end",
        allow_errors=True,
    )
    assert sorted(found[2].splitlines()) == ["[0] 3.0", "[1] 3.0", "[2] 3.0"]
    assert (
        found[3].startswith("ProcessRaisedException: rank 1 raised ValueError")
        and "<ranks cell 3>" in found[3]
    )
    assert sorted(found[4].splitlines()) == ["[0] 3", "[1] 3", "[2] 3"]
    assert "SyntaxError" in found[5]
    assert sorted(found[6].splitlines()) == ["[0] False", "[1] False"]
    assert found[7] == "2 ranks\n"
    assert "all ranks have been ended" in found[8]
    assert sorted(found[9].splitlines()) == ["[0] 1", "[1] 1"]
    assert found[10] == "0 ranks\n"


INTERRUPT = """%%ranks 2
import os, signal, time
with open(f"FOLDER/{os.environ['RANK']}", "w") as file:
    file.write(str(os.getpid()))
if os.environ["RANK"] == "0":
    while len(os.listdir("FOLDER")) < 2:
        time.sleep(0.01)
    os.kill(os.getppid(), signal.SIGINT)
while True:
    time.sleep(0.01)
"""
GONE = "import os\n[os.path.exists('/proc/' + open(f'FOLDER/{i}').read()) for i in '01']"


@pytest.mark.slow
def test_an_interrupt_of_the_kernel_ends_the_ranks(tmp_path):
    cells = [cell.replace("FOLDER", str(tmp_path)) for cell in ("%load_ext samestep", INTERRUPT, GONE)]
    found = execute(*cells, allow_errors=True)
    assert "all ranks have been ended" in found[1] and "KeyboardInterrupt" in found[1]
    assert found[2] == "[False, False]"
