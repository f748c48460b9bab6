"""PyTorch's tools for whole models accept converted ones: ONNX, fusing for inference."""

from __future__ import annotations

import copy
import io
import warnings

import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import nn
from torch.ao import quantization

import backnorm.torch
from backnorm.torch import convert, revert
from benchmarks.models import libraries

torchvision = libraries.torchvision()
layers = libraries.timm().layers


class Residual(nn.Module):
    """Layers without a ReLU, with one, and with an addition before it."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.relu, self.last = nn.ReLU(), nn.BatchNorm2d(4, affine=False)
        self.shortcut = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, momentum=0.3))

    def forward(self, x):
        return self.relu(self.last(self.relu(self.bn(self.conv(x)))) + self.shortcut(x))


MODELS = {
    "residual": (Residual, (4, 3, 5, 6)),
    "1d": (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh()), (5, 3)),
    "3d": (lambda: nn.Sequential(nn.BatchNorm3d(3), nn.ReLU()), (2, 3, 4, 2, 2)),
    "timm": (
        lambda: nn.Sequential(layers.BatchNormAct2d(3), layers.BatchNormAct2d(3, act_layer="silu")),
        (4, 3, 5, 6),
    ),
    "torchvision": (lambda: torchvision.ops.FrozenBatchNorm2d(3), (4, 3, 5, 6)),
}


def filled(net):
    for name, tensor in net.named_buffers():
        if tensor.is_floating_point():
            tensor.uniform_(0.5, 1.5) if "var" in name else tensor.normal_()
    return net


def exported(net, x, dynamo, **options):
    """Return the exported program's result by ONNX's reference implementation, and its nodes."""
    with warnings.catch_warnings():
        # The exporters warn of training and of their own deprecation.
        warnings.simplefilter("ignore")
        if dynamo:
            program = torch.onnx.export(net, (x,), dynamo=True, verbose=False, **options)
            model = program.model_proto
        else:
            stream = io.BytesIO()
            training = torch.onnx.TrainingMode.PRESERVE
            torch.onnx.export(net, (x,), stream, dynamo=False, training=training, **options)
            model = onnx.load_from_string(stream.getvalue())
    onnx.checker.check_model(model)
    evaluator = ReferenceEvaluator(model)
    result = evaluator.run(None, {evaluator.input_names[0]: x.numpy()})
    return torch.from_numpy(result[0]), sorted(node.op_type for node in model.graph.node)


@pytest.mark.long
@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize(
    "name",
    ["residual", *(pytest.param(name, marks=pytest.mark.sweep) for name in [*MODELS][1:])],
)
def test_onnx_program_of_converted_model_matches_unconverted_model(name, training, dynamo, close):
    make, shape = MODELS[name]
    theirs = filled(make()).train(training)
    x = torch.randn(shape)
    expected, nodes = exported(copy.deepcopy(theirs), x, dynamo)
    for fuse in (False, True):
        mine = convert(copy.deepcopy(theirs), fuse=fuse)
        result, ours = exported(mine, x, dynamo)
        close(result, expected)
        # torchvision writes a formula where the converted frozen layer is one operator.
        assert ours == nodes or name == "torchvision"
        # The export does not change the model.
        assert mine.training is training
        close(mine(x), copy.deepcopy(theirs)(x), factor=4)


@pytest.mark.long
def test_onnx_program_of_dynamic_batch_matches_unconverted_model(close):
    theirs = filled(Residual()).eval()
    mine = convert(copy.deepcopy(theirs), fuse=True)
    shapes = ({0: torch.export.Dim("batch", min=2)},)
    x = torch.randn(4, 3, 5, 6)
    results = [
        exported(net, x, True, dynamic_shapes=shapes) for net in (mine, copy.deepcopy(theirs))
    ]
    close(*(result for result, _ in results))


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("qat", [False, True])
def test_fuse_modules_before_revert_raises_and_after_it_fuses(qat, fuse, close):
    theirs = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
    theirs = filled(theirs).train(qat)
    mine = convert(copy.deepcopy(theirs), fuse=fuse)
    function = quantization.fuse_modules_qat if qat else quantization.fuse_modules
    for names in (["0", "1"], ["1", "2"], ["0", "1", "2"]):
        with pytest.raises(AssertionError, match=r"did not find fuser method .*BatchNorm2d"):
            function(mine, names)
    x = torch.randn(4, 3, 5, 6)
    expected, result = (function(net, ["0", "1", "2"]) for net in (theirs, revert(mine)))
    assert [type(each) for each in result] == [type(each) for each in expected]
    close(result(x), expected(x), factor=4)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_layer_with_quantised_input_raises_unsupported_tensor_error(training, fuse):
    """`prepare` and `convert` leave the layer as it is, after a convolution that is quantised."""
    net = nn.Sequential(quantization.QuantStub(), nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
    mine = convert(net.train(training), fuse=fuse)
    backend = torch.backends.quantized.engine
    x = torch.randn(4, 3, 5, 6)
    with warnings.catch_warnings():
        # PyTorch announces the removal of its quantisation of modules.
        warnings.simplefilter("ignore")
        if training:
            mine.qconfig = quantization.get_default_qat_qconfig(backend)
            prepared = quantization.prepare_qat(mine)
        else:
            mine.qconfig = quantization.get_default_qconfig(backend)
            prepared = quantization.prepare(mine)
        prepared(x)
        quantised = quantization.convert(prepared.eval())
    with pytest.raises(backnorm.torch.UnsupportedTensorError, match=r"^input: .*quint8"):
        quantised(x)


def test_fuse_bn_eval_of_converted_layer_matches_pytorch(close):
    conv, linear = nn.Conv2d(3, 4, 1).eval(), nn.Linear(3, 4).eval()
    for layer, norm, function, x in (
        (conv, nn.BatchNorm2d(4), nn.utils.fusion.fuse_conv_bn_eval, torch.randn(4, 3, 5, 6)),
        (linear, nn.BatchNorm1d(4), nn.utils.fusion.fuse_linear_bn_eval, torch.randn(4, 3)),
    ):
        theirs = filled(norm).eval()
        mine = convert(copy.deepcopy(theirs))
        close(function(layer, mine)(x), function(layer, theirs)(x))
        assert type(function(layer, mine)) is type(layer)
        assert type(mine) is getattr(backnorm.torch, type(norm).__name__)
        assert type(revert(mine)) is type(norm)
