"""The GPUs of this rank: their libraries, their memory, and groups that accept device arrays."""
