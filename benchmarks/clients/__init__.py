"""The programs that `python -m benchmarks end_to_end` runs, as their users write them."""
