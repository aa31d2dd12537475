"""Compiler passes for torch.compile that make sparse models fast without changing them."""
