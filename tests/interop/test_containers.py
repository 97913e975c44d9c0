"""Containers of other libraries: opened if they can be built again, else refused; never taken for a constant."""

import numpy as np
import pytest
from samestep import trees
from samestep.trees.reducible import why_refused


def attrs_class(frozen):
    attrs = pytest.importorskip("attrs")
    return attrs.make_class("Layer", ["w"], frozen=frozen)


OPENED = {
    "attrs": lambda w: attrs_class(False)(w=w),
    "attrs, frozen": lambda w: attrs_class(True)(w=w),
    "frozendict": lambda w: pytest.importorskip("frozendict").frozendict(w=w),
    "immutabledict": lambda w: pytest.importorskip("immutabledict").immutabledict(w=w),
}


@pytest.mark.parametrize("kind", OPENED)
def test_containers_are_opened_and_built_again(kind):
    given = OPENED[kind](np.ones(3))
    flat = trees.flatten(given)
    assert flat.leaves[0] is (given["w"] if hasattr(given, "keys") else given.w)
    built = flat.rebuild([5])
    assert type(built) is type(given)
    assert (built["w"] if hasattr(built, "keys") else built.w) == 5
    assert flat.leaves[0] is trees.flatten(given).leaves[0]


REFUSED = {
    "scipy.sparse": lambda scipy, w: scipy.csr_array(w.reshape(1, -1)),
    "pandas": lambda pandas, w: pandas.DataFrame({"w": w}),
    "xarray": lambda xarray, w: xarray.Dataset({"w": ("i", w)}),
    "polars": lambda polars, w: polars.Series(w),
    "awkward": lambda awkward, w: awkward.Array([w.tolist()]),
    "pyrsistent": lambda pyrsistent, w: pyrsistent.pmap({"w": w}),
    "dask.array": lambda dask, w: dask.from_array(w),
    "pint": lambda pint, w: w * pint.UnitRegistry().meter,
    "sympy": lambda sympy, w: sympy.Float(w[0]),
}


@pytest.mark.parametrize("library", REFUSED)
def test_objects_of_libraries_are_refused(library):
    flat = trees.flatten({"k": REFUSED[library](pytest.importorskip(library), np.ones(3))})
    assert flat.names == ["['k']"]
    assert type(flat.leaves[0]).__name__ in why_refused(flat.leaves[0])
