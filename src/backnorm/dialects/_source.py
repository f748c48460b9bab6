"""The code and the types of an operator's callable, written from its schema."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from backnorm.arithmetics import chosen
from backnorm.arrays import NUMPY
from backnorm.binding import NO_FACTS, facts, written
from backnorm.dialects.schema import REQUIRED, AttributeSpec, OperatorSchema, TensorSpec
from backnorm.executable import CALLS
from backnorm.threads import get_num_threads

__all__ = [
    "Parameter",
    "configuration",
    "function_of",
    "function_of_revisions",
    "initializer_of",
    "parameters_of",
    "result_type",
]

_PYTHON_TYPES = {"f32": "float", "f64": "float", "i64": "int", "string": "str", "bool": "bool"}


class Parameter(NamedTuple):
    """A parameter of a callable: `default` and `type` as they are written."""

    name: str
    type: str
    default: str
    is_keyword: bool = False


def configuration(schemas: Sequence[OperatorSchema]) -> list[Parameter]:
    """Return the parameters of the constructor of an operator that is configured.

    What has not the same default in all revisions is None there: the revision's own.
    """
    first = schemas[0].attributes
    everything = {a.name: a for schema in reversed(schemas) for a in schema.attributes}
    further = [a for name, a in everything.items() if name not in {a.name for a in first}]
    found = []
    for spec in (*first, *further):
        parameter = _of_attribute(spec)
        if not _is_common(spec, schemas):
            wide = parameter.type.removesuffix(" | None") + " | None"
            parameter = parameter._replace(default="None", type=wide)
        found.append(parameter._replace(is_keyword=spec.keyword or spec in further))
    return sorted(found, key=lambda parameter: parameter.is_keyword)


def _is_common(spec: AttributeSpec, schemas: Sequence[OperatorSchema]) -> bool:
    """Whether an attribute has one default in all revisions."""
    return all(
        any(a.name == spec.name and a.default == spec.default for a in schema.attributes)
        for schema in schemas
    )


def parameters_of(schema: OperatorSchema, order: Sequence[str] = ()) -> list[Parameter]:
    """Return the parameters of a call.

    `order` names inputs that stand in another order than the schema's.
    """
    inputs = {tensor.name: _of_input(tensor) for tensor in schema.inputs}
    attributes = {spec.name: _of_attribute(spec) for spec in schema.attributes}
    if schema.style == "configured":
        attributes = {}
    known = inputs | attributes
    if order:
        found = [inputs[name] for name in order] + list(attributes.values())
    else:
        found = [known[name] for name in schema.order or known]
    if schema.style == "keywords":
        found = [parameter._replace(is_keyword=True) for parameter in found]
    if schema.choice == "outputs":
        choice = "int | Collection[str]"
        found.append(Parameter("outputs", choice, str(len(schema.outputs))))
    elif schema.choice == "output_mask":
        found.append(Parameter("output_mask", "Sequence[bool] | np.ndarray | Required", "REQUIRED"))
    if schema.takes_memory:
        found.append(Parameter(schema.outputs[0].name, "np.ndarray | None", "None", True))
    # Of every operator, and in no dialect's schema.
    found.append(Parameter("arithmetic", "Arithmetic | None", "None", True))
    return found


def _of_input(tensor: TensorSpec) -> Parameter:
    type_ = "object" if tensor.kind == "opaque" else "ArrayLike | None"
    return Parameter(tensor.name, "np.ndarray | None" if "memory" in tensor.role else type_, "None")


def _of_attribute(spec: AttributeSpec) -> Parameter:
    type_ = _PYTHON_TYPES[spec.type]
    if spec.required:
        return Parameter(spec.name, f"{type_} | Required", "REQUIRED")
    return Parameter(spec.name, type_ + " | None" * spec.nullable, repr(spec.default))


def result_type(schema: OperatorSchema) -> str:
    """Return the type of what a call returns."""
    if schema.result == "array":
        return "np.ndarray"
    if schema.result != "tuple":
        return schema.result
    if schema.choice == "outputs" or schema.style == "configured":
        return "tuple[np.ndarray, ...]"
    one = "np.ndarray | None" if schema.choice == "output_mask" else "np.ndarray"
    return f"tuple[{', '.join([one] * len(schema.outputs))}]"


def function_of(
    schema: OperatorSchema, first: Callable[..., Any], name: str, order: Sequence[str] = ()
) -> Callable[..., Any]:
    """Return the method that calls an operator.

    It finds a repeated call in the call cache by all that the checks look at, and hands another one
    to `first`: with a key (None: not to be kept), inputs, attributes, the choice of outputs, the
    memory for the first one and the arithmetic.
    """
    parameters = parameters_of(schema, order)
    inputs = [tensor.name for tensor in schema.inputs]
    attributes = [] if schema.style == "configured" else [a.name for a in schema.attributes]
    choice = None if schema.choice == "all" else schema.choice
    memory = schema.outputs[0].name if schema.takes_memory else "None"
    # True == 1 == 1.0: a key cannot tell them apart without their classes.
    key = ["self.identity", *map(_facts, schema.inputs)]
    key += [part for name in attributes for part in (f"type({name})", name)]
    key += ["get_num_threads()", "type(arithmetic)", "arithmetic", "chosen()"]
    if choice == "outputs":
        key += ["type(outputs)", "outputs"]
    elif choice == "output_mask":
        # What is longer than it may be is not read to its end, if it has one.
        read = f"(flags := output_mask[:{len(schema.outputs) + 1}])"
        key += ["type(output_mask)", f"*{read}", "*map(type, flags)"]
    given = "self.attributes" if schema.style == "configured" else _dictionary(attributes)
    passed = f"{_dictionary(inputs)}, {given}, {choice}, {memory}, arithmetic"
    lines = [
        f"def {name}({_listed(parameters)}):",
        "    try:",
        f"        key = ({', '.join(key)},)",
        "        found = calls.get(key)",
        f"    except {NO_FACTS}:",
        "        key = found = None",
        "    except Exception:",
        # Either an attribute's own method raised it, and it is refused, or a signal handler.
        f"        first(self, None, {passed})",
        "        raise",
        "    if found is None:",
        f"        return first(self, key, {passed})",
        f"    return found({', '.join(inputs)}, {memory})",
    ]
    return _made(lines, name, parameters, result_type(schema), {"first": first})


def function_of_revisions(
    schema: OperatorSchema, refuse: Callable[..., None]
) -> Callable[..., Any]:
    """Return the method that calls an operator whose inputs depend on its revision.

    Their order and names are the revision's, whose own method it calls from ``self.by_revision``.
    Where that raises a TypeError, `refuse` raises one that says which input did not fit, given the
    operator, what came by position and by name, and the error.
    """
    known = {tensor.name for tensor in schema.inputs}
    parameters = [p for p in parameters_of(schema) if p.name not in known]
    listed = ", ".join(f"{p.name}={p.default}" for p in parameters)
    passed = ", ".join(f"{p.name}={p.name}" for p in parameters)
    lines = [
        f"def __call__(self, *inputs, {listed}, **named):",
        "    call = self.by_revision[self.schema.revision]",
        "    try:",
        f"        return call(self, *inputs, {passed}, **named)",
        "    except TypeError as error:",
        "        refuse(self, inputs, named, error)",
    ]
    parameters += [Parameter("inputs", "ArrayLike | None", ""), Parameter("named", "Any", "")]
    return _made(lines, "__call__", parameters, result_type(schema), {"refuse": refuse})


def initializer_of(
    schemas: Sequence[OperatorSchema], configure: Callable[..., None]
) -> Callable[..., None]:
    """Return the constructor of an operator that is configured."""
    parameters = configuration(schemas)
    common = {spec.name for spec in schemas[0].attributes if _is_common(spec, schemas)}
    by_revision = [parameter.name for parameter in parameters if parameter.name not in common]
    given = _dictionary([parameter.name for parameter in parameters])
    lines = [
        f"def __init__({_listed(parameters)}):",
        f"    configure(self, {given}, {tuple(by_revision)!r})",
    ]
    return _made(lines, "__init__", parameters, "None", {"configure": configure})


def _facts(tensor: TensorSpec) -> str:
    if tensor.role == "ignored":
        return f"{tensor.name} is None"
    return facts(NUMPY.code, tensor.name)


def _listed(parameters: Iterable[Parameter]) -> str:
    """Return the parameters as a definition has them."""
    texts, star = ["self"], False
    for parameter in parameters:
        if parameter.is_keyword and not star:
            texts.append("*")
            star = True
        texts.append(f"{parameter.name}={parameter.default}")
    return ", ".join(texts)


def _dictionary(names: Iterable[str]) -> str:
    return "{" + ", ".join(f"{name!r}: {name}" for name in names) + "}"


def _made(
    lines: list[str],
    name: str,
    parameters: Iterable[Parameter],
    returns: str,
    names: dict[str, Any],
) -> Callable[..., Any]:
    """Return the function that is written in `lines`, which know `names` too."""
    names |= {
        "REQUIRED": REQUIRED,
        "calls": CALLS,
        "chosen": chosen,
        "get_num_threads": get_num_threads,
    }
    made: Callable[..., Any] = written(f"{name} of a dialect", lines, names)[name]
    made.__annotations__ = {p.name: p.type for p in parameters} | {"return": returns}
    return made
