"""Problems for the handler of XLA's custom calls, made from a seed.

It is called as XLA does, with operands and results between unreadable pages; working space is the
handler's own. What it computes must be what the package's own functions do, to the bit.
"""

from __future__ import annotations

import functools
import math
import random
import threading
from typing import Any

import numpy as np
from elsewhere import module_of
from operands import Operand, data_values, some_shape
from problems import Maker, Problem, some_arithmetic

import backnorm
from backnorm.dtypes import ELEMENT_TYPES, statistics_types
from backnorm.executable import executable
from backnorm.problem import Problem as Asked
from backnorm.signature import SIGNATURES
from backnorm_kernels.record import SLOTS
from backnorm_kernels.xla import register
from backnorm_kernels.xla_structures import ELEMENTS

__all__ = ["of_xla"]

_PARAMETERS = {
    "forward": ("gamma", "beta"),
    "inference": ("mean", "variance", "gamma", "beta"),
    "backward": ("mean", "variance", "gamma"),
}
# What there is one of for every instance.
_OF_INSTANCES = {"x", "dy"}


@functools.cache
def _frames() -> Any:
    """Return the class of a call frame beneath a made-up XLA."""
    made_up: Any = module_of("frameworks/jax/test_handler.py").Xla

    class Frame(made_up):
        """A call frame of a stage, with the arrays of its fields."""

        def __init__(
            self,
            stage: Any,
            instances: int,
            arguments: dict[str, Any],
            results: dict[str, Any],
        ) -> None:
            self.kept, self.errors, self.destroyed, self.tasks = [], [], [], []
            self.threads, self.schedule = stage.participants, self._begin
            self.operands, self.results = list(arguments.values()), list(results.values())
            shared = arguments.keys() - _OF_INSTANCES
            described = [
                [SLOTS[field], ELEMENTS[one.dtype.name], one.ndim, one.size,
                 one.nbytes // instances if field not in shared else 0]
                for field, one in (arguments | results).items()
            ]  # fmt: skip
            call = register(stage.kind), instances, stage.participants - 1
            self.attributes = {
                "buffers": np.array(described).ravel(),
                "call": np.array(call),
                "record": stage.template,
            }

        def _begin(self, task: Any) -> None:
            self.tasks.append(threading.Thread(target=task))
            self.tasks[-1].start()

        def run(self) -> None:
            """Call the handler, and wait for its helpers."""
            done = self.call()
            for task in self.tasks:
                task.join()
            if not done:
                raise RuntimeError(str(self.errors))

    return Frame


def of_xla(seed: int, rnd: random.Random) -> Problem:
    """Return the problem of a custom call, of one instance or of several."""
    make = Maker(rnd)
    make.begin()
    make.values = make.tags["values"] = "wide" if make.often(0.2) else "usual"
    make.layout = make.tags["layout"] = "rows"
    operation = rnd.choice(tuple(_PARAMETERS))
    backward = operation == "backward"
    training = operation != "inference" and (not backward or make.often(0.7))
    reproducible = "reproducible" in SIGNATURES[operation].options and make.often(0.5)
    lengths = some_shape(rnd)[0] or (1,)
    if 0 in lengths:
        # Arrays without elements are no custom call.
        lengths = (1,) * len(lengths)
    at = rnd.randrange(len(lengths))
    shape = math.prod(lengths[:at]), lengths[at], math.prod(lengths[at + 1 :])
    instances = rnd.choice((1, 1, 2, 3)) if math.prod(shape) < 1 << 17 else 1
    dtype = rnd.choice(ELEMENT_TYPES)
    statistics = rnd.choice(statistics_types(dtype))
    for name in ("x", "dy") if backward else ("x",):
        content = data_values(rnd, dtype, instances * math.prod(shape), make.values)
        make.operands[name] = Operand((instances, *shape), dtype, content)
    for name in _PARAMETERS[operation]:
        make.values = "usual"
        make.channels(name, (shape[1],), statistics, positive=name == "variance")
        one = make.operands[name]
        make.operands[name] = Operand(one.shape, one.dtype, one.content[: shape[1]])
    results = [r for r in SIGNATURES[operation].results if r.option is None and r.field]
    for each in results:
        data = each.kind == "data"
        whole, kind = ((instances, *shape), dtype) if data else ((instances, shape[1]), statistics)
        make.memory(f"result {each.name}", Operand(whole, kind, np.full(math.prod(whole), np.nan)))
    epsilon = rnd.choice((1e-5, 1e-3))
    arithmetic = some_arithmetic(make, dtype)
    requested = Asked(
        operation, shape, (1,), dtype, statistics, has_gamma=True, has_beta=not backward,
        epsilon=epsilon, training=training, reproducible=reproducible, arithmetic=arithmetic,
    )  # fmt: skip
    make.tags |= {
        "operation": f"xla {operation}", "type": str(dtype), "statistics": str(statistics),
        "format": "NCX", "rank": "3", "dialect": "xla", "out": "xla",
        "sums": "reproducible" if reproducible else "usual",
    }  # fmt: skip

    def call(arguments: dict[str, Any]) -> tuple[Any, ...]:
        operands = {name: one for name, one in arguments.items() if not name.startswith("result")}
        written = {each.field: arguments[f"result {each.name}"] for each in results}
        _frames()(executable(requested).stage, instances, operands, written).run()
        return tuple(written.values())

    def expected(arguments: dict[str, Any]) -> tuple[Any, ...]:
        options: dict[str, Any] = {"epsilon": epsilon, "arithmetic": arithmetic}
        options |= {"training": training} if backward else {}
        options |= {"reproducible": True} if reproducible else {}
        operands = {name: one for name, one in arguments.items() if not name.startswith("result")}
        found = []
        for k in range(instances):
            one = {n: a[k] if n in _OF_INSTANCES else a for n, a in operands.items()}
            result = getattr(backnorm, f"batch_norm_{operation}")(**one, **options)
            found.append(result if isinstance(result, tuple) else (result,))
        return tuple(np.stack(each) for each in zip(*found, strict=True))

    problem = make.finished(seed, call)
    problem.expected = expected
    return problem
