"""Tools that recognise layers by class: passes of torch.fx, and Opacus' validator."""

from __future__ import annotations

import copy
import pickle
import sys
import types
import warnings

import pytest
import torch
from torch import nn

import backnorm.torch
from backnorm.torch import UnrecognisedLayerWarning, convert, revert


def network():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_fx_fuse_warns_for_converted_model_and_folds_reverted_model(close):
    from torch.fx.experimental import optimization

    theirs = network().eval()
    mine = convert(copy.deepcopy(theirs))
    with pytest.warns(UnrecognisedLayerWarning, match=r"backnorm\.torch\.revert\(model\)"):
        left = optimization.fuse(mine)
    x = torch.randn(2, 3, 6, 6)
    close(left(x), theirs(x))
    folded = optimization.fuse(revert(mine))
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    close(folded(x), theirs(x))


def test_tracing_in_training_does_not_warn():
    # The suite turns warnings into errors.
    torch.fx.symbolic_trace(convert(network()))


def test_tracer_of_other_library_does_not_warn():
    class Other(torch.fx.Tracer):
        pass

    Other().trace(convert(network()).eval())


def test_unrecognised_layer_warning_is_shown_once_by_default():
    model = convert(network()).eval()
    with warnings.catch_warnings(record=True) as shown:
        warnings.resetwarnings()
        for _ in range(3):
            torch.fx.symbolic_trace(model)
    assert [warning.category for warning in shown] == [UnrecognisedLayerWarning]


@pytest.fixture
def opacus(monkeypatch):
    """Return a function that imports a stand-in for Opacus, with the parts that backnorm uses."""
    theirs = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm

    def fix(module, groups=1):
        return nn.GroupNorm(groups, module.num_features)

    class ModuleValidator:
        VALIDATORS = dict.fromkeys(theirs, lambda module: ["mixes samples"])
        FIXERS = dict.fromkeys(theirs, fix)

    def imported():
        validators = types.SimpleNamespace(ModuleValidator=ModuleValidator)
        monkeypatch.setitem(sys.modules, "opacus.validators", validators)
        return types.SimpleNamespace(validators=validators)

    return imported


def validated(opacus, model):
    validators = opacus.validators.ModuleValidator.VALIDATORS
    modules = [module for module in model.modules() if type(module) in validators]
    return [error for module in modules for error in validators[type(module)](module)]


@pytest.mark.parametrize("options", [{}, {"fuse": True}, {"sync": True}], ids=str)
def test_validator_of_opacus_rejects_converted_model(options, opacus):
    opacus = opacus()
    assert validated(opacus, convert(network(), **options)) == ["mixes samples"]


@pytest.mark.parametrize("name", ["BatchNorm1d", "LazyBatchNorm2d", "BatchNormReLU3d"])
def test_validator_of_opacus_rejects_new_layer(name, opacus):
    opacus = opacus()
    cls = getattr(backnorm.torch, name)
    assert validated(opacus, cls() if "Lazy" in name else cls(3)) == ["mixes samples"]


def test_fixer_of_opacus_replaces_layer_without_own_activation(opacus):
    fixers = opacus().validators.ModuleValidator.FIXERS
    layer = convert(nn.BatchNorm2d(6))
    fixed = fixers[type(layer)](layer, groups=3)
    assert (type(fixed), fixed.num_groups, fixed.num_channels) == (nn.GroupNorm, 3, 6)
    # The activation of a fused module stays behind the replacement.
    layer = convert(network(), fuse=True)[1]
    fixed = fixers[type(layer)](layer)
    assert [type(module) for module in fixed] == [nn.GroupNorm, nn.ReLU]
    # The fixer would drop the activation.
    for layer in (
        backnorm.torch.BatchNormReLU2d(6),
        backnorm.torch.BatchNorm2d(6, activation="silu"),
    ):
        assert fixers[type(layer)](layer) is layer


def test_validator_of_user_is_kept(opacus):
    opacus = opacus()
    validators = opacus.validators.ModuleValidator.VALIDATORS
    validators[backnorm.torch.BatchNorm2d] = lambda module: ["own"]
    assert validated(opacus, convert(network())) == ["own"]


DUPLICATES = {
    "converted again": convert,
    "copied": copy.deepcopy,
    "unpickled": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("duplicate", DUPLICATES)
def test_validator_of_opacus_rejects_model_made_before_import(duplicate, opacus):
    model = convert(network())
    opacus = opacus()
    assert validated(opacus, DUPLICATES[duplicate](model)) == ["mixes samples"]


def test_opacus_itself_rejects_and_fixes_converted_model():
    validators = pytest.importorskip("opacus.validators")
    from opacus.grad_sample import GradSampleModule

    model = convert(network())
    assert len(validators.ModuleValidator.validate(model)) == 1
    fixed = validators.ModuleValidator.fix(model)
    assert type(fixed[1]) is nn.GroupNorm
    assert GradSampleModule(fixed)(torch.randn(4, 3, 6, 6)).min() == 0
