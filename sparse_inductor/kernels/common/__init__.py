"""Code that the kernels of all families share: launches, replay, epilogues, GPU properties."""
