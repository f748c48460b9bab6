"""Triton kernels: loops over tiles. The kernels do not validate their arguments."""
