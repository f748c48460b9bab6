"""The engine for CPUs: records that are filled in, and one native call each.

`kernels` and `build` are for whoever compiles; nothing that runs imports them.
"""
