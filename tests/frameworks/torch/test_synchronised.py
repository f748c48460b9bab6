"""Batch normalisation over several processes: gloo on this machine, as on any number of them."""

from __future__ import annotations

import copy
import pickle
import re
import warnings

import pytest
import torch
from torch import nn

import backnorm
import backnorm.torch
from backnorm.torch import ConversionWarning, SyncBatchNorm, convert, revert

from . import synchronised_cases as cases


@pytest.fixture(scope="module")
def parts(processes):
    return processes(cases, 4, "parts")


def _whole(name, found):
    """Return what all processes of a case have, put together."""
    each = [one[name] for one in found[: len((cases.CASES | cases.EIGHT)[name].parts)]]
    whole = {}
    for key in each[0]:
        values = [one[key] for one in each]
        if key in ("y", "dx"):
            whole[key] = torch.cat(values)
        elif key in ("dweight", "dbias"):
            whole[key] = torch.stack([value.double() for value in values]).sum(0)
        else:
            # The same bits everywhere.
            assert all(torch.equal(value, values[0]) for value in values), key
            whole[key] = values[0]
    return whole


def _steps_apart(one, other):
    """Return how many values of their type lie between two tensors at most."""
    kind = {8: torch.int64, 4: torch.int32, 2: torch.int16}[one.element_size()]
    bits = []
    for each in (one, other):
        whole = each.contiguous().view(kind).long()
        least = torch.iinfo(kind).min
        bits.append(torch.where(whole < 0, least - whole, whole))
    return int((bits[0] - bits[1]).abs().max()) if one.numel() else 0


@pytest.mark.parametrize("name", cases.CASES)
def test_sync_batch_norm_of_parts_matches_one_process(name, parts):
    case = cases.CASES[name]
    if not sum(case.parts):
        for one in parts[: len(case.parts)]:
            assert one[name]["y"].shape == (0, cases.CHANNELS, *case.space)
            assert torch.equal(one[name]["mean"], torch.zeros(cases.CHANNELS))
            assert torch.equal(one[name]["variance"], torch.ones(cases.CHANNELS))
            assert not one[name]["dweight"].any()
        return
    check_parts(name, case, parts)


@pytest.mark.long
def test_sync_batch_norm_of_eight_parts_with_mask_matches_one_process(processes):
    found = processes(cases, 8, "eight")
    for name, case in cases.EIGHT.items():
        check_parts(name, case, found)


def check_parts(name, case, parts):
    found, expected = _whole(name, parts), cases.alone(name)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if case.reproducible:
            # Those of parameters are the first process's alone.
            wanted = value.double() if key in ("dweight", "dbias") else value
            assert torch.equal(found[key], wanted), key
        elif key in ("dweight", "dbias"):
            # Of each part rounded once, added up here.
            scale = value.double().abs().max()
            allowed = len(case.parts) * torch.finfo(value.dtype).eps * (scale + 10)
            torch.testing.assert_close(
                found[key], value.double(), rtol=0, atol=float(allowed), msg=key
            )
        elif case.arithmetic == "float64" and case.dtype is not torch.float64:
            # Each is the exact value rounded once, except near ties.
            assert _steps_apart(found[key], value) <= 1, key
            same = (found[key] == value).double().mean()
            assert same > 0.99, (key, same)
        else:
            eps = torch.finfo(value.dtype).eps
            torch.testing.assert_close(found[key], value, rtol=16 * eps, atol=16 * eps, msg=key)


def test_batched_gradients_equal_single_gradients(parts):
    for one in parts[:2]:
        for at_once, each in one["batched"]:
            for found, expected in zip(at_once, each, strict=True):
                assert torch.equal(found, expected)


def test_backward_with_process_without_gradient_matches_pytorch(parts):
    for one in parts[:2]:
        expected, found = one["no gradient"]
        assert expected.abs().max() > 0.01
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize(
    ("name", "own", "other"),
    [
        ("in another order", "layer '0', 4 channels", "layer '1', 4 channels"),
        ("reproducible", "reproducible=False", "reproducible=True"),
        ("channels", "4 channels", "5 channels"),
        ("activation", "layer '0', relu, 4 channels", "layer '0', 4 channels"),
        (
            "forward and backward",
            "layer '0', 4 channels, backward",
            "layer '1', 4 channels, forward",
        ),
        ("without names", "SyncBatchNorm layer (number", "SyncBatchNorm layer (number"),
    ],
)
def test_processes_of_different_layers_or_settings_raise(name, own, other, gathered, parts):
    check_disagreement((name, gathered), own, other, parts)


@pytest.mark.long
def test_processes_of_different_compiled_layers_raise(processes):
    found = processes(cases, 2, "compiled")
    for gathered in (True, False):
        names = "layer '0', 4 channels", "layer '1', 4 channels"
        check_disagreement(("compiled", gathered), *names, found)


def check_disagreement(key, own, other, parts):
    for rank, (expected, came) in enumerate(((own, other), (other, own))):
        said = parts[rank]["disagreements"][key]
        assert re.search(f"got .*{re.escape(came)}.* from rank {1 - rank}", said)
        assert re.search(f"expected .*{re.escape(expected)}.*rank {rank} of 2", said)


@pytest.fixture(scope="module")
def models(processes):
    return processes(cases, 2, "models")


@pytest.mark.long
@pytest.mark.parametrize("kind", cases.KINDS)
def test_training_in_two_processes_matches_one_process(kind, models):
    expected = cases.trained_alone(kind, 2)
    one, other = (found[kind] for found in models)
    assert one.keys() == other.keys() == expected.keys()
    tolerance = 3e-2 if "bfloat16" in kind else 2e-5
    for name, value in expected.items():
        assert torch.equal(one[name], other[name]), name
        if "recomputed" in kind and ("running" in name or "tracked" in name):
            # They move twice, as with PyTorch's layers.
            continue
        torch.testing.assert_close(one[name], value, rtol=tolerance, atol=tolerance, msg=name)


# Two processes each.
@pytest.mark.long
@pytest.mark.parametrize("when", ["backward", "before", "between", "left out"])
def test_sync_batch_norm_with_missing_process_raises_error_of_layer(when, processes):
    (found,) = processes(cases, 2, f"ends {when}")
    layer = "layer '3'" if when in ("backward", "between") else "layer"
    assert layer in found["said"]
    assert "rank 0 of 2" in found["said"]
    assert found["seconds"] < 30


class TestConversion:
    def model(self):
        return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Linear(4, 2))

    def test_convert_with_sync_synchronises_layer_and_revert_restores_it(self):
        model = self.model()
        layer, state = model[1], copy.deepcopy(model.state_dict())
        convert(model, sync=True)
        assert type(layer) is SyncBatchNorm
        assert layer.name == "layer '1'"
        assert "name" not in repr(layer)
        model.load_state_dict(state)
        revert(model)
        assert type(layer) is nn.BatchNorm2d
        assert not {"process_group", "name", "_class_before_sync"} & vars(layer).keys()

    def test_convert_replaces_pytorch_sync_batch_norm_and_revert_restores_it(self):
        theirs = nn.SyncBatchNorm.convert_sync_batchnorm(self.model())
        state = copy.deepcopy(theirs.state_dict())
        theirs[1].process_group = "mine"
        convert(theirs)
        assert type(theirs[1]) is SyncBatchNorm
        assert theirs[1].process_group == "mine"
        theirs.load_state_dict(state)
        revert(theirs)
        assert type(theirs[1]) is nn.SyncBatchNorm
        assert theirs[1].process_group == "mine"

    def test_sync_batch_norm_in_one_process_equals_batch_norm_2d(self):
        x = torch.randn(4, 4, 5, 5)
        layer, plain = SyncBatchNorm(4), backnorm.torch.BatchNorm2d(4)
        for _ in range(2):
            assert torch.equal(layer(x), plain(x))
        assert torch.equal(layer.running_var, plain.running_var)
        layer.eval(), plain.eval()
        assert torch.equal(layer(x), plain(x))
        with pytest.raises(ValueError, match=r"got shape \(4,\); expected 2 axes or more"):
            layer(torch.zeros(4))

    def test_synchronised_layer_keeps_class_after_copy_or_pickle(self):
        layer = convert(self.model(), sync=True)
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert type(other[1]) is SyncBatchNorm
            assert type(revert(other)[1]) is nn.BatchNorm2d

    def test_convert_with_sync_warns_of_layers_that_stay_unsynchronised(self):
        model = nn.Sequential(nn.BatchNorm1d(3), nn.LazyBatchNorm2d())
        with pytest.warns(ConversionWarning, match=r"not synchronised.*\n  1: .*LazyBatchNorm2d"):
            convert(model, sync=True)
        assert type(model[0]) is SyncBatchNorm

    def test_convert_rejects_process_group_without_sync_and_non_bool_sync(self):
        with pytest.raises(backnorm.ArgumentValueError, match="process_group"):
            convert(self.model(), process_group=object())
        with pytest.raises(backnorm.ArgumentTypeError, match="sync"):
            convert(self.model(), sync="yes")

    def test_convert_of_synchronised_model_keeps_class_and_sets_arithmetic(self):
        model = convert(self.model(), sync=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            convert(model, sync=True, arithmetic="float64")
        assert type(model[1]) is SyncBatchNorm
        assert model[1].arithmetic == "float64"
