"""The version of the distributions backnorm and backnorm-kernels, which are released together."""

__version__ = "0.1.0"
