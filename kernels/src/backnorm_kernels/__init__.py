"""The engine for CPUs: each call fills in a record and makes one native call.

Only the build imports `kernels` and `build`; an installed package does not have them.
"""
