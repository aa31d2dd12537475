"""What the kernels of all families share: launches, replay, epilogues, the architecture."""
