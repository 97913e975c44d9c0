"""A group of ranks: its collectives, messages and objects."""
