"""Collectives with several arrays on each rank."""
