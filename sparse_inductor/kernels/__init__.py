"""Triton kernels and their launchers: tensors in, tensors out. Nothing here knows FX or Inductor."""
