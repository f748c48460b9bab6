"""Running statistics that `recompute_statistics` computes from a data set."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import nn

import backnorm.torch
from backnorm.errors import ArgumentValueError
from backnorm.torch import recompute_statistics

from . import recomputation_cases as cases


def batches_of(sizes, dtype=torch.float32, offset=100.0):
    return [(torch.randn(n, 3, 5) * n + offset).to(dtype) for n in sizes]


def statistics_of(batches, dtype):
    """Return exact mean and unbiased variance of (N, C, ...) batches, rounded to a type."""
    rows = torch.cat([each.transpose(0, 1).flatten(1) for each in batches], 1).double().tolist()
    found = []
    for row in rows:
        terms = list(map(Fraction, row))
        mean = sum(terms) / len(terms)
        variance = sum((term - mean) ** 2 for term in terms) / (len(terms) - 1)
        found.append((float(mean), float(variance)))
    return torch.tensor(found, dtype=torch.float64).to(dtype).T


def state(model):
    """Return what must not change: modes, hooks, momentum and buffers of all modules."""
    return [
        (
            module.training, len(module._forward_pre_hooks),
            getattr(module, "momentum", None), getattr(module, "track_running_stats", None),
            [buffer.tolist() for buffer in module.buffers()],
        )
        for module in model.modules()
    ]  # fmt: skip


@pytest.mark.parametrize("cls", [nn.BatchNorm1d, backnorm.torch.BatchNorm1d])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_statistics_are_those_of_all_elements_rounded_once(dtype, cls):
    batches = batches_of((4, 1, 7, 2), dtype)
    layer = cls(3, dtype=torch.float32 if dtype.itemsize == 2 else dtype)
    recompute_statistics(layer, batches)
    mean, variance = statistics_of(batches, layer.running_mean.dtype)
    assert torch.equal(layer.running_mean, mean)
    assert torch.equal(layer.running_var, variance)
    assert layer.num_batches_tracked == 0


def test_statistics_of_other_batches_of_the_same_elements_have_same_bits():
    batches = batches_of((4, 1, 7, 2), torch.float64, offset=1e4)
    one, other = (nn.BatchNorm1d(3, dtype=torch.float64) for _ in range(2))
    recompute_statistics(one, batches)
    recompute_statistics(other, torch.cat(batches[::-1]).split(5))
    assert torch.equal(one.running_mean, other.running_mean)
    assert torch.equal(one.running_var, other.running_var)


def test_statistics_of_more_elements_than_bins_hold_are_right(monkeypatch):
    # As if each batch came 2^28 times. An ordinary sum of digits would overflow.
    reduce = backnorm.torch.recomputation.engine_of(torch.empty(0)).reduce

    def repeated(*arguments):
        bins, count = reduce(*arguments)
        bins = bins.view(2, -1, bins.shape[1]).clone()
        bins[:, 1:] <<= 28
        return bins.flatten(0, 1), count << 28

    monkeypatch.setattr(backnorm.torch.cpu, "reduce", repeated)
    batches = [torch.full((5, 2), 0.99 * 2.0**32), torch.full((5, 2), 0.5)] * 8
    layer = nn.BatchNorm1d(2, dtype=torch.float64)
    recompute_statistics(layer, [batch.double() for batch in batches])
    one, other = batches[0][0, 0].double(), 0.5
    assert (layer.running_mean == (one + other) / 2).all()
    torch.testing.assert_close(layer.running_var, (one - other).square().expand(2) / 4)


def test_layer_behind_another_sees_values_normalised_by_their_batch_without_dropout():
    model = nn.Sequential(
        nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Conv1d(3, 4, 2), nn.ReLU(), nn.BatchNorm1d(4)
    )
    backnorm.torch.convert(model, fuse=True)
    batches = batches_of((4, 2, 6))
    with torch.no_grad():
        inner = [
            model[2](nn.functional.batch_norm(each, None, None, training=True)) for each in batches
        ]
    recompute_statistics(model, batches)
    inner = statistics_of([each.relu() for each in inner], torch.float32)
    torch.testing.assert_close(torch.stack((model[4].running_mean, model[4].running_var)), inner)


def test_forward_that_calls_eval_normalises_by_the_batch_all_the_same():
    models = [nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)) for _ in range(2)]
    batches = batches_of((4, 2))
    recompute_statistics(models[0], batches)
    recompute_statistics(models[1], batches, lambda batch: models[1].eval()(batch))
    assert models[1].training
    assert torch.equal(models[0][1].running_var, models[1][1].running_var)


def test_shared_layer_called_with_keyword_counts_all_calls():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = self.other = nn.BatchNorm1d(3)

        def forward(self, x):
            return self.layer(self.other(input=x) * 2 + 1)

    model, batches = Twice(), batches_of((4, 2))
    recompute_statistics(model, batches)
    inner = [nn.functional.batch_norm(x, None, None, training=True) * 2 + 1 for x in batches]
    mean, variance = statistics_of([*batches, *inner], torch.float32)
    torch.testing.assert_close(model.layer.running_mean, mean)
    torch.testing.assert_close(model.layer.running_var, variance)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: torch.compile(model, backend="eager"),
        lambda model: nn.Sequential(torch.compile(model, backend="eager")),
        nn.DataParallel,
    ],
    ids=["compiled", "compiled within", "DataParallel"],
)
def test_wrapped_model_has_statistics_of_plain_model(wrap):
    plain, model = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    wrapped, batches = wrap(model), batches_of((4, 2))
    wrapped(batches[0])
    for each in (plain, wrapped):
        recompute_statistics(each, batches)
    assert torch.equal(model.running_mean, plain.running_mean)
    assert torch.equal(model.running_var, plain.running_var)


def test_batches_of_tuples_and_user_forward_give_equal_statistics():
    batches = batches_of((4, 2))
    layers = [nn.BatchNorm1d(3) for _ in range(3)]
    recompute_statistics(layers[0], batches)
    recompute_statistics(layers[1], [(each, "label") for each in batches])
    named = ({"image": each} for each in batches)
    recompute_statistics(layers[2], named, lambda batch: layers[2](batch["image"]))
    assert torch.equal(layers[0].running_var, layers[1].running_var)
    assert torch.equal(layers[0].running_var, layers[2].running_var)


def test_elements_that_a_mask_does_not_count_are_in_no_sum():
    layer, lengths = backnorm.torch.BatchNorm1d(3), torch.tensor([2, 5, 0, 4])
    batches = batches_of((4, 4))
    batches[0][2] = torch.nan
    recompute_statistics(layer, batches, lambda batch: layer(batch, lengths=lengths))
    counted = [row[None, :, :n] for each in batches for row, n in zip(each, lengths, strict=True)]
    mean, variance = statistics_of([torch.cat(counted, 2)], torch.float32)
    assert torch.equal(layer.running_mean, mean)
    assert torch.equal(layer.running_var, variance)
    with pytest.raises(TypeError, match="mask"):
        recompute_statistics(layer, batches, lambda batch: layer(batch, mask=torch.ones(4, 5)))


def test_autocast_adds_up_inputs_in_16_bits():
    model = nn.Sequential(nn.Linear(5, 3), backnorm.torch.BatchNorm1d(3))
    inputs = [torch.randn(n, 5) for n in (4, 3)]
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        recompute_statistics(model, inputs)
        inner = [model[0](each) for each in inputs]
    assert inner[0].dtype is torch.bfloat16
    mean, variance = statistics_of(inner, torch.float32)
    assert torch.equal(model[1].running_mean, mean)
    assert torch.equal(model[1].running_var, variance)


def test_channel_with_infinite_element_becomes_nan_and_others_do_not():
    batches = batches_of((4, 2))
    batches[1][0, 1, 0] = torch.inf
    layer = nn.BatchNorm1d(3)
    recompute_statistics(layer, batches)
    assert layer.running_mean.isnan().tolist() == [False, True, False]
    assert layer.running_var.isnan().tolist() == [False, True, False]


class TestState:
    def model(self):
        model = nn.Sequential(
            nn.BatchNorm1d(3, momentum=None), nn.Dropout(), backnorm.torch.BatchNorm1d(3)
        )
        model(torch.randn(4, 3, 5))
        model[0].eval()
        model[0].register_forward_pre_hook(lambda *_: None)
        return model

    def test_exception_of_loader_leaves_model_as_it_was(self):
        def loader():
            yield torch.randn(4, 3, 5)
            raise KeyboardInterrupt

        model = self.model()
        before = state(model)
        with pytest.raises(KeyboardInterrupt):
            recompute_statistics(model, loader())
        assert state(model) == before

    def test_recomputation_changes_only_statistics(self):
        model = self.model()
        before = state(model)
        recompute_statistics(model, batches_of((4, 2)))
        assert (model[2].running_var - 1).abs().max() < 0.1
        after = state(model)
        assert [each[:-1] for each in after] == [each[:-1] for each in before]
        assert [layer.num_batches_tracked for layer in (model[0], model[2])] == [1, 1]

    def test_layer_that_is_not_called_is_left_with_warning(self):
        model = nn.ModuleDict({"used": nn.BatchNorm1d(3), "other": nn.BatchNorm1d(3)})
        with pytest.warns(UserWarning, match=r"not called: \['other'\]"):
            recompute_statistics(model, batches_of((4,)), model["used"])
        assert (model["other"].running_var == 1).all()
        assert (model["used"].running_var != 1).all()

    @pytest.mark.parametrize(
        ("model", "loader", "name"),
        [
            (nn.BatchNorm1d(3), [], "loader"),
            (nn.BatchNorm1d(3), [{"image": torch.ones(4, 3)}], "loader"),
            (nn.BatchNorm1d(3), [torch.ones(4, 3).double()], "input"),
            (nn.BatchNorm1d(3, track_running_stats=False), [torch.ones(4, 3)], "model"),
            ([torch.ones(4, 3)], nn.BatchNorm1d(3), "model"),
        ],
    )
    def test_wrong_argument_raises_error_naming_it(self, model, loader, name):
        with pytest.raises((ArgumentValueError, TypeError), match=f"^{name}"):
            recompute_statistics(model, loader)


def test_statistics_of_two_three_and_eight_processes_have_bits_of_one(processes):
    (found,) = processes(cases, 1)
    assert len(found) == sum(cases.SIZES)
    for each in found:
        for name, value in found[0].items():
            assert torch.equal(each[name], value), name
