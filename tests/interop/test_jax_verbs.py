"""Collectives as parts of programs compiled by JAX: each verb, its order among others, its derivative and its vmap."""

import functools

import numpy as np
import pytest
import samestep as ss

jax = pytest.importorskip("jax")
jnp = jax.numpy

pytestmark = pytest.mark.ranks(1, 3, timeout=300, backends=["native"])

VERBS = {
    "allreduce": lambda group, x: group.allreduce(x),
    "allreduce avg": lambda group, x: group.allreduce(x, "avg"),
    "allreduce premul": lambda group, x: group.allreduce(x, ss.premul(group.rank + 2.0)),
    "ss.allreduce": ss.allreduce,
    "reduce": lambda group, x: group.reduce(x, root=group.size - 1),
    "reduce avg": lambda group, x: group.reduce(x, "avg"),
    "reduce_scatter": lambda group, x: group.reduce_scatter(x),
    "reduce_scatter avg": lambda group, x: group.reduce_scatter(x, "avg"),
    "bcast": lambda group, x: group.bcast(x, root=group.size - 1),
    "allgather": lambda group, x: group.allgather(x),
    "alltoall": lambda group, x: group.alltoall(x),
    "allreduce_tree": lambda group, x: group.allreduce_tree({"x": x, "name": "y"})["x"],
    "allreduce_gradients": ss.allreduce_gradients,
    "synchronize": lambda group, x: ss.synchronize(group, [x], root=group.size - 1)[0],
}


def rows(group, dtype="float32", width=3):
    """Small whole numbers that differ between ranks, one row for each rank of the group."""
    numbers = np.arange(group.size * width).reshape(group.size, width)
    return ((numbers + 1) * (group.rank + 1)).astype(dtype)


@pytest.mark.parametrize("verb", VERBS)
def test_a_compiled_verb_gives_what_it_gives_outside(group, verb):
    expected = np.asarray(VERBS[verb](group, jnp.asarray(rows(group))))
    program = jax.jit(lambda x: VERBS[verb](group, x * 1))
    for _ in range(3):
        np.testing.assert_array_equal(program(jnp.asarray(rows(group))), expected, strict=True)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint32", "float16", "bfloat16", "complex64"])
@pytest.mark.parametrize("op", ["max", "sum"])
def test_element_types(group, dtype, op):
    x = jnp.asarray(rows(group)).astype(dtype)
    if dtype in ("bool", "complex64"):
        op = {"bool": "lor", "complex64": "prod"}[dtype]
    expected = np.asarray(group.allreduce(x, op))
    np.testing.assert_array_equal(jax.jit(lambda y: group.allreduce(y, op))(x), expected, strict=True)


@pytest.mark.parametrize("lengths", [[0], [1, 0, 3], [70_001, 5, 140_000, 33_000, 0]])
def test_a_tree_of_small_and_large_leaves_of_several_types(group, lengths):
    def tree(scale):
        leaves = [jnp.arange(n, dtype=dtype) * scale for n in lengths for dtype in ("float32", "int32")]
        return {"a": leaves, "b": None, "c": 2.0}

    reduced = jax.jit(lambda x: group.allreduce_tree(x | {"c": 2.0}, "sum"))(
        {"a": tree(group.rank + 1)["a"], "b": None}
    )
    total = group.size * (group.size + 1) // 2
    for got, unit in zip(reduced["a"], tree(1)["a"], strict=True):
        np.testing.assert_array_equal(got, np.asarray(unit) * total)
        assert got.dtype == unit.dtype
    assert reduced["b"] is None
    assert float(reduced["c"]) == 2.0 * group.size


def test_calls_of_one_program_keep_their_order_in_branches_loops_and_inner_programs(group):
    """The sum of the small array is ready long before that of the product: only their order keeps ranks together."""

    def chained(x, heavy):
        def body(carry, step):
            carry = group.allreduce(carry, "avg") + step
            return jax.lax.cond(step % 2 == 0, lambda c: group.allreduce(c, "max"), lambda c: c, carry), carry

        first = group.allreduce((heavy @ heavy).sum() * 0 + x if group.rank == 0 else x)
        second = group.allreduce(x + 1)
        inner = jax.jit(group.allgather)(x)
        last, each = jax.lax.scan(body, x * 1.0, jnp.arange(4.0))
        return first, second, inner.sum(), last, each

    heavy = jnp.ones((400, 400))
    results = [jax.jit(chained)(jnp.float32(group.rank), heavy) for _ in range(5)]
    ranks = np.arange(group.size)
    for first, second, inner, last, each in results:
        assert first == inner == ranks.sum()
        assert second == (ranks + 1).sum()
        assert last == ranks.mean() + 6
        np.testing.assert_array_equal(each, ranks.mean() + np.cumsum(np.arange(4)))


def test_many_calls_in_many_programs(group):
    step = jax.jit(lambda x, i: group.allreduce(x + i))
    x = jnp.float32(group.rank)
    for i in range(300):
        x = step(x, i) / group.size - i
    assert x == (group.size - 1) / 2


def test_a_program_that_is_compiled_ahead_runs_again_and_again(group):
    program = jax.jit(group.allreduce).lower(jnp.ones(3)).compile()
    for n in range(1, 4):
        np.testing.assert_array_equal(program(jnp.full(3, float(n))), np.full(3, float(n * group.size)))


LINEAR = [verb for verb in VERBS if verb not in ("ss.allreduce", "synchronize")]


@pytest.mark.parametrize("compiled", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("verb", LINEAR)
def test_the_gradient_is_that_of_the_sum_over_all_ranks(group, verb, compiled):
    """Each rank weights its result; the derivative after an element is found by raising it by one."""
    x = jnp.asarray(rows(group))
    shape = jax.eval_shape(lambda y: VERBS[verb](group, y), x).shape
    weights = np.arange(1, np.prod(shape) + 1).reshape(shape) * (1.0 + group.rank)

    def weighted(y):
        return (VERBS[verb](group, y) * weights.astype("float32")).sum()

    gradient = jax.grad(weighted)
    found = np.asarray((jax.jit(gradient) if compiled else gradient)(x))
    for rank in range(group.size):
        for index in np.ndindex(*x.shape):
            raised = np.asarray(x).copy()
            raised[index] += rank == group.rank
            change = (
                np.asarray(VERBS[verb](group, raised)) - VERBS[verb](group, np.asarray(x).copy())
            ) * weights
            total = group.allreduce(float(change.sum()))
            if rank == group.rank:
                np.testing.assert_allclose(found[index], total, rtol=1e-5)


@pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="this JAX has no jax.shard_map")
@pytest.mark.parametrize("verb", ["allreduce", "allgather", "reduce_scatter", "bcast", "allreduce_tree"])
def test_the_gradient_inside_shard_map_over_one_device(group, verb):
    mesh = jax.sharding.Mesh(np.array(jax.local_devices()[:1]), "d")
    split = jax.sharding.PartitionSpec("d")
    inside = jax.shard_map(lambda x: VERBS[verb](group, x), mesh=mesh, in_specs=split, out_specs=split)
    x = jnp.asarray(rows(group))
    found, expected = (
        jax.jit(jax.grad(lambda y, f=f: f(y).sum()))(x) for f in (inside, lambda y: VERBS[verb](group, y))
    )
    np.testing.assert_array_equal(found, expected)


def test_a_rank_that_traces_alone_is_told_what_the_others_wait_for(group):
    if group.size == 1:
        return
    new = group.split(0)
    call = jax.jit(new.allreduce) if group.rank == 0 else new.allreduce
    with pytest.raises(ss.MismatchError, match="rank 0: tracing of the first function of JAX that has coll"):
        call(jnp.ones(3))


def test_jvp_and_the_gradient_of_some_leaves(group):
    def mean(tree):
        return ss.allreduce_gradients(group, tree)

    tree = {"w": jnp.ones(3), "n": jnp.arange(2), "v": jnp.ones(2)}
    tangent = {"w": jnp.full(3, 1.0 + group.rank), "n": np.zeros(2, jax.dtypes.float0), "v": jnp.zeros(2)}
    _, moved = jax.jvp(mean, (tree,), (tangent,))
    np.testing.assert_allclose(moved["w"], np.full(3, (group.size + 1) / 2))
    gradient = jax.jit(jax.grad(lambda w: mean(tree | {"w": w})["w"].sum()))(tree["w"])
    np.testing.assert_allclose(gradient, np.ones(3))


@pytest.mark.parametrize("wrap", [jax.checkpoint, jax.jit, jax.custom_vjp], ids=["remat", "jit", "vjp"])
def test_within_other_transformations(group, wrap):
    function = wrap(lambda x: jnp.sin(group.allreduce(x)))
    if isinstance(function, jax.custom_vjp):
        function.defvjp(lambda x: (function(x), None), lambda _, ct: (group.allreduce(ct),))
        expected = group.size
    else:
        expected = group.size * np.cos(group.size)
    found = jax.jit(jax.grad(function))(jnp.float32(1))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_the_gradient_through_a_loop(group):
    def looped(x):
        return jax.lax.scan(lambda c, _: (group.allreduce(c, "avg") * 2, None), x, None, length=3)[0].sum()

    np.testing.assert_allclose(jax.jit(jax.grad(looped))(jnp.ones(2) * group.rank), 8.0)


@pytest.mark.parametrize("op", ["max", "prod"])
def test_operators_without_a_derivative_are_refused(group, op):
    with pytest.raises(ss.InvalidArgumentError, match="stop_gradient"):
        jax.grad(lambda x: group.allreduce(x, op).sum())(jnp.ones(2))


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("verb", VERBS)
def test_vmap_is_one_call_for_all(group, verb, axis):
    batch = np.stack([rows(group) * (i + 1) for i in range(4)], axis)
    expected = np.stack([VERBS[verb](group, jnp.asarray(x)) for x in np.moveaxis(batch, axis, 0)])
    found = jax.jit(jax.vmap(lambda x: VERBS[verb](group, x), in_axes=axis))(jnp.asarray(batch))
    np.testing.assert_array_equal(found, expected)


def test_out_and_wrong_shapes_are_refused_while_tracing(group):
    with pytest.raises(ss.InvalidArgumentError, match="out= is not available"):
        jax.jit(lambda x: group.allreduce(x, out=np.zeros(2)))(jnp.ones(2))
    with pytest.raises(ss.InvalidArgumentError, match=r"must have shape \(size"):
        jax.jit(group.reduce_scatter)(jnp.ones((group.size + 1, 2)))
    with pytest.raises(ss.InvalidArgumentError, match="root 9 is outside"):
        jax.jit(lambda x: group.bcast(x, root=9))(jnp.ones(2))
    assert group.allreduce(1) == group.size


def test_a_rank_that_does_not_come_is_a_timeout(group):
    if group.size == 1:
        return
    fork = group.split(0)
    program = jax.jit(lambda x: fork.allreduce(x, timeout=0.3))
    x = jnp.ones(3)
    program.lower(x).compile()
    if group.rank == 0:
        with pytest.raises(ss.TimeoutError, match="rank 1") as caught:
            jax.block_until_ready(program(x))
        assert "\n" not in str(caught.value)
    group.barrier()


def test_a_program_that_python_has_dropped_still_ends(group):
    def result(i):
        heavy = jnp.ones((500, 500))
        return jax.jit(lambda x: group.allreduce((x @ x).sum() * 0 + i))(heavy)

    results = [result(i) for i in range(4)]
    assert [float(x) for x in results] == [group.size * i for i in range(4)]


@pytest.mark.parametrize("flag", [bool, np.bool_])
def test_flags_in_compiled_functions_are_equal_on_all_ranks(group, flag):
    def reduced(x, value):
        tree = group.allreduce_tree({"x": x, "is": flag(value)})
        assert isinstance(tree["is"], flag)
        return tree["x"]

    x = jnp.ones(2)
    np.testing.assert_array_equal(jax.jit(lambda x: reduced(x, True))(x), [group.size] * 2)
    if group.size > 1:
        with pytest.raises(
            ss.MismatchError, match=r"leaf \['is'\] is the flag True on rank 0 and the flag False"
        ):
            jax.block_until_ready(jax.jit(lambda x: reduced(x, group.rank == 0))(x))
        np.testing.assert_array_equal(jax.jit(lambda x: reduced(x, False))(x), [group.size] * 2)


@pytest.mark.parametrize("verb", ["allreduce_tree", "synchronize", "allgather"])
def test_types_that_no_collective_takes_are_named_in_compiled_functions(group, verb):
    call = getattr(group, verb, None) or functools.partial(ss.synchronize, group)
    q = jnp.ones(2, jnp.int4)
    where = "allgather" if verb == "allgather" else rf"{verb}\(.*leaf \['q'\]"
    with pytest.raises(ss.InvalidArgumentError, match=f"{where}: dtype int4 cannot be sent"):
        jax.jit(lambda q: call(q if verb == "allgather" else {"q": q}))(q)


def test_synchronize_says_why_an_array_of_jax_cannot_be_sent(group):
    with pytest.raises(ss.InvalidArgumentError, match=r"leaf \['q'\].* no DLPack equivalent"):
        ss.synchronize(group, {"q": jnp.ones(2, jnp.int4)})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_gradient_of_a_mean_of_half_types_is_the_mean_of_gradients(group, dtype):
    mine = jnp.asarray(np.random.default_rng(group.rank).uniform(30000, 50000, 100), dtype)
    gradient = jax.jit(jax.grad(lambda x: jnp.vdot(group.allreduce(x, "avg"), mine)))(jnp.zeros(100, dtype))
    np.testing.assert_array_equal(gradient.astype("f4"), group.allreduce(mine, "avg").astype("f4"))
