"""The oracle of y = relu(batch norm + residual), and the bits that say where y counts.

relu(v) is v where v > 0, NaN where v is NaN, and else 0; where it has a ceiling, a number of x's
type, it is that where v is more. Its derivative is 1 where 0 < y < ceiling, and else 0, at NaN too.
So a mask of bits, whether it is 1, is all that the backward pass needs of y: bit i % 8 of byte
i // 8 belongs to the element i in the order in which x lies in memory.
"""

from __future__ import annotations

import numpy as np

from backnorm._doubledouble import Exact, FloatArray
from backnorm.layout import in_order, mask_size, memory_order, order_mark, restore
from backnorm.reference._passes import backward, forward, inference
from backnorm.reference._results import ExactGradients, ExactNormalized, ExactOutput

__all__ = [
    "counting",
    "masked",
    "pack_mask",
    "relu_backward",
    "relu_forward",
    "relu_inference",
    "unpack_mask",
]

# Elements that ReLU is applied to at a time.
_BLOCK = 1 << 16


def counting(y: np.ndarray, ceiling: float | None = None) -> np.ndarray:
    """Return where the derivative of a ReLU is 1, given its result y."""
    # Not in y's own type: ml_dtypes warns of NaN.
    values = y.astype(np.float64)
    return values > 0 if ceiling is None else (values > 0) & (values < ceiling)


def unpack_mask(mask: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return a mask as booleans in x's shape; its bits are in the order in which x lies."""
    order = memory_order(x)
    bits = np.unpackbits(mask, count=x.size, bitorder="little").astype(bool)
    return restore(bits.reshape([x.shape[axis] for axis in order]), order)


def pack_mask(positive: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the mask of an x, with the order of its bits, for booleans in x's shape."""
    order = memory_order(x)
    mask = np.zeros(mask_size(x.size), np.uint8)
    packed = np.packbits(in_order(positive, order, np.dtype(bool)).ravel(), bitorder="little")
    mask[: packed.size] = packed
    mark = order_mark(x.shape, order)
    mask[-len(mark) :] = np.frombuffer(mark, np.uint8)
    return mask


def masked(dy: np.ndarray, mask: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return dy where the mask is set, and 0 elsewhere."""
    return np.where(unpack_mask(mask, x), dy, np.zeros((), dy.dtype))


def relu_forward(
    x: np.ndarray,
    gamma: np.ndarray | None = None,
    beta: np.ndarray | None = None,
    *,
    residual: np.ndarray | None = None,
    ceiling: float | None = None,
    epsilon: float,
    data_format: str = "NCX",
) -> ExactNormalized:
    """Return the exact training forward with y = relu(gamma*s*c + beta + residual).

    Parameters
    ----------
    x, gamma, beta, epsilon, data_format
        As in :func:`forward`.
    residual : numpy.ndarray, optional
        Of x's shape; absent, 0.
    ceiling : float, optional
        A number of x's type; absent, infinity.

    Returns
    -------
    ExactNormalized
        T of y is that of :func:`forward` plus ``|residual|``, also of elements that become 0:
        relu, with a ceiling or without, does not enlarge an error.
    """
    plain = forward(x, gamma, beta, epsilon=epsilon, data_format=data_format)
    _apply_relu(plain.y, plain.y_terms, residual, ceiling)
    return plain


def relu_inference(
    x: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray | None = None,
    beta: np.ndarray | None = None,
    *,
    residual: np.ndarray | None = None,
    ceiling: float | None = None,
    epsilon: float,
    data_format: str = "NCX",
) -> ExactOutput:
    """Return the exact relu(gamma*s*c + beta + residual) for given statistics.

    Parameters
    ----------
    x, mean, variance, gamma, beta, epsilon, data_format
        As in :func:`inference`.
    residual : numpy.ndarray, optional
        Of x's shape; absent, 0.
    ceiling : float, optional
        A number of x's type; absent, infinity.

    Returns
    -------
    ExactOutput
        T of y is that of :func:`inference` plus ``|residual|``.
    """
    plain = inference(x, mean, variance, gamma, beta, epsilon=epsilon, data_format=data_format)
    _apply_relu(plain.y, plain.y_terms, residual, ceiling)
    return plain


def relu_backward(
    x: np.ndarray,
    dy: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray | None = None,
    *,
    mask: np.ndarray,
    epsilon: float,
    data_format: str = "NCX",
    training: bool = True,
) -> ExactGradients:
    """Return the exact gradients of :func:`backward` for dy where the mask is set, and else 0.

    Parameters
    ----------
    x, dy, mean, variance, gamma, epsilon, data_format, training
        As in :func:`backward`.
    mask : numpy.ndarray
        uint8, at least `layout.mask_size` of them.
    """
    return backward(
        x,
        masked(dy, mask, x),
        mean,
        variance,
        gamma,
        epsilon=epsilon,
        data_format=data_format,
        training=training,
    )


def _apply_relu(
    y: Exact, terms: FloatArray, residual: np.ndarray | None, ceiling: float | None
) -> None:
    """Add the residual to y and apply the ReLU, in place; the arrays are C-contiguous."""
    flat, flat_terms = Exact(y.hi.reshape(-1), y.lo.reshape(-1)), terms.reshape(-1)
    other = None if residual is None else residual.reshape(-1)
    with np.errstate(all="ignore"):
        for start in range(0, terms.size, _BLOCK):
            part = slice(start, start + _BLOCK)
            value = flat[part]
            if other is not None:
                r = other[part].astype(np.float64)
                value = (value + r).settled(value.hi + r)
                flat_terms[part] += np.abs(r)
            stays = (value.hi > 0) | np.isnan(value.hi)
            flat.hi[part] = np.where(stays, value.hi, 0.0)
            flat.lo[part] = np.where(stays, value.lo, 0.0)
            if ceiling is not None:
                # Of a pair, the low part says whether it is more than its high part.
                more = (value.hi > ceiling) | ((value.hi == ceiling) & (value.lo > 0))
                flat.hi[part][more], flat.lo[part][more] = ceiling, 0.0
