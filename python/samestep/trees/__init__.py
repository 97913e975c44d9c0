"""Nested containers of arrays: their leaves, comparison between ranks, and collectives on all leaves."""

from samestep.trees.structure import Flat, flatten, is_plain

__all__ = ["Flat", "flatten", "is_plain"]
