"""The engine for GPUs: a plan, and launches of kernels in Triton."""
