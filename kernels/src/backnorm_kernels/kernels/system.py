"""Calls of the operating system, through the C library, and instructions of the processor.

The wait on a futex is implemented here only for Linux, so the thread pool (`pool`) has no threads
on other systems.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from backnorm_kernels.kernels.atomics import load_word, stack_8_words, stack_32_words, store_word
from backnorm_kernels.kernels.jit import emitted, inlined, outlined
from backnorm_kernels.record import SLOTS

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_VOID = ir.VoidType()

#: The number of 64-bit words in an affinity mask for 1024 processors.
MASK_CELLS = 16

#: A waiting thread reads a flag in a loop. After `YIELD_AFTER` nanoseconds it yields the processor
#: between two reads, and after `SLEEP_AFTER` nanoseconds it sleeps between two reads. These are
#: times, not numbers of reads, because the instruction `pause` takes 9 ns on one processor and 40
#: ns on another.
YIELD_AFTER, SLEEP_AFTER = 100_000, 120_000

# Microseconds that a waiting thread sleeps before it reads the flag again.
_NAP = 50

_HUGE, _MADV_HUGEPAGE = 2 << 20, 14
_OUT, _OUT_BYTES = 8 * SLOTS["out"], 8 * SLOTS["out_bytes"]
_RESIDUAL, _RESIDUAL_BYTES = 8 * SLOTS["residual"], 8 * SLOTS["residual_bytes"]
_FUTEX = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT, _FUTEX_WAKE = 128, 129
_PR_SET_NAME = 15
_SIG_SETMASK = 2
# Threads of the pool block all signals except SIGILL (4), SIGTRAP (5), SIGBUS (7), SIGFPE (8) and
# SIGSEGV (11). The system sends these five to a thread for an error in the thread's own code.
_SIGNALS = ~sum(1 << (number - 1) for number in (4, 5, 7, 8, 11))
# The name that the system's tools show for threads of the pool. The eight bytes of the name are
# passed as one integer.
_NAME = int.from_bytes(b"backnorm", "little")

# The value of the x86 register MXCSR for this floating-point mode: round to nearest, no flushing of
# subnormal numbers, no traps. On aarch64, the register FPCR is 0 in the same mode.
_MXCSR = 0x1F80


def _c_function(
    name: str, result: Any, *parameters: Any, variadic: bool = False, linux: bool = False
) -> Any:
    """Return a function that emits a call of the C library's function `name`.

    If `linux` is True, the C function is called only on Linux. On other systems the result is -1.
    """

    def emit(builder, *values):
        if linux and not _is_linux(builder):
            return ir.Constant(_I64, -1)
        shape = ir.FunctionType(result, parameters, var_arg=variadic)
        function = cgutils.get_or_insert_function(builder.module, shape, name)
        arguments = [
            value if kind == _I64 else builder.trunc(value, kind)
            for value, kind in zip(values, parameters, strict=False)
        ]
        returned = builder.call(function, [*arguments, *values[len(arguments) :]])
        if result == _I32:
            return builder.sext(returned, _I64)
        return returned if result == _I64 else None

    return emit


def _is_linux(builder: Any) -> bool:
    return "linux" in builder.module.triple


def _processor(builder: Any) -> str:
    return str(builder.module.triple.split("-")[0])


@emitted(types.int64(types.int64))
def malloc(builder, size):
    """Return the address of new memory, or 0 if no memory could be allocated."""
    return _c_function("malloc", _I64, _I64)(builder, size)


@emitted(types.none(types.int64))
def free(builder, address):
    """Free memory."""
    return _c_function("free", _VOID, _I64)(builder, address)


@emitted(types.int64())
def thread_id(builder):
    """Return the identity of the calling thread."""
    return _c_function("pthread_self", _I64)(builder)


@emitted(types.int64())
def _sched_yield(builder):
    return _c_function("sched_yield", _I32)(builder)


@emitted(types.int64(types.int64))
def _usleep(builder, microseconds):
    return _c_function("usleep", _I32, _I32)(builder, microseconds)


@emitted(types.int64(types.int64))
def _clock_gettime(builder, place):
    """Write the time of the monotonic clock to the memory at `place`."""
    clock = ir.Constant(_I64, 1 if _is_linux(builder) else 6)
    return _c_function("clock_gettime", _I32, _I32, _I64)(builder, clock, place)


@inlined
def monotonic_ns():
    """Return the time of the monotonic clock in nanoseconds."""
    place = stack_8_words()
    _clock_gettime(place)
    return load_word(place) * 1_000_000_000 + load_word(place + 8)


@emitted(types.none())
def pause(builder):
    """Tell the processor that this is a spin loop."""
    if _processor(builder) == "x86_64":
        shape, name = ir.FunctionType(_VOID, []), "llvm.x86.sse2.pause"
        builder.call(cgutils.get_or_insert_function(builder.module, shape, name), [])


@inlined
def spin_wait(begin):
    """Wait a little before the next read of a word that another thread will change.

    `begin` is the time of the first read (`monotonic_ns`). The other thread may need this
    processor, so after a while the wait yields the processor, and later sleeps.
    """
    waited = monotonic_ns() - begin
    if waited < YIELD_AFTER:
        pause()
    elif waited < SLEEP_AFTER:
        _sched_yield()
    else:
        _usleep(_NAP)


@emitted(types.int64(types.int64, types.int64, types.int64))
def call_kernel(builder, function, record, index):
    """Call a kernel by its address, in the standard floating-point mode; return its result.

    The standard mode rounds to nearest and does not flush subnormal numbers to 0. The thread's own
    mode is restored after the call. The kernel itself does not set the mode, because the compiler
    would move arithmetic across the instruction that sets it.
    """
    shape = ir.FunctionType(_I64, [_I64, _I64])
    target = builder.inttoptr(function, shape.as_pointer())
    processor = _processor(builder)
    if processor == "x86_64":
        kind = ir.FunctionType(_VOID, [_I8.as_pointer()])
        store, load = (
            cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.sse.{name}mxcsr")
            for name in ("st", "ld")
        )
        # `own` is memory for the floating-point mode that the thread had before; `standard` is
        # memory for the mode in which the kernel runs.
        own, standard = (cgutils.alloca_once(builder, _I32) for _ in range(2))
        builder.call(store, [builder.bitcast(own, _I8.as_pointer())])
        builder.store(ir.Constant(_I32, _MXCSR), standard)
        builder.call(load, [builder.bitcast(standard, _I8.as_pointer())])
    elif processor == "aarch64":
        own = builder.asm(ir.FunctionType(_I64, []), "mrs $0, fpcr", "=r", [], True)
        setting = ir.FunctionType(_VOID, [_I64])
        builder.asm(setting, "msr fpcr, $0", "r", [ir.Constant(_I64, 0)], True)
    result = builder.call(target, [record, index])
    if processor == "x86_64":
        builder.call(load, [builder.bitcast(own, _I8.as_pointer())])
    elif processor == "aarch64":
        builder.asm(setting, "msr fpcr, $0", "r", [own], True)
    return result


@emitted(types.int64(types.int64, types.int64, types.int64))
def _madvise(builder, first, size, advice):
    call = _c_function("madvise", _I32, _I64, _I64, _I32, linux=True)
    return call(builder, first, size, advice)


@outlined
def advise_outputs(record):
    """Request huge pages for the outputs of a call that are in new memory.

    The system provides new memory page by page when it is first written: writing 51 MB took 39 ms
    with ordinary pages, and 18 ms with huge pages.
    """
    _advise_huge_pages(load_word(record + _OUT), load_word(record + _OUT_BYTES))
    _advise_huge_pages(load_word(record + _RESIDUAL), load_word(record + _RESIDUAL_BYTES))


@inlined
def _advise_huge_pages(address, size):
    """Request huge pages for those that are completely within the memory, if there are any.

    A system without huge pages returns an error, which is ignored.
    """
    first = (address + _HUGE - 1) // _HUGE * _HUGE
    last = (address + size) // _HUGE * _HUGE
    if address != 0 and first < last:
        _madvise(first, last - first, _MADV_HUGEPAGE)


@emitted(types.int64(*[types.int64] * 4))
def _futex(builder, address, operation, value, timeout):
    """Call futex(2) on the lower 32 bits of a 64-bit word, which come first in memory."""
    number = _FUTEX.get(_processor(builder))
    if number is None:
        return ir.Constant(_I64, -1)
    call = _c_function("syscall", _I64, _I64, variadic=True, linux=True)
    return call(builder, ir.Constant(_I64, number), address, operation, value, timeout)


@inlined
def futex_wait(address, value):
    """Sleep until another thread wakes this thread by `futex_wake(address)`.

    If the word at `address` is not `value`, return at once. The system may also wake the thread for
    no reason (a spurious wake-up).
    """
    _futex(address, _FUTEX_WAIT, value & 0xFFFFFFFF, 0)


@inlined
def futex_wake(address):
    """Wake one thread that sleeps at `address` (see `futex_wait`)."""
    _futex(address, _FUTEX_WAKE, 1, 0)


def _affinity(name: str) -> Any:
    """Return a function that gets or sets the affinity mask of a thread."""
    of_linux = _c_function(f"sched_{name}affinity", _I32, _I32, _I64, _I64, linux=True)

    @emitted(types.int64(types.int64, types.int64, types.int64))
    def call(builder, thread, size, mask):
        return of_linux(builder, thread, size, mask)

    return call


_sched_getaffinity, _sched_setaffinity = _affinity("get"), _affinity("set")


@emitted(types.int64(types.int64))
def _popcount(builder, value):
    """Return the number of bits of a word that are set."""
    return builder.ctpop(value)


@outlined
def get_affinity(mask):
    """Store this thread's affinity mask at `mask`; return the number of processors in the mask.

    If the system does not tell the mask, return 1.
    """
    for k in range(MASK_CELLS):
        store_word(mask + 8 * k, 0)
    if _sched_getaffinity(0, 8 * MASK_CELLS, mask) < 0:
        return 1
    count = 0
    for k in range(MASK_CELLS):
        count += _popcount(load_word(mask + 8 * k))
    return count


@inlined
def set_affinity(mask):
    """Set the affinity mask of this thread, if the system allows it."""
    _sched_setaffinity(0, 8 * MASK_CELLS, mask)


@emitted(types.int64(*[types.int64] * 5))
def _call_four(builder, function, first, second, third, fourth):
    """Call the C function at the address `function`, and return its int.

    Four arguments are passed. A C function that takes fewer arguments ignores the others.
    """
    shape = ir.FunctionType(_I32, [_I64] * 4)
    target = builder.inttoptr(function, shape.as_pointer())
    return builder.sext(builder.call(target, [first, second, third, fourth]), _I64)


@outlined
def start_thread(functions, run, argument):
    """Start a detached thread that blocks `_SIGNALS`; return whether the system allowed it.

    `functions` points to the addresses of pthread_create, pthread_detach and pthread_sigmask. The
    addresses are found at run time. The library is not linked to these functions, because C
    libraries differ in the symbol versions of the functions, and in the files that contain them.
    """
    create, detach, mask = load_word(functions), load_word(functions + 8), load_word(functions + 16)
    if create == 0:
        return False
    # `blocked` and `before` are the addresses of two signal sets of the C library, which have 128
    # bytes each. The new thread inherits the signal mask of this thread, so this mask is set to
    # `blocked` and later restored.
    blocked, before = stack_32_words(), stack_32_words()
    for k in range(16):
        store_word(blocked + 8 * k, _SIGNALS if k == 0 else -1)
    if _call_four(mask, _SIG_SETMASK, blocked, before, 0) != 0:
        return False
    thread = stack_8_words()
    created = _call_four(create, thread, 0, run, argument) == 0
    _call_four(mask, _SIG_SETMASK, before, 0, 0)
    if created:
        _call_four(detach, load_word(thread), 0, 0, 0)
    return created


@emitted(types.int64(types.int64, types.int64))
def _prctl(builder, option, name):
    return _c_function("prctl", _I32, _I32, variadic=True, linux=True)(builder, option, name)


@inlined
def set_thread_name():
    """Set the name that the system shows for this thread."""
    name = stack_8_words()
    store_word(name, _NAME)
    store_word(name + 8, 0)
    _prctl(_PR_SET_NAME, name)
