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


def warned(call):
    """Return how many warnings of ours `call` gives, each shown."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    return sum(each.category is UnrecognisedLayerWarning for each in seen)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_folding_by_class_warns_and_a_reverted_model_is_folded(close):
    from torch.fx.experimental import optimization

    theirs = network().eval()
    mine = convert(copy.deepcopy(theirs))
    with pytest.warns(UnrecognisedLayerWarning, match=r"backnorm\.torch\.revert\(model\)"):
        left = optimization.fuse(mine)
    x = torch.randn(2, 3, 6, 6)
    close(left(x), theirs(x))
    folded = optimization.fuse(revert(mine))
    assert not any(isinstance(each, nn.BatchNorm2d) for each in folded.modules())
    close(folded(x), theirs(x))


def test_tracing_in_training_does_not_warn():
    assert warned(lambda: torch.fx.symbolic_trace(convert(network()))) == 0


def test_tracers_of_other_libraries_do_not_warn():
    class Other(torch.fx.Tracer):
        pass

    assert warned(lambda: Other().trace(convert(network()).eval())) == 0


def test_pythons_default_filter_shows_the_warning_once():
    model = convert(network()).eval()
    with warnings.catch_warnings(record=True) as seen:
        warnings.resetwarnings()
        for _ in range(3):
            torch.fx.symbolic_trace(model)
    assert [each.category for each in seen] == [UnrecognisedLayerWarning]


@pytest.fixture
def opacus(monkeypatch):
    """Return the part of Opacus that is used, as its documentation has it."""

    class ModuleValidator:
        VALIDATORS, FIXERS = {}, {}

    def registration(registry):
        def register(classes):
            def decorator(function):
                registry.update(dict.fromkeys(classes, function))
                return function

            return decorator

        return register

    class AbstractGradSampleHooks:
        def capture(self, module, inputs, output):
            pass

    package, validators, samples = (types.ModuleType(name) for name in ("o", "v", "s"))
    validators.ModuleValidator = ModuleValidator
    validators.register_module_validator = registration(ModuleValidator.VALIDATORS)
    validators.register_module_fixer = registration(ModuleValidator.FIXERS)
    samples.AbstractGradSampleHooks = AbstractGradSampleHooks
    theirs = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm]
    validators.register_module_validator(theirs)(lambda module: ["mixes samples"])
    validators.register_module_fixer(theirs)(
        lambda module, groups=1: nn.GroupNorm(groups, module.num_features)
    )

    def imported():
        monkeypatch.setitem(sys.modules, "opacus", package)
        monkeypatch.setitem(sys.modules, "opacus.validators", validators)
        monkeypatch.setitem(sys.modules, "opacus.grad_sample", samples)
        return types.SimpleNamespace(validators=validators, grad_sample=samples)

    return imported


def validated(opacus, model):
    known = opacus.validators.ModuleValidator.VALIDATORS
    return [
        error for each in model.modules() for error in known.get(type(each), lambda _: [])(each)
    ]


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
def test_opacus_refuses_a_converted_model_as_it_does_the_model_before(fuse, sync, opacus):
    opacus = opacus()
    model = convert(network(), fuse=fuse, sync=sync)
    assert validated(opacus, model) == ["mixes samples"]


@pytest.mark.parametrize("name", ["BatchNorm1d", "LazyBatchNorm2d", "BatchNormReLU3d"])
def test_opacus_refuses_a_layer_of_ours(name, opacus):
    opacus = opacus()
    cls = getattr(backnorm.torch, name)
    layer = cls() if "Lazy" in name else cls(3)
    assert validated(opacus, layer) == ["mixes samples"]


def test_the_fixer_of_opacus_replaces_a_layer_that_stands_for_pytorchs(opacus):
    fixers = opacus().validators.ModuleValidator.FIXERS
    layer = convert(nn.BatchNorm2d(6))
    fixed = fixers[type(layer)](layer, groups=3)
    assert (type(fixed), fixed.num_groups, fixed.num_channels) == (nn.GroupNorm, 3, 6)
    # Without its ReLU it would be another layer.
    with_relu = backnorm.torch.BatchNormReLU2d(6)
    assert fixers[type(with_relu)](with_relu) is with_relu


def test_a_validator_of_the_users_stays(opacus):
    opacus = opacus()
    opacus.validators.register_module_validator([backnorm.torch.BatchNorm2d])(lambda _: ["own"])
    assert validated(opacus, convert(network())) == ["own"]


@pytest.mark.parametrize(
    "way", [lambda model: model, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_a_model_that_was_made_before_opacus_was_imported_is_refused_in_training(way, opacus):
    model = convert(network())
    opacus = opacus()
    model = way(model)
    assert validated(opacus, model) == []
    model[1].register_forward_hook(opacus.grad_sample.AbstractGradSampleHooks().capture)
    x = torch.randn(4, 3, 6, 6)
    # It mixes no samples in evaluation.
    model.eval()(x)
    with pytest.raises(backnorm.BacknormError, match="mixes samples in training"):
        model.train()(x)
    # It is the validator's from now on.
    assert validated(opacus, model) == ["mixes samples"]
    model(x)


def test_other_hooks_are_not_refused(opacus):
    model = convert(network())
    opacus()
    model[1].register_forward_hook(lambda *_: None)
    model(torch.randn(4, 3, 6, 6))


def test_the_real_opacus():
    validators = pytest.importorskip("opacus.validators")
    from opacus.grad_sample import GradSampleModule

    model = convert(network())
    assert len(validators.ModuleValidator.validate(model)) == 1
    fixed = validators.ModuleValidator.fix(model)
    assert type(fixed[1]) is nn.GroupNorm
    assert GradSampleModule(fixed)(torch.randn(4, 3, 6, 6)).min() == 0
