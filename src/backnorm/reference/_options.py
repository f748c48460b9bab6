"""The types of the options of the oracle's passes."""

from __future__ import annotations

from typing import Required, TypedDict

import numpy as np

from backnorm.activations import Activation


class _Options(TypedDict, total=False):
    """Options of all passes of the oracle."""

    epsilon: Required[float]
    data_format: str


class ForwardOptions(_Options, total=False):
    """Options of the oracle's forward and inference passes."""

    activation: Activation
    residual: np.ndarray | None


class BackwardOptions(_Options, total=False):
    """Options of the oracle's backward pass."""

    training: bool


class SecondOptions(BackwardOptions, total=False):
    """Options of the oracle's second order."""

    ddx: np.ndarray | None
    ddgamma: np.ndarray | None
    ddbeta: np.ndarray | None
