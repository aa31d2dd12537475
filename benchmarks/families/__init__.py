"""One module per family of rewrites: `python -m benchmarks NAME` runs `benchmarks.families.NAME.run`."""
