"""The epilogue of a fused matmul: a list of steps, what is provable about it, and how to run it."""
