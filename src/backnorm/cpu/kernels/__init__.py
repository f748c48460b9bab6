"""The CPU kernels, in Numba: loops behind a plan; no validation, no environment.

They are compiled by `backnorm.cpu.build`, and not imported by anything that runs.
"""
