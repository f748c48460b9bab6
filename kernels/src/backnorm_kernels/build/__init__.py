"""Build machine code from the kernels, when the package is built or in a checkout of the sources.

`compile` is a process that builds libraries of one level (see `levels`); `make` starts as many
of these processes as there are processors. An installed package has neither this folder nor
`kernels`.
"""
