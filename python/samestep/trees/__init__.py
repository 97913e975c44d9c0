"""Nested containers of arrays: their leaves, whether all ranks hold the same, and collectives on all leaves."""

from samestep.trees.structure import Flat, flatten

__all__ = ["Flat", "flatten"]
