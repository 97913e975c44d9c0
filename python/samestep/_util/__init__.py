"""Utilities that depend neither on groups nor on the core."""
