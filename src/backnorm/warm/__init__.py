"""Compile kernels ahead of their first use, in parallel, into the cache on disk."""
