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
from backnorm.cpu.record import SLOTS
from backnorm.cpu.xla import introduce
from backnorm.cpu.xla_structures import ELEMENTS
from backnorm.dtypes import ELEMENT_TYPES, statistics_types
from backnorm.executable import executable
from backnorm.problem import Problem as Asked
from backnorm.signature import SIGNATURES

__all__ = ["of_xla"]

_PARAMETERS = {
    "forward": ("gamma", "beta"),
    "inference": ("mean", "variance", "gamma", "beta"),
    "backward": ("mean", "variance", "gamma"),
}


@functools.cache
def _frames() -> Any:
    """Return the class of a call frame beneath a made-up XLA."""
    made_up: Any = module_of("frameworks/jax/test_handler.py").Xla

    class Frame(made_up):
        """A call frame of a stage, with the arrays of its fields."""

        def __init__(
            self, stage: Any, instances: int, given: dict[str, Any], results: dict[str, Any]
        ) -> None:
            self.kept, self.errors, self.destroyed, self.tasks = [], [], [], []
            self.threads, self.schedule = stage.participants, self._begin
            self.given, self.results = list(given.values()), list(results.values())
            # Every instance has them.
            shared = given.keys() - {"x", "dy"}
            described = [
                [SLOTS[field], ELEMENTS[one.dtype.name], one.ndim, one.size, one.nbytes,
                 one.nbytes // instances if field not in shared else 0]
                for field, one in (given | results).items()
            ]  # fmt: skip
            call = introduce(stage.kind), instances, stage.participants - 1
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
    training = operation == "forward" or (operation == "backward" and make.often(0.7))
    lengths = some_shape(rnd)[0] or (1,)
    if 0 in lengths:
        # Arrays without elements are no custom call.
        lengths = (1,) * len(lengths)
    at = rnd.randrange(len(lengths))
    shape = math.prod(lengths[:at]), lengths[at], math.prod(lengths[at + 1 :])
    instances = rnd.choice((1, 1, 2, 3)) if math.prod(shape) < 1 << 17 else 1
    dtype = rnd.choice(ELEMENT_TYPES)
    statistics = rnd.choice(statistics_types(dtype))
    for name in ("x", "dy") if operation == "backward" else ("x",):
        content = data_values(rnd, dtype, instances * math.prod(shape), make.values)
        make.operands[name] = Operand((instances, *shape), dtype, content)
    for name in _PARAMETERS[operation]:
        make.values = "usual"
        make.channels(name, (shape[1],), statistics, positive=name == "variance")
        one = make.operands[name]
        make.operands[name] = Operand(one.shape, one.dtype, one.content[: shape[1]])
    results = [each for each in SIGNATURES[operation].results if each.option is None]
    for each in results:
        data = each.kind == "data"
        whole = (instances, *shape) if data else (instances, shape[1])
        kind = dtype if data else statistics
        make.memory(f"result {each.name}", Operand(whole, kind, np.full(math.prod(whole), np.nan)))
    epsilon = rnd.choice((1e-5, 1e-3))
    arithmetic = some_arithmetic(make, dtype)
    asked = Asked(
        operation, shape, (1,), dtype, statistics, has_gamma=True,
        has_beta=operation != "backward", epsilon=epsilon, training=training,
        arithmetic=arithmetic,
    )  # fmt: skip
    make.tags |= {
        "operation": f"xla {operation}", "type": str(dtype), "statistics": str(statistics),
        "format": "NCX", "rank": "3", "dialect": "xla", "out": "xla",
    }  # fmt: skip

    def call(given: dict[str, Any]) -> tuple[Any, ...]:
        operands = {name: one for name, one in given.items() if not name.startswith("result")}
        written = {each.field: given[f"result {each.name}"] for each in results}
        _frames()(executable(asked).stage, instances, operands, written).run()
        return tuple(written.values())

    def expected(given: dict[str, Any]) -> tuple[Any, ...]:
        function = getattr(backnorm, f"batch_norm_{operation}")
        how = {"training": training} if operation == "backward" else {}
        how["arithmetic"] = arithmetic
        operands = {name: one for name, one in given.items() if not name.startswith("result")}
        found = []
        for k in range(instances):
            one = {n: a[k] if n in ("x", "dy") else a for n, a in operands.items()}
            result = function(**one, epsilon=epsilon, **how)
            found.append(result if isinstance(result, tuple) else (result,))
        return tuple(np.stack(each) for each in zip(*found, strict=True))

    problem = make.finished(seed, call)
    problem.expected = expected
    return problem
