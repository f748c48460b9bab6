"""The dialects: batch normalisation as different specifications define it.

Each module describes one specification: its names, argument order, defaults and type rules. An
operator translates a call to a call of backnorm's own operation (the canonical call), and computes
only what that operation does not have, such as running statistics. `registry` lists the dialects.
"""
