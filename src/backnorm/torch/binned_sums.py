"""Reproducible sums by PyTorch's operators, for devices whose kernels do not compute them.

The results are the integers that `cpu.kernels.bins` writes, bit for bit: terms are split by the
same operations, and the order in which integers are added has no effect. All operations are in
float64; together they make some forty passes over memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backnorm.binned import SPECIAL, two_product
from backnorm.cpu.scratch import bin_rows

# `_LEAST` maps the number of digits of a sum (4 for float64 elements, else 3) to the lowest top bin
# that the sum may have. `_HUGE` is the least magnitude that counts as infinite. See
# `cpu.kernels.bins`.
_LEAST, _HUGE = {3: -31, 4: -30}, 2.0**991


def of_forward(x: Tensor) -> tuple[Tensor, int]:
    """Return the bins of sum(x) and sum(x^2), and the number of elements per channel.

    The bins of both sums are one int64 tensor of shape (rows, C), as described in `binned`.
    """
    wide = _channels_first(x).double()
    return _both(wide, wide, x)


def of_backward(x: Tensor, dy: Tensor, counts: Tensor | None, mean: Tensor) -> tuple[Tensor, int]:
    """Return the bins of sum(dy) and of sum(dy * (x - mean)), in the form that `of_forward`
    returns.

    Elements where `counts` is False are left out of the sums: their dy is replaced by 0.
    """
    if counts is not None:
        dy = torch.where(counts, dy, torch.zeros_like(dy))
    centred = _channels_first(x).double() - mean.double()[:, None]
    return _both(_channels_first(dy).double(), centred, x)


def _channels_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1).reshape(x.shape[1], -1)


def _both(slope: Tensor, centred: Tensor, x: Tensor) -> tuple[Tensor, int]:
    digits = bin_rows(x.element_size()) // 2 - 1
    product = slope * centred
    parts = [product]
    if digits == 4:
        # For float64 elements, the rounding errors of the products are added as further terms.
        _, error = two_product(slope, centred)
        parts.append(torch.where(product.isfinite(), error, torch.zeros_like(error)))
    rows = [*_bins([slope], digits), *_bins(parts, digits)]
    return torch.stack(rows), slope.shape[1]


def _bins(parts: list[Tensor], digits: int) -> list[Tensor]:
    """Return, for each channel, the top bin and the digits of the sum of all terms in `parts`.

    Each part is a tensor of terms, of shape (C, M). The first part has the largest term of each
    channel, which determines the channel's top bin.
    """
    terms = parts[0]
    channels, count = terms.shape
    most = terms.abs().amax(1) if count else terms.new_zeros(channels)
    special = ~(most < _HUGE)
    exponents = torch.frexp(torch.where(special, 0.0, most))[1].to(torch.int64)
    top = torch.where(most == 0.0, _LEAST[digits], exponents >> 5).clamp(min=_LEAST[digits])
    unit = 1.5 * _power(32 * top + 52)[:, None]
    rows = [torch.where(special, SPECIAL, top)]
    for digit in range(digits):
        number = torch.zeros_like(top)
        for k, part in enumerate(parts):
            total = part + unit
            number += (total.view(torch.int64) - unit.view(torch.int64)).sum(1)
            parts[k] = part - (total - unit)
        counted = _special(terms, digit)
        rows.append(torch.where(special, counted, number))
        unit = unit * 2.0**-32
    return rows


def _special(terms: Tensor, digit: int) -> Tensor:
    """Return the number of terms that are NaN (digit 0), +infinity (1) or -infinity (2).

    Terms whose magnitude is `_HUGE` or more count as infinite.
    """
    tests = (terms.isnan(), terms >= _HUGE, terms <= -_HUGE)
    return tests[digit].sum(1) if digit < len(tests) else torch.zeros_like(terms[:, 0].long())


def _power(exponent: Tensor) -> Tensor:
    return ((exponent + 1023) << 52).view(torch.float64)
