"""The dialects: each specification's batch normalisation, called exactly as it is written there.

A module holds one specification as tables: its names, argument order, defaults and type rules. The
operators that are made of them translate a call to the canonical problem and contain no mathematics
on tensors. `registry` lists them.
"""
