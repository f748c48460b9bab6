"""The engine for GPUs: plans, and launches of Triton kernels."""
