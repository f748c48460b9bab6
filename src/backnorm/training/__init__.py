"""Networks trained with a framework's own normalisation and with ours, side by side.

Importing this loads no framework: each is imported by its own module, in a process of its own.
"""
