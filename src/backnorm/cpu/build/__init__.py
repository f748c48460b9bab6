"""Machine code from the kernels: for who builds the package, and for checkouts of its sources.

`compile` is one process that makes libraries of one level; `make` has as many of them as there are
processors. An installed package has neither this folder nor `kernels`.
"""
