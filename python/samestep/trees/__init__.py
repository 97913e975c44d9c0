"""Nested containers of arrays: their leaves, comparison between ranks, and collectives on all leaves."""

from samestep.trees.structure import Flat, flatten

__all__ = ["Flat", "flatten"]
