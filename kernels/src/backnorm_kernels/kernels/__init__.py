"""The CPU kernels in Numba: loops that neither validate arguments nor read environment variables.

`backnorm_kernels.build` compiles the kernels. No other module outside of this folder imports the
kernels.
"""
