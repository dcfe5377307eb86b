"""Benchmarks: `python -m benchmarks codec`."""
