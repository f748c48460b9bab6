"""The dialects: each specification's batch normalisation, called exactly as it is written there.

``onednn_graph``, ``onednn_spec``, ``ngraph``, ``tensorflow``, ``aten`` and ``stablehlo`` hold one
specification each: its names, argument order, defaults and type rules. They translate a call to
the canonical problem and contain no mathematics on tensors.
"""
