"""Kernels that are wrong in cases that no tier has."""

import os
import time

import backnorm


def _wrong_where(condition):
    """Return a kernel that adds 1 % to dbeta where a condition holds."""

    def backward(x, dy, mean, variance, gamma, **options):
        dx, dgamma, dbeta = backnorm.batch_norm_backward(x, dy, mean, variance, gamma, **options)
        factor = 1.01 if condition(x, dy, mean, gamma, options["training"]) else 1
        return dx, dgamma, (dbeta * factor).astype(dbeta.dtype)

    return backward


wrong_for_24_channels = _wrong_where(lambda x, dy, mean, gamma, training: mean.size == 24)
wrong_without_gamma = _wrong_where(
    lambda x, dy, mean, gamma, training: mean.size == 24 and gamma is None and training
)
wrong_for_4099_elements = _wrong_where(lambda x, dy, mean, *_: x.size == 4099 * mean.size)
wrong_for_fortran_dy = _wrong_where(
    lambda x, dy, *_: dy.flags.f_contiguous and not dy.flags.c_contiguous
)


def hangs_for_many_channels(x, *operands, **options):
    if operands[1].size > 200:
        time.sleep(60)
    return backnorm.batch_norm_backward(x, *operands, **options)


def crashes_for_read_only_dy(x, dy, *operands, **options):
    if not dy.flags.writeable:
        os.abort()
    return backnorm.batch_norm_backward(x, dy, *operands, **options)


def is_slow(x, *operands, **options):
    time.sleep(1)
    return backnorm.batch_norm_backward(x, *operands, **options)


def is_misaligned(array):
    return bool(array.ctypes.data % 64 == array.itemsize)


def records(x, dy, mean, variance, gamma, **options):
    """Refuse each case; the text of the refusal has the properties of dy."""
    flags = dy.flags
    facts = {
        "C": flags.c_contiguous, "F": flags.f_contiguous, "writeable": flags.writeable,
        "strides": tuple(stride // dy.itemsize for stride in dy.strides),
        "misaligned": is_misaligned(dy),
    }  # fmt: skip
    raise NotImplementedError(" ".join(f"{name}={value}" for name, value in facts.items()))
