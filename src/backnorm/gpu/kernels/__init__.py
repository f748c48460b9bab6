"""Triton kernels: plain loops over tiles, without validation and environment variables."""
