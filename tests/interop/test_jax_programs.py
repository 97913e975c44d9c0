"""Programs compiled by JAX: errors leave them with their own class, and what cannot be compiled says what can."""

import logging
import pickle
import subprocess

import numpy as np
import pytest
import samestep as ss
from running import RUN_COMMAND, program

jax = pytest.importorskip("jax")
jnp = jax.numpy

from samestep.group import jax_primitive  # noqa: E402

BACKENDS = ["native"]
pytestmark = pytest.mark.ranks(2, timeout=180, backends=BACKENDS)


def length_of(group, agree):
    return 2 if agree else 2 + group.rank


def test_an_error_in_a_program_is_caught_by_its_class_and_the_group_lives_on(group, caplog):
    step = jax.jit(lambda x: group.allreduce_tree({"x": x}))
    for agree in (True, False, False, True, False, True):
        x = jnp.full(length_of(group, agree), group.rank + 1.0)
        if agree:
            np.testing.assert_array_equal(step(x)["x"], [3.0, 3.0])
            continue
        with caplog.at_level(logging.ERROR), pytest.raises(ss.MismatchError) as caught:
            jax.block_until_ready(step(x))
        assert isinstance(caught.value, jax.errors.JaxRuntimeError)
        assert "leaf ['x'] is float32 (2,) on rank 0 and float32 (3,) on rank 1" in str(caught.value)
        assert "Traceback" not in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not caplog.records  # JAX logs the traceback of other errors in a callback
    jax.effects_barrier()


def test_programs_that_wait_for_one_that_failed_give_its_error(group):
    step = jax.jit(lambda x: group.allreduce_tree(jnp.sin(x)))
    with pytest.raises(ss.MismatchError, match=r"float32 \(2,\) on rank 0"):
        jax.block_until_ready([step(jnp.ones(length_of(group, i))) for i in (True, False)])
    np.testing.assert_array_equal(step(jnp.zeros(2)), [0.0, 0.0])


def test_an_error_that_is_met_only_at_the_wait_has_its_class(group):
    """JAX runs this program, whose callback is not ordered, in the background."""

    def fail(x):
        with jax_primitive.transport():
            raise ss.PeerLostError("rank 1 has ended")

    jax_primitive.install()
    failing = jax.jit(lambda x: jax.pure_callback(fail, jax.ShapeDtypeStruct((), "float32"), (x @ x).sum()))
    with pytest.raises(ss.PeerLostError) as caught:
        jax.block_until_ready(jax.jit(lambda y: y + 1)(failing(jnp.ones((300, 300)))))
    assert str(caught.value) == "rank 1 has ended"


@pytest.mark.parametrize("leaf", [object(), 1 << 70, np.array(["2026-01-01"], "M8[D]"), np.ones(2, ">f4")])
def test_what_no_reduction_takes_is_refused_where_the_program_is_traced(group, leaf):
    with pytest.raises(ss.InvalidArgumentError, match=r"leaf \['k'\]"):
        jax.jit(lambda x: group.allreduce_tree({"x": x, "k": leaf})["x"])(jnp.ones(2))
    got = jax.jit(lambda x: group.allreduce_tree({"x": x, "k": np.array(["text"]), "f": jax.nn.relu})["x"])(
        jnp.ones(2)
    )
    np.testing.assert_array_equal(got, [2.0, 2.0])


def test_the_error_can_be_pickled(group):
    step = jax.jit(group.allreduce_tree)
    with pytest.raises(ss.MismatchError) as caught:
        jax.block_until_ready(step(jnp.ones(length_of(group, False))))
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is ss.MismatchError
    assert str(again) == str(caught.value)


def test_a_compiled_verb_is_named_once(group):
    with pytest.raises(
        ss.MismatchError, match=r"^allreduce \(operation \d+ .*: allreduce of float32\[\d\]"
    ) as caught:
        jax.block_until_ready(jax.jit(group.allreduce)(jnp.ones(length_of(group, False))))
    assert "in it" not in str(caught.value)


def test_a_program_of_a_group_that_has_ended_says_what_to_do(group):
    part = group.split(0)
    step = jax.jit(part.allreduce)
    np.testing.assert_array_equal(step(jnp.ones(2)), [2.0, 2.0])
    part.close()
    with pytest.raises(
        ss.NotInitializedError, match=r"is closed.*compile it again \(functions of jax.jit do so"
    ):
        jax.block_until_ready(step(jnp.ones(2)))
    assert group.allreduce(1) == 2


def test_an_error_without_its_form_keeps_its_text(group, monkeypatch):
    """As where a process ends and modules are gone: what Python raises there must not reach XLA's threads."""
    step = jax.jit(group.allreduce)
    np.testing.assert_array_equal(step(jnp.ones(2)), [2.0, 2.0])

    def fail(error):
        raise RuntimeError("not about the call")

    monkeypatch.setattr(jax_primitive, "text_of", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"allreduce \(operation \d+ ") as caught:
        jax.block_until_ready(step(jnp.ones(length_of(group, False))))
    assert not isinstance(caught.value, ss.Error)
    assert "not about the call" not in str(caught.value)
    jax_primitive.forget_failed_program()  # else JAX makes later programs wait for the one that failed
    assert group.allreduce(1) == 2


def test_errors_of_others_are_left_to_jax(group):
    def fail(x):
        raise KeyError("of the user")

    shape = jax.ShapeDtypeStruct((2,), "float32")
    step = jax.jit(lambda x: jax.experimental.io_callback(fail, shape, group.allreduce_tree(x)))
    with pytest.raises(jax.errors.JaxRuntimeError, match="of the user") as caught:
        jax.block_until_ready(step(jnp.ones(2)))
    assert not isinstance(caught.value, ss.Error)


REFUSED = {
    "send": lambda group, x: group.send(x, 1 - group.rank),
    "gather": lambda group, x: group.gather(x),
    "iallreduce": lambda group, x: group.iallreduce(x),
    "allgatherv": lambda group, x: group.allgatherv(x),
}


@pytest.mark.parametrize("verb", REFUSED)
def test_verbs_that_cannot_be_compiled_name_those_that_can(group, verb):
    with pytest.raises(ss.InvalidArgumentError, match="allreduce_tree, allreduce_gradients or") as caught:
        jax.jit(lambda x: REFUSED[verb](group, x))(jnp.ones(3))
    assert "Tracer" not in str(caught.value)
    assert "leaf :" not in str(caught.value)
    assert group.allreduce(1) == 2


def run(function, *values):
    """A function of the programs on two ranks with two devices each."""
    command = [*RUN_COMMAND, "--timeout", "100", "-n", "2"]
    command += program("interop/jax_devices", function, *values)
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
@pytest.mark.ranks(1, backends=["self"])
def test_several_local_devices(group):
    ended = run("reduce_arrays")
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.slow
@pytest.mark.ranks(1, backends=["self"])
def test_the_launcher_sees_that_an_error_in_a_program_is_a_consequence(group, tmp_path):
    """Rank 1 ends only after rank 0, which waits for it in a program, has failed."""
    ended = run("fail_after_rank_0", str(tmp_path / "failed"))
    assert ended.returncode == 1
    reported = [line for line in ended.stderr.splitlines() if line.startswith("samestep: ")]
    assert "root cause: rank 1" in reported[0], ended.stderr
    assert "in consequence (PeerLostError)" in reported[1], ended.stderr
    assert "JaxRuntimeError" not in ended.stderr
    lines = [line for line in ended.stderr.splitlines() if line.startswith("[0]")]
    without_marks = [line for line in lines if line.strip("[0] ~^")]  # Python 3.13 has more of them
    assert len(without_marks) < 10, ended.stderr
