"""The roles of an operator's parameters and results, for `Annotated` types.

A role says what a parameter of the specification is to backnorm. The name of the parameter, its
default and its description are those in the operator's signature and docstring.
"""

from __future__ import annotations

from functools import partial

from backnorm.dialects.schema import AttributeSpec, TensorSpec

__all__ = ["attribute", "channel", "data", "kept", "opaque", "vector"]

#: A tensor of the shape of x: ``data(role, type)``.
data = partial(TensorSpec, kind="data")
#: A tensor with one value per channel.
channel = partial(TensorSpec, kind="channel")
#: A tensor with one value per channel and as many axes as x: all axes except the channel axes have
#: size 1.
kept = partial(TensorSpec, kind="kept")
#: A tensor of rank 1 whose length depends on the attributes.
vector = partial(TensorSpec, kind="vector")
#: A tensor that is neither checked nor used.
opaque = partial(TensorSpec, kind="opaque")
#: An attribute: ``attribute(type, role)``. If the parameter's type is a `Literal`, its values are
#: the accepted ones.
attribute = AttributeSpec
