"""The CPU kernels in Numba: loops without validation and environment variables.

`backnorm.cpu.build` compiles the kernels. No other module of the package imports them.
"""
