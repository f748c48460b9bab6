"""The names of the operations that are judged, which the command reads before it imports more."""

from typing import Literal

__all__ = ["OperationName", "PassName"]

#: The passes of functions.
PassName = Literal[
    "backward",
    "forward",
    "layer-norm",
    "rms-norm",
    "group-norm",
    "instance-norm",
    "layer-norm-forward",
    "rms-norm-forward",
    "group-norm-forward",
    "instance-norm-forward",
]
#: The operations: a pass, or a layer of batch normalisation.
OperationName = Literal[PassName, "layer"]
