"""Kernels: boring loops behind a plan; no validation, no environment."""
