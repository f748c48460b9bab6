"""The arithmetic of elements comes from a call, layer, block or the environment."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.func import grad, jvp, vmap

import backnorm.torch
from backnorm.arithmetics import own_arithmetic
from backnorm.errors import ArgumentTypeError, ArgumentValueError
from backnorm.executable import Executable, forget
from backnorm.torch import batch_norm, library
from backnorm.torch.memory import element_type
from benchmarks.models import libraries

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:Lazy modules are a new feature"),
]

EPS = 1e-3
# Types of elements, and an arithmetic that is not their own.
OTHERS = {torch.float32: "float32", torch.float16: "float64", torch.bfloat16: "float64"}
TYPES = pytest.mark.parametrize("dtype", OTHERS, ids=lambda dtype: str(dtype)[6:])


def own(dtype):
    return own_arithmetic(element_type(dtype))


@pytest.fixture(autouse=True)
def computed(monkeypatch):
    """Return what was planned since it was last asked: pairs of operation and arithmetic."""
    torch._dynamo.reset()
    planned, make = set(), Executable.__init__

    def record(self, problem, *arguments):
        planned.add((problem.operation, problem.arithmetic))
        make(self, problem, *arguments)

    def found():
        seen = set(planned)
        planned.clear()
        forget()
        return seen

    monkeypatch.setattr(Executable, "__init__", record)

    forget()
    yield found
    forget()
    torch._dynamo.reset()


def operands(dtype, count=2):
    x, *others = torch.randn(count, 6, 3, 4, 5).to(dtype).unbind()
    channels = torch.rand(4, 3) + 0.5
    return x.requires_grad_(), *others, *channels.to(dtype).unbind()


class TestCalls:
    @pytest.mark.parametrize(
        ("wrong", "error"),
        [("float16", ArgumentValueError), (torch.float32, ArgumentTypeError),
         (["float32"], ArgumentTypeError), (1, ArgumentTypeError)],
    )  # fmt: skip
    def test_unknown_arithmetic_raises(self, wrong, error):
        x = torch.randn(4, 3)
        layer = backnorm.torch.BatchNorm1d(3)
        layer.arithmetic = wrong
        calls = [
            lambda: batch_norm(x, None, None, training=True, arithmetic=wrong),
            lambda: batch_norm(x[:0], None, None, training=True, arithmetic=wrong),
            lambda: backnorm.torch.BatchNorm1d(3, arithmetic=wrong),
            lambda: backnorm.torch.convert(nn.BatchNorm1d(3), arithmetic=wrong),
            lambda: layer(x),
        ]
        if type(wrong) is str:
            calls.append(lambda: library.batch_norm(x, None, None, EPS, wrong))
        for call in calls:
            with pytest.raises(error, match=r"^arithmetic: "):
                call()


class TestBlocks:
    @TYPES
    @pytest.mark.parametrize("training", [True, False])
    def test_backward_of_silu_has_arithmetic_of_its_forward(self, training, dtype, computed):
        x, dy, *channels = operands(dtype)
        with backnorm.arithmetic(OTHERS[dtype]):
            y = batch_norm(x, *channels, training, eps=EPS, activation="silu")
        with backnorm.arithmetic(own(dtype)):
            y.backward(dy)
        found = computed()
        assert {arithmetic for _, arithmetic in found} == {OTHERS[dtype]}
        assert len(found) >= 2

    def test_arithmetic_under_autocast_follows_element_type(self, computed):
        model = nn.Sequential(nn.Conv2d(3, 4, 1), backnorm.torch.BatchNorm2d(4))
        x = torch.randn(2, 3, 5, 5)
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        assert y.dtype is torch.bfloat16
        y.float().square().mean().backward()
        assert computed() == {("forward", "float32"), ("backward", "float32")}
        model(x)
        assert computed() == {("forward", "float64")}

    @pytest.mark.long
    def test_environment_variable_sets_arithmetic(self, monkeypatch):
        code = (
            "import torch, backnorm.torch as b\n"
            "y = b.BatchNorm1d(3)(torch.randn(4, 3, requires_grad=True))\n"
            "print(y.grad_fn.options.arithmetic)"
        )
        for name in ("float32", "float64"):
            monkeypatch.setenv("BACKNORM_ARITHMETIC", name)
            command = [sys.executable, "-c", code]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            assert done.stdout.split() == [name]


LAYERS = {
    "BatchNorm1d": (4, 3),
    "BatchNorm2d": (4, 3, 2, 2),
    "BatchNorm3d": (4, 3, 2, 2, 2),
    "BatchNormReLU1d": (4, 3, 5),
    "BatchNormReLU2d": (4, 3, 2, 2),
    "BatchNormReLU3d": (4, 3, 2, 2, 2),
}


class TestLayers:
    @pytest.mark.parametrize("name", [*LAYERS, *(f"Lazy{each}" for each in [*LAYERS][:3])])
    def test_layer_arithmetic_is_in_repr_and_kept_by_copies(self, name, computed):
        cls, lazy = getattr(backnorm.torch, name), name.startswith("Lazy")
        arguments = () if lazy else (3,)
        plain = cls(*arguments, dtype=torch.bfloat16)
        layer = cls(*arguments, dtype=torch.bfloat16, arithmetic="float64")
        assert "arithmetic" not in repr(plain)
        assert "arithmetic='float64'" in repr(layer)
        assert layer.state_dict().keys() == plain.state_dict().keys()
        x = torch.randn(LAYERS[name.removeprefix("Lazy")]).bfloat16()
        text = repr(cls.cls_to_become(3, arithmetic="float64") if lazy else layer)
        for copied in (
            lambda each: each,
            copy.deepcopy,
            lambda each: pickle.loads(pickle.dumps(each)),
        ):
            # A lazy layer cannot be copied before its first batch.
            each = copied(layer)
            each(x).sin().sum().backward()
            assert computed() == {("forward", "float64"), ("backward", "float64")}
            assert repr(each) == text
        plain(x)
        assert computed() == {("forward", "float32")}

    @pytest.mark.parametrize("fuse", [False, True])
    def test_convert_sets_arithmetic_of_every_layer(self, fuse, computed):
        settings = {"dtype": torch.bfloat16}
        model = nn.Sequential(
            nn.Conv2d(3, 4, 1, **settings), nn.BatchNorm2d(4, **settings), nn.ReLU(),
            nn.LazyBatchNorm2d(**settings), backnorm.torch.BatchNorm2d(4, **settings),
            nn.SyncBatchNorm(4),
        )  # fmt: skip
        before = repr(model[:3])
        reports = []
        backnorm.torch.convert(model, fuse, reports.append, arithmetic="float64")
        assert [each.arithmetic for each in reports] == ["float64"] * 4
        assert "-> backnorm.torch.BatchNorm2d in float64" in str(reports[0])
        model[:5](torch.randn(2, 3, 5, 5).bfloat16()).sin().sum().backward()
        assert computed() == {("forward", "float64"), ("backward", "float64")}
        # Layers keep what they say; or say something else.
        backnorm.torch.convert(model, fuse)
        assert repr(model).count("arithmetic='float64'") == 4
        backnorm.torch.convert(model, arithmetic="float32")
        assert repr(model).count("arithmetic='float32'") == 4
        backnorm.torch.revert(model)
        assert "arithmetic" not in repr(model)
        assert not any("arithmetic" in vars(each) for each in model.modules())
        assert repr(model[:3]) == before
        reports.clear()
        backnorm.torch.convert(model, fuse, reports.append)
        assert all(each.arithmetic is None for each in reports)

    def test_revert_keeps_arithmetic_of_layer_with_relu(self):
        layer = backnorm.torch.BatchNormReLU1d(3, arithmetic="float64")
        assert backnorm.torch.revert(nn.Sequential(layer))[0].arithmetic == "float64"

    @pytest.mark.parametrize("name", ["torchvision", "BatchNormAct2d", "FrozenBatchNormAct2d"])
    def test_convert_sets_arithmetic_of_library_layers(self, name, computed):
        if name == "torchvision":
            layer = libraries.torchvision().ops.FrozenBatchNorm2d(3).bfloat16()
        else:
            layer = getattr(libraries.timm().layers.norm_act, name)(3).bfloat16()
        text = repr(layer)
        backnorm.torch.convert(layer, arithmetic="float64")
        assert "arithmetic='float64'" in repr(layer)
        layer(torch.randn(2, 3, 4, 4).bfloat16())
        assert {arithmetic for _, arithmetic in computed()} == {"float64"}
        assert repr(backnorm.torch.revert(layer)) == text


class TestTransforms:
    @TYPES
    @pytest.mark.parametrize("training", [True, False])
    def test_transforms_compute_in_requested_arithmetic(self, training, dtype, computed):
        x, dy, mean, variance, weight, bias = (each.detach() for each in operands(dtype))

        statistics = (None, None) if training else (mean, variance)

        def call(x, weight, bias):
            return batch_norm(
                x, *statistics, weight, bias, training, eps=EPS, arithmetic=OTHERS[dtype]
            )

        def loss(*call_operands):
            return (call(*call_operands) * dy).sum()

        call_operands = x, weight, bias
        jvp(call, call_operands, call_operands)
        grad(loss, (0, 1, 2))(*call_operands)
        vmap(call, (0, None, None))(torch.stack([x, dy]), weight, bias)
        vmap(grad(loss), (0, None, None))(torch.stack([x, dy]), weight, bias)
        assert {arithmetic for _, arithmetic in computed()} == {OTHERS[dtype]}


OPERATORS = {
    "batch_norm": ("x", "weight", "bias", EPS),
    "batch_norm_inference": ("x", "weight", "bias", "mean", "variance", EPS),
    "batch_norm_backward": ("x", "dy", "mean", "variance", "weight", EPS, True),
}


class TestOperators:
    @pytest.mark.covering(1)
    @TYPES
    @pytest.mark.parametrize("name", OPERATORS)
    def test_operator_without_arithmetic_has_that_of_its_elements(self, name, dtype, computed):
        x, dy, mean, variance, weight, bias = operands(dtype)
        mean, variance = mean.float(), variance.float()
        tensors = {"x": x, "dy": dy, "mean": mean, "variance": variance}
        tensors |= {"weight": weight, "bias": bias}
        call_operands = [tensors.get(each, each) for each in OPERATORS[name]]
        operator = getattr(library, name)

        def run(*more):
            first, *_ = (
                results
                if isinstance(results := operator(*call_operands, *more), tuple)
                else [results]
            )
            if name != "batch_norm_backward":
                torch.autograd.grad(first, x, dy)
            return {arithmetic for _, arithmetic in computed()}

        with backnorm.arithmetic(OTHERS[dtype]):
            assert run() == {own(dtype)}
        assert run(OTHERS[dtype]) == {OTHERS[dtype]}
        # Forward mode and transforms have the same.
        outcome = torch.library.opcheck(operator, [*call_operands, OTHERS[dtype]])
        assert set(outcome.values()) == {"SUCCESS"}


class Model(nn.Module):
    """Three layers: one is fused, one has an arithmetic of its own."""

    def __init__(self, dtype, arithmetic=None):
        super().__init__()
        self.first = backnorm.torch.BatchNorm1d(3, dtype=dtype)
        self.second = backnorm.torch.BatchNormReLU1d(3, dtype=dtype, arithmetic=arithmetic)

    def forward(self, x):
        return self.second(self.first(x), x)


def graph_arithmetics(graph):
    return {
        node.args[-1] for node in graph.nodes if str(node.target).startswith("backnorm.batch_norm")
    }


@pytest.mark.long
class TestCompilers:
    @TYPES
    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_compiled_model_computes_in_arithmetic_of_block(self, dtype, backend, computed):
        graphs = []

        def counted(graph, inputs):
            graphs.append(graph)
            return torch._dynamo.lookup_backend(backend)(graph, inputs)

        model = torch.compile(Model(dtype), backend=counted, fullgraph=True)
        x, dy = torch.randn(2, 4, 3).to(dtype).unbind()
        x.requires_grad_()
        for _ in range(2):
            for name in (None, "float32", "float64", None):
                if name is None:
                    y = model(x)
                else:
                    with backnorm.arithmetic(name):
                        y = model(x)
                with backnorm.arithmetic("float32" if own(dtype) == "float64" else "float64"):
                    y.backward(dy)
                assert {each for _, each in computed()} == {name or own(dtype)}
        assert len(graphs) == 3

    def test_arithmetic_block_inside_compiled_function_sets_arithmetic(self, computed):
        module = Model(torch.bfloat16)

        @torch.compile(backend="eager")
        def call(x):
            y = module(x.sin())
            with backnorm.arithmetic("float64"):
                y = module(y.cos())
            return module(y) * 2

        x = torch.randn(4, 3).bfloat16()
        for _ in range(2):
            with torch.no_grad():
                call(x)
            # Between two that are as they were.
            assert computed() == {("forward", "float64"), ("forward", "float32")}

    @pytest.mark.parametrize("wrong", ["float16", 1])
    def test_unknown_arithmetic_raises(self, wrong):
        @torch.compile(backend="eager")
        def call(x):
            return batch_norm(x, None, None, training=True, arithmetic=wrong)

        with pytest.raises(Exception, match=r"arithmetic: (unknown|must be a string)"):
            call(torch.randn(4, 3))

    @pytest.mark.parametrize("strict", [True, False])
    def test_exported_program_keeps_arithmetic(self, strict, tmp_path, computed):
        x = torch.randn(4, 3).bfloat16()
        with backnorm.arithmetic("float64"):
            program = torch.export.export(Model(torch.bfloat16), (x,), strict=strict)
        assert graph_arithmetics(program.graph) == {"float64"}
        torch.export.save(program, tmp_path / "program.pt2")
        module = torch.export.load(tmp_path / "program.pt2").module()
        forget()
        for name in ("float32", "float64"):
            with backnorm.arithmetic(name):
                module(x)
            assert computed() == {("forward", "float64")}
