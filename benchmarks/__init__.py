"""Benchmarks (`python -m benchmarks FAMILY`) and the demo (`python -m benchmarks.demo`)."""
