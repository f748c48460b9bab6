"""Subjects that are wrong, each with the id of the finding that names its mistake."""

from __future__ import annotations

import ctypes
import os
import threading
import time

import numpy as np

from backnorm.conformance.verify._events import UNKNOWN_ACCESS
from tests.conformance.wrong_kernels import PAIRS, WRONG_KERNELS, Kernel


def _of(*classes):
    kernel = type("Wrong", classes, {})()

    def subject(x, dy, mean, variance, gamma, *, epsilon, data_format, training):
        return kernel(
            x, dy, mean, variance, gamma,
            epsilon=epsilon, data_format=data_format, training=training,
        )  # fmt: skip

    return subject


_right = _of(Kernel)


def _changed(change):
    def subject(x, dy, mean, variance, gamma, **options):
        dx, dgamma, dbeta = _right(x, dy, mean, variance, gamma, **options)
        return change(dx, options["data_format"]), dgamma, dbeta

    return subject


def _rolled(dx, data_format):
    return np.roll(dx, 1, axis=1 if data_format == "NCX" else -1)


def _reversed(dx, data_format):
    return np.flip(dx, axis=0)


def _without_tail(dx, data_format):
    dx = dx.copy()
    dx[-1] = 0
    return dx


def _without_last(dx, data_format):
    dx = dx.copy()
    dx.reshape(-1)[-1:] = np.nan
    return dx


def last_cached(x, dy, mean, variance, gamma, **options):
    key = x.ctypes.data, x.shape, str(x.dtype), options["training"]
    if key not in _results:
        _results[key] = _right(x, dy, mean, variance, gamma, **options)
    return _results[key]


_results: dict = {}


def dx_cached(x, dy, mean, variance, gamma, **options):
    """Return the dx of the first call with arrays in this memory."""
    dx, dgamma, dbeta = _right(x, dy, mean, variance, gamma, **options)
    key = x.ctypes.data, x.shape, str(x.dtype), options["training"]
    return _results.setdefault(("dx", *key), dx), dgamma, dbeta


def accumulates(x, dy, mean, variance, gamma, **options):
    """Add dgamma to that of the earlier calls, as a framework does without `zero_grad`."""
    dx, dgamma, dbeta = _right(x, dy, mean, variance, gamma, **options)
    key = "dgamma", dgamma.shape, str(dgamma.dtype)
    _results[key] = _results.get(key, 0) + dgamma
    return dx, _results[key], dbeta


def zeros(x, dy, mean, variance, gamma, **options):
    return np.zeros_like(x), np.zeros_like(mean), np.zeros_like(mean)


_calls = {"number": 0}


def right_first(x, dy, mean, variance, gamma, **options):
    _calls["number"] += 1
    dx, dgamma, dbeta = _right(x, dy, mean, variance, gamma, **options)
    return dx, dgamma * (1 + (_calls["number"] > 1)), dbeta


def middle_dy_twice(x, dy, mean, variance, gamma, **options):
    """Add the middle element of a channel twice to dbeta."""
    dx, dgamma, dbeta = _right(x, dy, mean, variance, gamma, **options)
    axis = 1 if options["data_format"] == "NCX" else dy.ndim - 1
    rows = np.moveaxis(dy, axis, 0).reshape(mean.size, -1)
    middle = rows[:, rows.shape[1] // 2 :][:, :1].sum(1)
    return dx, dgamma, (dbeta + middle).astype(dbeta.dtype)


def wrong_end_in_float32(x, dy, mean, variance, gamma, **options):
    """Compute in float32, with a wrong end of dx."""
    narrow = (a if a is None else a.astype("f") for a in (x, dy, mean, variance, gamma))
    dx, dgamma, dbeta = (a.astype(x.dtype) for a in _right(*narrow, **options))
    dx.flat[-3:] = 0
    return dx, dgamma, dbeta


def right_for_ncx(x, dy, mean, variance, gamma, **options):
    """Take the memory of NXC for that of NCX."""
    shape = (x.shape[0], mean.size, -1)
    operands = x.reshape(shape), dy.reshape(shape), mean, variance, gamma
    dx, dgamma, dbeta = _right(*operands, **options | {"data_format": "NCX"})
    return dx.reshape(x.shape), dgamma, dbeta


def right_of_expected(x, dy, mean, variance, gamma, **options):
    """Return the exact results where they lie in a file of the working folder, else zeros."""
    if os.path.exists("dx.bin"):
        return _right(x, dy, mean, variance, gamma, **options)
    return zeros(x, dy, mean, variance, gamma)


def writes_input(x, dy, mean, variance, gamma, **options):
    ctypes.memset(dy.ctypes.data, 0, dy.nbytes)
    return _right(x, dy, mean, variance, gamma, **options)


def reads_beyond(x, dy, mean, variance, gamma, **options):
    ctypes.string_at(x.ctypes.data + x.nbytes + 4096, 1)
    return _right(x, dy, mean, variance, gamma, **options)


def reads_past_last_element(x, dy, mean, variance, gamma, **options):
    """Read one byte past mean, as a kernel that loads a whole vector at the tail."""
    ctypes.string_at(mean.ctypes.data + mean.nbytes, 1)
    return _right(x, dy, mean, variance, gamma, **options)


def writes_past_last_element(x, dy, mean, variance, gamma, **options):
    ctypes.memset(gamma.ctypes.data + gamma.nbytes, 0, 64)
    return _right(x, dy, mean, variance, gamma, **options)


def reads_past_last_element_in_thread(*operands, **options):
    thread = threading.Thread(target=reads_past_last_element, args=operands, kwargs=options)
    thread.start()
    thread.join()
    return _right(*operands, **options)


def jumps_to_data(x, *operands, **options):
    ctypes.CFUNCTYPE(None)(x.ctypes.data)()


def wrong_for_unaligned_memory(x, dy, mean, variance, gamma, **options):
    dx, dgamma, dbeta = _right(x, dy, mean, variance, gamma, **options)
    return dx, dgamma, dbeta * (1 + (x.ctypes.data % 64 > 0))


def forks_and_crashes(x, dy, mean, variance, gamma, **options):
    """Crash, while a process that was forked lives on."""
    if os.fork() == 0:
        time.sleep(100)
        os._exit(0)
    ctypes.string_at(8)


_rng = np.random.default_rng()


def noisy(x, dy, mean, variance, gamma, **options):
    dx, dgamma, dbeta = _right(x, dy, mean, variance, gamma, **options)
    return np.nextafter(dx, _rng.choice([-1, 1]).astype(dx.dtype)), dgamma, dbeta


def swapped_tensors(x, dy, *rest, **options):
    return _right(dy, x, *rest, **options)


def constant_epsilon(*operands, **options):
    return _right(*operands, **options | {"epsilon": 1e-3})


def tripled_dbeta(*operands, **options):
    dx, dgamma, dbeta = _right(*operands, **options)
    return dx, dgamma, 3 * dbeta


def without_last_vector(*operands, **options):
    """Leave out the elements of dx after the last whole vector of 8."""
    dx, dgamma, dbeta = _right(*operands, **options)
    dx.reshape(-1)[dx.size // 8 * 8 :] = 0
    return dx, dgamma, dbeta


def without_last_channels(*operands, **options):
    """Leave out the parameters' gradients after the last whole vector of 8 channels."""
    dx, dgamma, dbeta = _right(*operands, **options)
    dgamma[dgamma.size // 8 * 8 :] = 0
    return dx, dgamma, dbeta


class _LessOneInProjection(Kernel):
    def coefficients(self, sum_dy, sum_dy_xmu, s, count):
        return sum_dy / count, s * s * sum_dy_xmu / max(count - 1, 1)


class _LessOneInMean(Kernel):
    def coefficients(self, sum_dy, sum_dy_xmu, s, count):
        return sum_dy / max(count - 1, 1), s * s * sum_dy_xmu / count


less_one_in_projection, less_one_in_mean = _of(_LessOneInProjection), _of(_LessOneInMean)


def never_returns(x, dy, mean, variance, gamma, **options):
    while True:
        pass


#: Name of a function here -> the id of the finding.
WRONG: dict[str, str] = {}
for _kernel, _id in WRONG_KERNELS.items():
    globals()[_kernel.__name__] = _of(_kernel)
    WRONG[_kernel.__name__] = _id
for _pair in PAIRS:
    _name = "_".join(kernel.__name__ for kernel in _pair)
    globals()[_name] = _of(*_pair)
    WRONG[_name] = "|".join(sorted(WRONG_KERNELS[kernel] for kernel in _pair))
rolled, reversed_images = _changed(_rolled), _changed(_reversed)
without_tail, without_last = _changed(_without_tail), _changed(_without_last)
WRONG |= {
    "rolled": "channels-shifted",
    "reversed_images": "elements-permuted",
    "without_tail": "partly-wrong",
    "without_last": "partly-written",
    "last_cached": "stale",
    "dx_cached": "stale",
    "accumulates": "not_repeatable",
    "zeros": "dgamma-zero",
    "right_first": "not_repeatable",
    "right_for_ncx": "layout-ignored",
    "swapped_tensors": "x-dy-swapped",
    "constant_epsilon": "epsilon-constant",
    "tripled_dbeta": "described",
    "without_last_vector": "partly-wrong",
    "without_last_channels": "described",
    "less_one_in_projection": "projection-less-one",
    "less_one_in_mean": "mean-dy-less-one",
    "right_of_expected": "dgamma-zero",
    "writes_input": "changed_input",
    "wrong_for_unaligned_memory": "dbeta-wrong",
    "reads_beyond": "crash",
    "noisy": "not_repeatable",
    "never_returns": "hang",
}

#: Name of a function here -> the access by which it ends its process.
CRASHING = {
    "reads_past_last_element": "it read right behind the end of mean",
    "writes_past_last_element": "it wrote right behind the end of gamma",
    "jumps_to_data": "it jumped to an address that has no code",
    "forks_and_crashes": "it read at a null pointer",
    "reads_past_last_element_in_thread": UNKNOWN_ACCESS,
}
