"""Threads of a test: they begin at once, and their errors are the test's."""

import threading
import time

PATIENCE_S = 60.0


def run_at_once(actions, patience=PATIENCE_S):
    """Call each of `actions` in a thread of its own, all at the same moment; returns what they return, in order.

    The first error of a thread is raised. A thread that has not ended after `patience` seconds is an error, too.
    """
    start = threading.Barrier(len(actions))
    results, errors = [None] * len(actions), []

    def run(i, action):
        try:
            start.wait(patience)
            results[i] = action()
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(i, action), daemon=True) for i, action in enumerate(actions)
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + patience
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if errors:
        raise errors[0]
    late = [i for i, thread in enumerate(threads) if thread.is_alive()]
    assert not late, f"threads {late} have not ended after {patience} s"
    return results
