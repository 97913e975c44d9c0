"""Starts the ranks of a job and ends them: the `samestep run` command.

One launcher process starts one *agent* per rank, by `mpirun` or itself. An agent (`agent.py`) starts its rank,
hands the rank's output line by line to the launcher (`supervisor.py`), and reports how the rank ended, so that
the launcher knows every exit code and is the only one to decide when and how the others end.

Nothing here imports the compiled core or starts MPI in the launcher's own process.
"""
