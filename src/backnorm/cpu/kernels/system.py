"""What kernels ask of the processor and of the system, by way of the C library.

Where the system is not Linux, nobody is woken: there are no threads of our own then.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from backnorm.cpu.kernels.jit import inlined, outlined
from backnorm.cpu.kernels.words import put, room, wide_room, word

__all__ = [
    "LOOKS",
    "MASK_CELLS",
    "PATIENCE",
    "allocated",
    "expect_much",
    "introduce_itself",
    "linger",
    "now",
    "participate",
    "pause",
    "processors",
    "release",
    "run_on",
    "sleep",
    "started",
    "this_thread",
    "wake",
]

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_VOID = ir.VoidType()

#: Words of a set of processors: 1024 of them.
MASK_CELLS = 16

#: How often to look for what another thread does, 50 to 100 µs, before giving way; and before
#: sleeping.
PATIENCE, LOOKS = 2000, 2020

# For how many microseconds.
_NAP = 50

_HUGE, _MADV_HUGEPAGE = 2 << 20, 14
_FUTEX = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT, _FUTEX_WAKE = 128, 129
_PR_SET_NAME = 15
_SIG_SETMASK = 2
# Nothing interrupts a thread of ours but what it does itself: signals that mean that something
# is wrong with its code are the only ones that are left (4 ILL, 5 TRAP, 7 BUS, 8 FPE, 11 SEGV).
_SIGNALS = ~sum(1 << (number - 1) for number in (4, 5, 7, 8, 11))
# The name that the system shows, as a number made of its bytes.
_NAME = int.from_bytes(b"backnorm", "little")

# x86: round to nearest, subnormal numbers, no traps. aarch64 says the same with 0.
_MXCSR = 0x1F80


def _of_c(name: str, result: Any, *parameters: Any, variadic: bool = False) -> Any:
    """Return the code of an intrinsic that calls a function of the C library."""

    def codegen(context, builder, signature, arguments):
        shape = ir.FunctionType(result, parameters, var_arg=variadic)
        function = cgutils.get_or_insert_function(builder.module, shape, name)
        given = [
            value if kind == _I64 else builder.trunc(value, kind)
            for value, kind in zip(arguments, parameters, strict=False)
        ]
        value = builder.call(function, given + list(arguments[len(given) :]))
        if result == _I32:
            return builder.sext(value, _I64)
        return value if result == _I64 else context.get_dummy_value()

    return codegen


def _is_linux(context: Any) -> bool:
    return "linux" in context.codegen().magic_tuple()[0]


def _processor(context: Any) -> str:
    return str(context.codegen().magic_tuple()[0].split("-")[0])


@intrinsic
def allocated(typingctx, size):
    """Return the address of so many bytes of new memory, or 0."""
    return types.int64(types.int64), _of_c("malloc", _I64, _I64)


@intrinsic
def release(typingctx, address):
    """Give memory back."""
    return types.none(types.int64), _of_c("free", _VOID, _I64)


@intrinsic
def this_thread(typingctx):
    """Return a number of the thread that runs this."""
    return types.int64(), _of_c("pthread_self", _I64)


@intrinsic
def _give_way(typingctx):
    """Let another thread have the processor."""
    return types.int64(), _of_c("sched_yield", _I32)


@intrinsic
def _doze(typingctx, microseconds):
    """Leave the processor for so long."""
    return types.int64(types.int64), _of_c("usleep", _I32, _I32)


@intrinsic
def _clock(typingctx, number, place):
    return types.int64(types.int64, types.int64), _of_c("clock_gettime", _I32, _I32, _I64)


@intrinsic
def _monotonic(typingctx):
    """Return the number of the clock that only goes on."""

    def codegen(context, builder, signature, arguments):
        return ir.Constant(_I64, 1 if _is_linux(context) else 6)

    return types.int64(), codegen


@inlined
def now():
    """Return the time in nanoseconds, on a clock that only goes on."""
    place = room()
    _clock(_monotonic(), place)
    return word(place) * 1_000_000_000 + word(place + 8)


@intrinsic
def pause(typingctx):
    """Tell the processor that this is a loop that waits."""

    def codegen(context, builder, signature, arguments):
        if _processor(context) == "x86_64":
            kind = ir.FunctionType(_VOID, [])
            name = "llvm.x86.sse2.pause"
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [])
        return context.get_dummy_value()

    return types.none(), codegen


@inlined
def linger(looks):
    """Wait a little between two looks at what another thread does, of which so many were made.

    It may need this very processor: whoever has looked often gives way, and then sleeps.
    """
    if looks < PATIENCE:
        pause()
    elif looks < LOOKS:
        _give_way()
    else:
        _doze(_NAP)


@intrinsic
def participate(typingctx, function, record, index):
    """Call a kernel by its address, in the standard floating-point mode; return what it returns.

    The mode is round to nearest, with subnormal numbers, whatever the thread's own, which is
    restored. Around the kernel, and not inside, where the compiler moves arithmetic past it.
    """

    def codegen(context, builder, signature, arguments):
        shape = ir.FunctionType(_I64, [_I64, _I64])
        target = builder.inttoptr(arguments[0], shape.as_pointer())
        processor = _processor(context)
        if processor == "x86_64":
            kind = ir.FunctionType(_VOID, [_I8.as_pointer()])
            store, load = (
                cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.sse.{name}mxcsr")
                for name in ("st", "ld")
            )
            # The two words: the thread's own mode, and ours.
            own, ours = (cgutils.alloca_once(builder, _I32) for _ in range(2))
            builder.call(store, [builder.bitcast(own, _I8.as_pointer())])
            builder.store(ir.Constant(_I32, _MXCSR), ours)
            builder.call(load, [builder.bitcast(ours, _I8.as_pointer())])
        elif processor == "aarch64":
            own = builder.asm(ir.FunctionType(_I64, []), "mrs $0, fpcr", "=r", [], True)
            setting = ir.FunctionType(_VOID, [_I64])
            builder.asm(setting, "msr fpcr, $0", "r", [ir.Constant(_I64, 0)], True)
        result = builder.call(target, arguments[1:])
        if processor == "x86_64":
            builder.call(load, [builder.bitcast(own, _I8.as_pointer())])
        elif processor == "aarch64":
            builder.asm(setting, "msr fpcr, $0", "r", [own], True)
        return result

    return types.int64(types.int64, types.int64, types.int64), codegen


@intrinsic
def _advise(typingctx, first, size, advice):
    """Tell the system what whole pages will be used for."""
    of_linux = _of_c("madvise", _I32, _I64, _I64, _I32)

    def codegen(context, builder, signature, arguments):
        if _is_linux(context):
            return of_linux(context, builder, signature, arguments)
        return ir.Constant(_I64, -1)

    return types.int64(types.int64, types.int64, types.int64), codegen


@inlined
def expect_much(address, size):
    """Say that all of these bytes will be written, which may be in memory that is new.

    XLA takes its results from the C library, which takes large ones from the system, page by page:
    51 MB cost 39 ms, and 18 in huge pages.
    """
    first = (address + _HUGE - 1) // _HUGE * _HUGE
    last = (address + size) // _HUGE * _HUGE
    if first < last:
        _advise(first, last - first, _MADV_HUGEPAGE)


@intrinsic
def _futex(typingctx, address, operation, value, timeout):
    """Wait on a word, or wake those who do: of its lower half, which comes first in memory."""
    call = _of_c("syscall", _I64, _I64, variadic=True)

    def codegen(context, builder, signature, arguments):
        number = _FUTEX.get(_processor(context))
        if number is None or not _is_linux(context):
            return ir.Constant(_I64, -1)
        return call(context, builder, signature, [ir.Constant(_I64, number), *arguments])

    return types.int64(types.int64, types.int64, types.int64, types.int64), codegen


@inlined
def sleep(address, value):
    """Sleep until somebody wakes those who sleep at a word; not at all if it has another value.

    May return without any reason.
    """
    _futex(address, _FUTEX_WAIT, value & 0xFFFFFFFF, 0)


@inlined
def wake(address):
    """Wake who sleeps at a word."""
    _futex(address, _FUTEX_WAKE, 1, 0)


def _affinity(name: str) -> Any:
    """Return an intrinsic that reads or writes the processors of this thread, where it can."""
    of_linux = _of_c(f"sched_{name}affinity", _I32, _I32, _I64, _I64)

    @intrinsic
    def call(typingctx, thread, size, mask):
        def codegen(context, builder, signature, arguments):
            if _is_linux(context):
                return of_linux(context, builder, signature, arguments)
            return ir.Constant(_I64, -1)

        return types.int64(types.int64, types.int64, types.int64), codegen

    return call


_get_affinity, _set_affinity = _affinity("get"), _affinity("set")


@intrinsic
def _ones(typingctx, value):
    """Return how many bits of a word are set."""

    def codegen(context, builder, signature, arguments):
        return builder.ctpop(arguments[0])

    return types.int64(types.int64), codegen


@outlined
def processors(mask):
    """Write which processors this thread may use; return how many, 1 if the system does not say."""
    for k in range(MASK_CELLS):
        put(mask + 8 * k, 0)
    if _get_affinity(0, 8 * MASK_CELLS, mask) < 0:
        return 1
    count = 0
    for k in range(MASK_CELLS):
        count += _ones(word(mask + 8 * k))
    return count


@inlined
def run_on(mask):
    """Let this thread use these processors alone, if the system allows it."""
    _set_affinity(0, 8 * MASK_CELLS, mask)


@intrinsic
def _ask(typingctx, function, first, second, third, fourth):
    """Call a C function of up to four arguments by its address; return its int."""

    def codegen(context, builder, signature, arguments):
        shape = ir.FunctionType(_I32, [_I64] * 4)
        target = builder.inttoptr(arguments[0], shape.as_pointer())
        return builder.sext(builder.call(target, arguments[1:]), _I64)

    return types.int64(*[types.int64] * 5), codegen


@outlined
def started(functions, run, argument):
    """Start a thread that no signal is given to; return whether the system had one to give.

    `functions` is where the addresses of pthread_create, pthread_detach and pthread_sigmask are.
    They are looked up and not linked, because C libraries have them in other versions, and places.
    """
    create, detach, mask = word(functions), word(functions + 8), word(functions + 16)
    if create == 0:
        return False
    # Sets of signals as the C library has them, 128 bytes each.
    blocked, before = wide_room(), wide_room()
    for k in range(16):
        put(blocked + 8 * k, _SIGNALS if k == 0 else -1)
    # The thread is born with the mask of its creator.
    if _ask(mask, _SIG_SETMASK, blocked, before, 0) != 0:
        return False
    thread = room()
    created = _ask(create, thread, 0, run, argument) == 0
    _ask(mask, _SIG_SETMASK, before, 0, 0)
    if created:
        _ask(detach, word(thread), 0, 0, 0)
    return created


@intrinsic
def _set_name(typingctx, option, name):
    of_linux = _of_c("prctl", _I32, _I32, variadic=True)

    def codegen(context, builder, signature, arguments):
        if _is_linux(context):
            return of_linux(context, builder, signature, arguments)
        return ir.Constant(_I64, -1)

    return types.int64(types.int64, types.int64), codegen


@inlined
def introduce_itself():
    """Give this thread the name that lists of threads show."""
    name = room()
    put(name, _NAME)
    put(name + 8, 0)
    _set_name(_PR_SET_NAME, name)
