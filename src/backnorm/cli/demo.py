"""Run all dialects on real tensors, check and compare the results (`backnorm demo`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Any

import numpy as np

import backnorm
from backnorm import engines
from backnorm.cli.measure import timed, traffic
from backnorm.cli.progress import progress
from backnorm.conformance import battery
from backnorm.conformance.data import LayerData
from backnorm.conformance.judge.calls import check_call
from backnorm.conformance.ladder import Grade
from backnorm.conformance.verify.dialect_calls import arguments
from backnorm.dialects import registry
from backnorm.dialects.random_tensors import parameter_type
from backnorm.dialects.schema import FormatSpec, OperatorSchema
from backnorm.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, is_16_bit
from backnorm.errors import counted
from backnorm.problem import channel_axis_of

TYPES = (FLOAT32, BFLOAT16, FLOAT16, FLOAT64)
LAYERS = ("conv8", "conv4", "dense")

# Each call is timed this many times, and the median time is shown. A call takes less than a
# millisecond, and the median of five calls varies little.
_REPEAT = 5
# In most dialects, epsilon is a float32 number. Dialects in which it is a float64 number get the
# same value, already rounded to float32, so that the results of all dialects can be compared.
_EPSILON = float(np.float32(1e-5))

#: Tensors of one layer in training, by their names: x, dy, mean, variance, gamma and beta (float32,
#: channels first).
Layer = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Case:
    """One dialect's backward operator, in one layout and one type.

    Attributes
    ----------
    schema : OperatorSchema
    layout : {"NCX", "NXC"}
        The layout in memory. A dialect without a format of this layout gets a transposed view.
    dtype : numpy.dtype
        The element type of x and dy.
    """

    schema: OperatorSchema
    layout: str
    dtype: np.dtype

    @property
    def call(self) -> str:
        """The call, as text for tables."""
        argument = self._formats[0].name if len(self.schema.formats) > 1 else ""
        return f"{self.schema.dialect}.{self.schema.op}({argument})"

    def of_layer(self, layer: Layer) -> battery.Case:
        """Return the case of verify that has the tensors of a layer.

        The parameters are rounded to the type of the data even if the dialect takes them in
        float32, so that all dialects compute with the same numbers.
        """
        kind = parameter_type(self.schema, self.dtype)
        mean, variance, gamma, beta = (
            layer[name].astype(self.dtype).astype(kind)
            for name in ("mean", "variance", "gamma", "beta")
        )
        x, dy = self._data(layer["x"]), self._data(layer["dy"])
        data = LayerData(x, dy, mean, variance, gamma, beta, _EPSILON, self._layout)
        return battery.Case(self.call, data)

    def _data(self, array: np.ndarray) -> np.ndarray:
        shape = array.shape + (1,) * (self.schema.ranks[0] - array.ndim)
        array = array.reshape(shape).astype(self.dtype)
        if self.layout == "NXC":
            array = np.moveaxis(np.ascontiguousarray(np.moveaxis(array, 1, -1)), -1, 1)
        return np.moveaxis(array, 1, channel_axis_of(self._layout))

    @property
    def _layout(self) -> str:
        """The layout of the dialect's arrays."""
        form = self._formats[0]
        return self.layout if form.is_any else form.layout

    @property
    def _formats(self) -> Sequence[FormatSpec]:
        """The dialect's formats that have the case's layout, or all formats if none has it."""
        formats = self.schema.formats
        return [f for f in formats if f.layout == self.layout] or formats


@dataclass(frozen=True, slots=True)
class DemoRow:
    """The measurements of one case, over all layers.

    Attributes
    ----------
    dialect, op, call, layout, dtype : str
    seconds : float
        Sum over the layers of the median time of a call.
    gigabytes_per_second : float
        By the convention of :func:`backnorm.cli.measure.traffic`.
    worst_ulp : float
        Largest error of any gradient, in ulps of its type.
    worst_gradient : str
        The gradient with the largest error: "dx", "dgamma" or "dbeta".
    budget_used : float
        Largest ratio of an element's error to its allowed error.
    judged : int
        The number of gradients that were compared with the exact ones.
    passed : bool
    failures : tuple of str
        The gradients that exceed their budget.
    """

    dialect: str
    op: str
    call: str
    layout: str
    dtype: str
    seconds: float
    gigabytes_per_second: float
    worst_ulp: float
    worst_gradient: str
    budget_used: float
    judged: int
    passed: bool
    failures: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Agreement:
    """Whether the results for one type of data have the same bits in all dialects.

    Dialects that take the inverse standard deviation are compared only with each other, because the
    rounded inverse stands for a slightly different variance. Results of float32 and float64 data
    are also compared between the two layouts. Results of 16-bit data are compared only if both
    calls had the same layout, because short runs of a sum are added up in float32, in an order that
    depends on the layout. The dgamma and dbeta of two dialects are compared only if both dialects
    return them in the same type. `compared` is the number of comparisons.
    """

    dtype: str
    compared: int
    agree: bool
    differences: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The rows of a demo, and the comparison of their results; `asdict` gives the JSON report."""

    engine: str
    layers: tuple[dict[str, Any], ...]
    threads: int
    rows: tuple[DemoRow, ...]
    agreements: tuple[Agreement, ...]
    passed: bool

    @property
    def verdict(self) -> str:
        """The outcome in words; the first line is a summary."""
        if not self.passed:
            wrong = [f"{row.call} {failure}" for row in self.rows for failure in row.failures]
            wrong += [text for agreement in self.agreements for text in agreement.differences]
            return "\n".join([f"FAILED: {counted(len(wrong), 'wrong result')}", *wrong])
        judged = sum(row.judged for row in self.rows)
        compared = sum(agreement.compared for agreement in self.agreements)
        return (
            f"PASSED: {judged} gradients equal the exact ones within their error budgets.\n"
            f"Dialects that get the same numbers return the same bits ({compared} comparisons)."
        )


# For each key, a list of pairs: the text of a call, and the gradient that the call returned. All
# gradients of one key must be equal. A key is a tuple of six texts: the type of the data, the name
# of the layer, the name of the gradient, the type of the gradient, the layout ("" for data that do
# not have 16 bits), and the statistic that the dialect takes besides the mean: a variance or an
# inverse standard deviation.
_Groups = dict[tuple[str, ...], list[tuple[str, np.ndarray]]]


def cases() -> Iterator[Case]:
    """Yield the cases: for each type, the dialects that take it, each in both layouts."""
    schemas = [
        next(op.schema for op in ops.values() if op.schema.operation == "backward")
        for ops in map(registry.operators, registry.DIALECTS)
    ]
    for dtype in TYPES:
        for schema in schemas:
            if parameter_type(schema, dtype) is not None:
                for layout in ("NCX", "NXC"):
                    yield Case(schema, layout, dtype)


def read_layers() -> Mapping[str, Layer]:
    """Return the tensors that ship with the package; `backnorm/data/README.md` describes them."""
    fields = ("x", "dy", "mean", "variance", "gamma")
    path = resources.files("backnorm") / "data/digits_batchnorm.npz"
    with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
        layers = {name: {field: file[f"{name}.{field}"] for field in fields} for name in LAYERS}
    for layer in layers.values():
        layer["beta"] = np.zeros_like(layer["gamma"])
    return layers


def run_demo() -> DemoReport:
    """Run all cases on the tensors that ship with the package."""
    layers, rows, groups = read_layers(), [], _Groups()
    everything = list(cases())
    with progress(len(everything)) as advance:
        for case in everything:
            advance(f"{case.call} {case.dtype}")
            rows.append(_run_case(case, layers, groups))
    agreements = tuple(_agreement(str(dtype), groups) for dtype in TYPES)
    facts = tuple({"name": name, "shape": layer["x"].shape} for name, layer in layers.items())
    passed = all(row.passed for row in rows) and all(each.agree for each in agreements)
    threads = backnorm.get_num_threads() if engines.current() == "kernels" else 1
    return DemoReport(engines.current(), facts, threads, tuple(rows), agreements, passed)


def _run_case(case: Case, layers: Mapping[str, Layer], groups: _Groups) -> DemoRow:
    schema, dtype = case.schema, str(case.dtype)
    operator = registry.operator(schema.dialect, schema.op)
    layout = case.layout if is_16_bit(case.dtype) else ""
    seconds, moved = 0.0, 0
    verdicts: dict[tuple[str, str, str], Grade] = {}
    for layer_name, layer in layers.items():
        of_layer = case.of_layer(layer)
        inputs, attributes = arguments(schema, of_layer.inputs, of_layer)
        canonical = operator.canonical(inputs, attributes)
        outputs, time = timed(partial(operator.invoke, inputs, attributes), _REPEAT)
        seconds += time
        moved += traffic(canonical, inputs)
        checked = check_call(canonical, inputs, outputs)
        for gradient in ("dx", "dgamma", "dbeta"):
            name = canonical.outputs[gradient]
            verdicts[layer_name, gradient, name] = checked[name]
            array = outputs[name]
            if gradient == "dx":
                first = np.moveaxis(array, of_layer.data.channel_axis, 1)
                array = np.ascontiguousarray(first).reshape(layer["x"].shape)
            key = dtype, layer_name, gradient, str(array.dtype), layout, schema.encoding
            groups.setdefault(key, []).append((case.call, array))
    failures = tuple(
        f"{dtype} {layer_name} {name}: {verdict.detail}"
        for (layer_name, _, name), verdict in verdicts.items()
        if not verdict.passed
    )
    worst = max(verdicts, key=lambda key: verdicts[key].worst_ulp)
    return DemoRow(
        dialect=schema.dialect,
        op=schema.op,
        call=case.call,
        layout=case.layout,
        dtype=dtype,
        seconds=seconds,
        gigabytes_per_second=moved / seconds / 1e9,
        worst_ulp=verdicts[worst].worst_ulp,
        worst_gradient=worst[1],
        budget_used=max(verdict.worst_excess for verdict in verdicts.values()),
        judged=len(verdicts),
        passed=not failures,
        failures=failures,
    )


def _agreement(dtype: str, groups: _Groups) -> Agreement:
    """In each group of results of type `dtype`, compare all with the first, bit for bit."""
    compared, differences = 0, []
    for (group_dtype, layer, gradient, *_), ((first, expected), *others) in groups.items():
        if group_dtype != dtype:
            continue
        compared += len(others)
        differences += [
            f"{dtype} {layer} {gradient}: {call} differs from {first} in "
            f"{np.count_nonzero(expected != array)} elements"
            for call, array in others
            if expected.tobytes() != array.tobytes()
        ]
    return Agreement(dtype, compared, not differences, tuple(differences))
