"""The options of a call: its arguments that are not arrays."""

from __future__ import annotations

from typing import Literal, NamedTuple

from backnorm.activations import Activation
from backnorm.arithmetics import Arithmetic

#: The argument that says which axes are channel axes: "NCX" (axis 1), "NXC" (the last axis), or a
#: tuple of axes.
Format = Literal["NCX", "NXC"] | tuple[int, ...]


class Options(NamedTuple):
    """The options of a call, for all operations and frameworks.

    An operation ignores the options that its signature does not name. The options are a part of the
    keys of caches, so they are a tuple, whose hash takes a tenth of the time of a dataclass's.

    Attributes
    ----------
    epsilon : float
        Added to the variance.
    data_format : {"NCX", "NXC"} or tuple of int
        The channel axis, or several in ascending order.
    training : bool
        Whether the statistics are functions of x; otherwise, they are constants.
    activation : Activation or None
        The activation after a forward pass.
    residual : bool
        Whether a backward pass returns the gradient of the residual.
    arithmetic : {"float32", "float64"} or None
        The type in which elements are computed; None: see `arithmetics.resolved`.
    reproducible : bool
        Whether sums have the same bits for every division, order and layout of the batch.
    """

    epsilon: float = 0.0
    data_format: Format = "NCX"
    training: bool = True
    activation: Activation | None = None
    residual: bool = False
    arithmetic: Arithmetic | None = None
    reproducible: bool = False

    @property
    def axis(self) -> int:
        """The channel axis, if `data_format` is a tuple of one axis."""
        assert not isinstance(self.data_format, str)
        (axis,) = self.data_format
        return axis
