"""The epilogue of a fused matmul: a list of steps, its provable properties, and its execution."""
