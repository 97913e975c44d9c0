"""Small things that know of no group and no core."""
