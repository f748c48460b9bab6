"""Triton kernels: loops over tiles, which do not validate their arguments."""
