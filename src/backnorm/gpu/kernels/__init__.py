"""Kernels in Triton: boring loops over tiles, no validation, no environment."""
