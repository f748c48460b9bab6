"""The handler of custom calls beneath a made-up XLA, which does what the real one does rarely."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import threading

import numpy as np
import pytest

import backnorm
from backnorm.engines import Place
from backnorm.executable import executable
from backnorm.machine import detect
from backnorm.problem import Problem
from backnorm_kernels import library
from backnorm_kernels import xla as table
from backnorm_kernels.kinds import Kind
from backnorm_kernels.record import SLOTS
from backnorm_kernels.xla import handler, register
from backnorm_kernels.xla_structures import ELEMENTS, STRUCTURES, offsets, parsed

EPSILON = 1e-3
FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
FLOAT32 = np.dtype(np.float32)
SHAPE = (64, 8, 3600)


class Xla:
    """A call frame of the inference kernel, and the functions that XLA offers."""

    def __init__(self, threads=2, schedule=None, helpers=3, instances=1):
        self.kept, self.errors, self.destroyed, self.tasks = [], [], [], []
        self.threads, self.schedule = threads, schedule or self.tasks.append
        rng = np.random.default_rng(0)
        self.x = rng.normal(size=(instances, *SHAPE)).astype(FLOAT32)
        self.parameters = [rng.random(SHAPE[1]).astype(FLOAT32) + 0.5 for _ in range(4)]
        self.y = np.full_like(self.x, np.nan)
        # Planned for four threads, whatever there are here.
        known = SHAPE, (1,), FLOAT32, FLOAT32, True, True, EPSILON
        problem = Problem("inference", *known, arithmetic="float64")
        machine = dataclasses.replace(detect(), threads=helpers + 1)
        stage = executable(problem, self.x[0], place=Place("kernels", machine)).stage
        assert stage.participants == helpers + 1
        fields = ("x", "mean", "variance", "gamma", "beta", "out")
        operands = [self.x, *self.parameters]
        described = [
            [SLOTS[field], ELEMENTS["float32"], each.ndim, each.size,
             each.nbytes // instances if each.ndim > 1 else 0]
            for field, each in zip(fields, (*operands, self.y), strict=True)
        ]  # fmt: skip
        name = register(stage.kind)
        self.attributes = {
            "buffers": np.array(described).ravel(),
            "call": np.array([name, instances, helpers]),
            "record": stage.template,
        }
        self.operands, self.results = operands, [self.y]

    def made(self, structure, **fields):
        """Return the address of a structure."""
        places = offsets(structure)
        sizes = dict(parsed(STRUCTURES[structure]))
        memory = (ctypes.c_char * 512)()
        for name, value in {"struct_size": places.size_, **fields}.items():
            if name not in sizes:
                continue
            place, size = getattr(places, name), sizes[name]
            if isinstance(value, int):
                memory[place : place + size] = int(value).to_bytes(size, "little", signed=True)
            else:
                end = offsets(sizes[name]).size_
                memory[place : place + end] = value[:end]
        self.kept.append(memory)
        return memory

    def at(self, memory):
        self.kept.append(memory)
        return ctypes.addressof(memory)

    def words(self, values):
        return self.at((ctypes.c_int64 * max(1, len(values)))(*values))

    def integers(self, values):
        return self.at((ctypes.c_int32 * max(1, len(values)))(*values))

    def buffer(self, array):
        dims = self.words(array.shape)
        where = {"data": array.ctypes.data, "rank": array.ndim, "dims": dims}
        return self.at(self.made("Buffer", dtype=ELEMENTS[array.dtype.name], **where))

    def attribute(self, values):
        values = np.ascontiguousarray(values, np.int64)
        self.kept.append(values)
        return self.at(self.made("Array", dtype=5, size=values.size, data=values.ctypes.data))

    def spelled(self, name):
        text = ctypes.create_string_buffer(name.encode())
        return self.at(self.made("ByteSpan", ptr=self.at(text), len=len(name)))

    def word(self, structure, field, address):
        return ctypes.c_int64.from_address(address + getattr(offsets(structure), field)).value

    def call(self, **changed):
        """Call the handler; return whether it gave no error."""
        functions = {
            "Error_Create": self._create,
            "Error_Destroy": lambda made: self.destroyed.append(
                self.word("Error_Destroy_Args", "error", made)
            ),
            "ThreadPool_NumThreads": self._count,
            "ThreadPool_Schedule": self._schedule,
        }
        pointers = {name: FUNCTION(self._safe(each)) for name, each in functions.items()}
        self.kept.append(pointers)
        api = self.made(
            "Api", **{name: ctypes.cast(each, ctypes.c_void_p).value
                      for name, each in pointers.items()}
        )  # fmt: skip
        buffers = [self.buffer(each) for each in self.operands]
        results = [self.buffer(each) for each in self.results]
        names = sorted(self.attributes)
        args = self.made(
            "Args", size=len(buffers), types=self.integers([1] * len(buffers)),
            args=self.words(buffers),
        )  # fmt: skip
        rets = self.made(
            "Rets",
            size=len(results),
            types=self.integers([1] * len(results)),
            rets=self.words(results),
        )
        attrs = self.made(
            "Attrs",
            size=len(names),
            types=self.integers([1] * len(names)),
            names=self.words([self.spelled(name) for name in names]),
            attrs=self.words([self.attribute(self.attributes[name]) for name in names]),
        )
        frame = {"api": self.at(api), "ctx": 7, "stage": 3}
        frame |= {"args": args, "rets": rets, "attrs": attrs, **changed}
        place = ctypes.cast(handler(0, 3), ctypes.c_void_p).value
        return FUNCTION(place)(self.at(self.made("CallFrame", **frame))) == 0

    def _safe(self, function):
        return lambda made: int(function(made) or 0)

    def _create(self, made):
        place = self.word("Error_Create_Args", "message", made)
        self.errors.append(ctypes.string_at(place).decode())
        return 1

    def _count(self, made):
        assert self.word("ThreadPool_NumThreads_Args", "ctx", made) == 7
        if self.threads is None:
            return 2
        place = self.word("ThreadPool_NumThreads_Args", "num_threads", made)
        ctypes.c_int64.from_address(place).value = self.threads
        return 0

    def _schedule(self, made):
        task = FUNCTION(self.word("ThreadPool_Schedule_Args", "task", made))
        data = self.word("ThreadPool_Schedule_Args", "data", made)
        return self.schedule(lambda: task(data))

    def check(self):
        for x, y in zip(self.x, self.y, strict=True):
            mean, variance, gamma, beta = self.parameters
            expected = backnorm.batch_norm_inference(
                x, mean, variance, gamma, beta, epsilon=EPSILON
            )
            np.testing.assert_array_equal(y, expected)
        assert self.errors == []


def test_handler_task_run_after_end_of_call_does_not_write_results():
    xla = Xla(threads=8, instances=3)
    assert xla.call()
    xla.check()
    assert len(xla.tasks) == 9
    # The arrays are somebody else's by then.
    xla.x[...], xla.y[...] = np.nan, 7.0
    for task in xla.tasks:
        task()
    np.testing.assert_array_equal(xla.y, 7.0)


def on_threads(threads):
    """Return a schedule that runs each task on a thread of its own, which is appended."""

    def schedule(task):
        threads.append(threading.Thread(target=task))
        threads[-1].start()

    return schedule


def test_handler_with_tasks_on_threads_has_the_bits_of_inference():
    threads = []
    for _ in range(20):
        xla = Xla(threads=8, schedule=on_threads(threads))
        assert xla.call()
        xla.check()
    for thread in threads:
        thread.join()


@pytest.mark.long
def test_handler_in_concurrent_calls_has_the_bits_of_inference():
    tasks, answers = [], []
    calls = [Xla(threads=8, schedule=on_threads(tasks), instances=2) for _ in range(6)]
    callers = [threading.Thread(target=lambda xla=xla: answers.append(xla.call())) for xla in calls]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    assert answers == [True] * len(calls)
    for xla in calls:
        xla.check()
    for thread in tasks:
        thread.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
# JAX warns, and Python from 3.12 on.
@pytest.mark.filterwarnings("ignore:.*fork")
def test_handler_in_forked_child_has_the_bits_of_inference():
    tasks = []
    xla = Xla(threads=8, schedule=on_threads(tasks))
    assert xla.call()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        status = 3
        try:
            of_child = []
            again = Xla(threads=8, schedule=on_threads(of_child))
            assert again.call()
            for thread in of_child:
                thread.join()
            again.check()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    for thread in tasks:
        thread.join()
    xla.check()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_register_and_handler_in_child_forked_under_lock_do_not_deadlock():
    kind = Kind("segments", "float32", "float64", "forward")
    register(kind)
    entered, over = threading.Event(), threading.Event()

    def hold():
        with table._lock:
            entered.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        register(kind)
        handler(0, 3)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    over.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0


def test_register_loads_kernel_before_taking_lock(monkeypatch):
    # It may have to be built, which takes seconds.
    free = []
    original = library.address
    monkeypatch.setattr(
        library, "address", lambda kind: free.append(not table._lock.locked()) or original(kind)
    )
    register(Kind("segments", "float32", "float64", "forward"))
    assert free == [True]


def test_handler_with_tasks_run_inline_has_the_bits_of_inference():
    # As XLA does where the queue of its threads is full: the caller must not wait for itself.
    xla = Xla(threads=8, schedule=lambda task: task())
    assert xla.call()
    xla.check()


def test_handler_with_rejected_task_stops_scheduling_and_destroys_error():
    scheduled = []

    def schedule(task):
        scheduled.append(task)
        return 0 if len(scheduled) == 1 else 5

    xla = Xla(threads=8, schedule=schedule)
    assert xla.call()
    xla.check()
    # The second was refused, and the third not tried. The error is destroyed.
    assert len(scheduled) == 2
    assert xla.destroyed == [5]
    scheduled[0]()


@pytest.mark.parametrize(("threads", "tasks"), [(1, 0), (0, 0), (2, 2), (3, 3), (100, 3)])
def test_handler_schedules_no_more_tasks_than_threads_and_helpers(threads, tasks):
    xla = Xla(threads=threads)
    assert xla.call()
    xla.check()
    assert len(xla.tasks) == tasks
    for task in xla.tasks:
        task()


def test_handler_when_thread_count_fails_destroys_error_and_schedules_no_task():
    xla = Xla(threads=None)
    assert xla.call()
    xla.check()
    assert xla.tasks == []
    assert xla.destroyed == [2]


@pytest.mark.parametrize("stage", [0, 1, 2, 4])
def test_handler_at_other_stage_than_execute_returns_error(stage):
    xla = Xla()
    assert not xla.call(stage=stage)
    assert "stage" in xla.errors[0]


def test_handler_with_too_small_call_frame_returns_error():
    xla = Xla()
    assert not xla.call(struct_size=160)
    assert "header" in xla.errors[0]


def test_handler_with_metadata_extension_reports_version_and_does_not_compute():
    xla = Xla()
    metadata = xla.made("Metadata")
    base = xla.made("Extension_Base", type=1, struct_size=offsets("Metadata_Extension").size_)
    requested = xla.made("Metadata_Extension", extension_base=base, metadata=xla.at(metadata))
    assert xla.call(extension_start=xla.at(requested))
    found = ctypes.addressof(metadata) + offsets("Metadata").api_version
    places = offsets("Api_Version")
    for name, value in (("major_version", 0), ("minor_version", 3)):
        assert ctypes.c_int32.from_address(found + getattr(places, name)).value == value
    assert np.isnan(xla.y).all()
    assert xla.tasks == []
