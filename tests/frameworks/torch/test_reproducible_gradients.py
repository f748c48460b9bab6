"""Gradients with the same bits however a batch is split: sums, micro-batches, and training."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import pickle
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import backnorm
import backnorm.torch
from backnorm.torch import ReproducibleGradients
from backnorm.torch.reproducible_gradients import exact_sums
from backnorm.torch.reproducible_gradients.exact_sums import Part

from . import gradient_cases as cases

DTYPES = torch.float32, torch.float64, torch.float16, torch.bfloat16


def have_same_bits(first, second):
    """Whether tensors, in dicts of one structure, have the same bits; NaN equals NaN."""
    if isinstance(first, dict):
        same = [have_same_bits(first[key], second[key]) for key in first]
        return first.keys() == second.keys() and all(same)
    return torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)


def added(processes, divisor=1.0):
    """Return the sum of the terms of processes, computed as `sum_of_all` does."""
    every = [[Part(0, each.clone()) for each in terms] for terms in processes]
    own = every[0][0].values
    exponents = torch.stack([exact_sums.largest_exponents(each, own) for each in every]).amax(0)
    sums = sum(exact_sums.rounded_sums(each, exponents, own) for each in every)
    return exact_sums.store_sums(own, sums, divisor)


def exact_column_sums(terms):
    return [sum(map(Fraction, column)) for column in terms.T.tolist()]


def random_terms(dtype, count=12, size=400):
    """Return terms of many magnitudes, some of which cancel."""
    found = torch.randn(count, size, dtype=torch.float64)
    if dtype is not torch.float16:
        # Plain sums in float64 would round these, which shows where terms cancel.
        found *= 2.0 ** torch.randint(-30, 30, found.shape)
        found[0, : size // 4] *= 2.0**30
    found[1, : size // 4] = -found[0, : size // 4]
    # Down to subnormal numbers and zero.
    least = math.log2(torch.finfo(dtype).smallest_normal)
    found[:, size // 2 :] *= 2.0 ** torch.linspace(0, least - 4, size - size // 2).double().floor()
    return found.to(dtype)


class TestSums:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_sum_in_any_order_and_split_has_same_bits(self, dtype):
        terms = random_terms(dtype)
        expected = added([terms])
        for sizes in ((1,) * 12, (6, 6), (1, 10, 1)):
            shuffled = terms[torch.randperm(len(terms))]
            assert have_same_bits(added(shuffled.split(sizes)), expected)
        plain = [functools.reduce(torch.add, terms[torch.randperm(len(terms))]) for _ in range(2)]
        assert not have_same_bits(*plain), "these terms would not show a sum that rounds"

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("divisor", [1, 4, 3])
    def test_sum_of_many_magnitudes_is_within_documented_error(self, dtype, divisor):
        terms, info = random_terms(dtype), torch.finfo(dtype)
        is_double = dtype is torch.float64
        # float64 terms below the first number count as zero; 16-bit sums are rounded to float32.
        least = Fraction(2) ** (-1042 if is_double else -1074)
        # The division by 3 rounds in float64.
        division = 1 if is_double and divisor == 3 else Fraction(1, 2**12)
        unit = Fraction(info.eps) / 2 * (1 + division)
        largest = terms.double().abs().amax(0).tolist()
        sums = added(terms.split(4), divisor).tolist()
        for value, exact, most in zip(sums, exact_column_sums(terms), largest, strict=True):
            error = len(terms) * (Fraction(most) / 2 ** (80 if is_double else 40) + least)
            rounding = max(abs(exact) / divisor, Fraction(info.smallest_normal)) * unit
            assert abs(Fraction(value) - exact / divisor) <= error + rounding + error * unit

    def test_sum_of_40_bits_rounds_once(self):
        terms = torch.randint(-(2**24), 2**24, (12, 500)) * 2.0 ** torch.randint(0, 15, (500,))
        exact = [float(each) / 2 for each in exact_column_sums(terms)]
        assert added(terms.split(3), 2.0).tolist() == torch.tensor(exact).tolist()

    def test_sum_of_max_terms_is_exact(self):
        terms = torch.randint(2**23, 2**24, (exact_sums.MAX_TERMS, 5)).float()
        terms[::3] *= 2.0**-16
        parts, own = [Part(0, each) for each in terms], terms[0]
        sums = exact_sums.rounded_sums(parts, exact_sums.largest_exponents(parts, own), own)
        assert sums[0].tolist() == exact_column_sums(terms)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_sum_of_infinities_nan_and_largest_numbers_equals_expected_value(self, dtype):
        inf, nan, most = torch.inf, torch.nan, torch.finfo(dtype).max
        rows = [
            ([1, inf, 2], inf), ([-inf, 1, 1], -inf), ([inf, -inf, 1], nan), ([nan, 1, inf], nan),
            ([most, most, -most], most), ([most, most, 0], inf), ([-most, -most, 0], -inf),
            ([most, inf, -most], inf), ([0.0, -0.0, 0], 0),
            # 1 is less than a quantum of the largest, but for float16.
            ([most, 1, -most], 1 if dtype is torch.float16 else 0),
        ]  # fmt: skip
        terms = torch.tensor([row for row, _ in rows], dtype=dtype).T
        expected = torch.tensor([total for _, total in rows], dtype=dtype)
        for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
            assert have_same_bits(added(terms[order].split(1)), expected)
            assert have_same_bits(added([terms[order]]), expected)
        assert added(terms[:2, 4:6].split(1), 2).tolist() == [most, most], "the mean is finite"

    def test_sum_of_several_blocks_equals_sums_of_smaller_pieces(self):
        terms = random_terms(torch.float32, 3, 2 * exact_sums._BLOCK + 100)
        expected = torch.cat([added([each]) for each in terms.split(1000, 1)])
        assert have_same_bits(added([terms]), expected)


@pytest.fixture(scope="module")
def results(processes):
    return processes(cases, 4, "networks, orders, errors, counts")


def states(results, run, name):
    """Return the trained states of a network in all processes of all groups."""
    return [state for process in results for state in process[run][name].values()]


class TestTraining:
    @pytest.mark.long
    @pytest.mark.parametrize("name", [name for name in cases.CASES if "without" not in name])
    def test_training_on_any_number_of_processes_has_same_bits(self, name, results):
        first, *others = states(results, "networks", name)
        assert 1 + len(others) == sum(map(len, cases.CASES[name].parts))
        assert all(have_same_bits(first, other) for other in others)

    @pytest.mark.long
    @pytest.mark.parametrize("name", ["without micro-batches", "without hook"])
    def test_training_without_micro_batches_or_hook_has_different_bits(self, name, results):
        first, *others = states(results, "networks", name)
        assert any(not have_same_bits(first, other) for other in others)

    @pytest.mark.sweep
    def test_training_of_200_steps_with_reproducible_layers_has_same_bits(self, processes):
        results = processes(cases, 4, "long")
        first, *others = states(results, "long", "200 steps")
        assert len(others) == 2 + 3 + 4
        assert all(have_same_bits(first, other) for other in others)
        first, *others = states(results, "long", "other layers")
        assert any(not have_same_bits(first, other) for other in others)

    @pytest.mark.long
    @pytest.mark.parametrize("name", ["uneven parts", "averaged", "modules by themselves"])
    def test_training_matches_training_without_hook_within_rounding(self, name, results):
        expected = results[0]["networks"]["without hook"][1]
        found = results[0]["networks"][name][1]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class TestHook:
    @pytest.mark.long
    def test_hook_average_in_different_process_orders_has_same_bits(self, results):
        expected = results[0]["orders"]["hook"][0].expand(3, -1)
        assert all(have_same_bits(each["orders"]["hook"], expected) for each in results)
        first, *others = results[0]["orders"]["none"]
        assert any(not have_same_bits(first, other) for other in others)
        inf, nan = torch.inf, torch.nan
        assert have_same_bits(expected[0, 600:604], torch.tensor([inf, nan, nan, 3e38]))
        every = cases.gradients().double()
        finite, mean = every.isfinite().all(0), every.mean(0)
        error = every.abs().amax(0) * 2.0**-40 + mean.abs() * 2.0**-24 + 2.0**-149
        assert ((expected[0] - mean).abs() <= error)[finite].all()

    @pytest.mark.long
    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("outside", "not computed in micro-batches, of 'linear.weight', 'linear.bias'"),
            ("too many", "up to 8196 gradients to add; expected at most 8192"),
            ("state", "state: must be None, a ProcessGroup or Repro.*'a state'"),
            ("sparse", r"of shape \(10, 4\) are not dense; got torch.sparse_coo"),
        ],
    )
    def test_hook_raises_in_every_process(self, name, words, results):
        assert all(re.search(words, each["errors"][name]) for each in results)

    @pytest.mark.long
    def test_sum_of_all_adds_8192_terms_and_raises_for_more(self, results):
        for each in results:
            assert len(each["counts"]) == 8
            for (_, most), (found, expected) in each["counts"].items():
                if most > 8192:
                    assert "up to 8196 gradients to add; expected at most 8192" in found
                else:
                    assert found == expected


@dataclasses.dataclass
class Batch:
    x: torch.Tensor


class WithOption(nn.Module):
    """Takes a value besides samples."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x, option=None):
        self.option = option
        return self.linear(x)


def small_model():
    layers = nn.Conv2d(1, 3, 3), nn.SiLU(), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(108, 2)
    return nn.Sequential(*layers)


def gradients_kept(gradients):
    return [each for found in gradients._gradients.values() for each in found]


class TestMicroBatches:
    def test_micro_batches_match_outputs_and_input_gradients_of_module(self):
        model, x = small_model(), torch.randn(8, 1, 8, 8, requires_grad=True)
        expected = model(x)
        (dx,) = torch.autograd.grad(expected.sin().sum(), x)
        with ReproducibleGradients(model, 4) as gradients:
            y = model(x)
            torch.testing.assert_close(y, expected)
            torch.testing.assert_close(torch.autograd.grad(y.sin().sum(), x), (dx,))
        assert not gradients_kept(gradients)

    def test_reproducible_gradients_keeps_parameters_and_remove_restores_forwards(self):
        model, calls = small_model(), []
        own = model[4].forward
        model[4].forward = replaced = lambda x: own(x) + 1
        parameters, state = [*model.named_parameters()], copy.deepcopy(model.state_dict())
        model[0].register_forward_hook(lambda *_: calls.append(1))
        x = torch.randn(8, 1, 8, 8)
        expected = model(x)
        gradients = ReproducibleGradients(model, 2)
        for before, after in zip(parameters, model.named_parameters(), strict=True):
            assert before[0] == after[0]
            assert before[1] is after[1]
        model.load_state_dict(state)
        torch.testing.assert_close(model(x), expected)
        assert calls == [1, 1], "a hook has the whole batch"
        gradients.remove()
        assert [vars(each).get("forward") for each in model] == [None] * 4 + [replaced]
        gradients.remove()

    def test_copied_modules_do_not_add_to_gradients_of_original(self):
        model = small_model()
        gradients = ReproducibleGradients(model, 2)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            other(torch.randn(4, 1, 8, 8)).sin().sum().backward()
            assert not gradients_kept(gradients)
            assert other[0].forward.module is other[0]

    @pytest.mark.parametrize("is_nested", [False, True])
    def test_shared_module_keeps_gradients_and_remove_restores_forward(self, is_nested):
        shared, x, dy = nn.Linear(3, 3), torch.randn(4, 3), torch.randn(4, 3)
        second = nn.Tanh() if is_nested else nn.BatchNorm1d(3)
        blocks = nn.Sequential(shared, nn.BatchNorm1d(3)), nn.Sequential(shared, second)
        model = nn.Sequential(*blocks)
        (expected,) = torch.autograd.grad(model(x), shared.weight, dy)
        gradients = ReproducibleGradients(model, 2)
        model(x).backward(dy)
        torch.testing.assert_close(sum(gradients._gradients[shared.weight]), expected)
        gradients.remove()
        assert not any("forward" in vars(each) for each in model.modules())

    def test_discard_removes_kept_gradients(self):
        linear = nn.Linear(2, 2)
        gradients = ReproducibleGradients(linear, 1)
        linear(torch.randn(3, 2)).sin().sum().backward()
        assert [len(each) for each in gradients._gradients.values()] == [3, 3]
        assert not linear.weight.grad.any()
        gradients.discard()
        assert not gradients_kept(gradients)

    def test_forward_after_step_without_hook_raises_value_error(self):
        model, x = small_model(), torch.randn(4, 1, 8, 8)
        gradients = ReproducibleGradients(model, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.1)
        for _ in range(2):
            # Gradients of several backward passes may be kept.
            model(x).sin().sum().backward()
        optimizer.step()
        with pytest.raises(ValueError, match="earlier step that reproducible_hook did not add up"):
            model(x)
        gradients.discard()
        model(x)

    def test_micro_batches_of_in_place_module_match_whole_batch(self):
        model, x = small_model(), torch.randn(4, 1, 8, 8)
        model[3] = nn.Sequential(nn.SiLU(inplace=True), nn.Flatten())
        y = model(x)
        expected = torch.autograd.grad(y.sin().sum(), model[2].weight)
        with ReproducibleGradients(model, 2):
            result = model(x)
            torch.testing.assert_close(result, y)
            found = torch.autograd.grad(result.sin().sum(), model[2].weight)
        torch.testing.assert_close(found, expected)

    @pytest.mark.parametrize(("size", "training"), [(3, False), (0, True)])
    def test_forward_in_eval_mode_or_of_empty_batch_returns_whole_shape(self, size, training):
        linear = nn.Linear(2, 2).train(training)
        gradients = ReproducibleGradients(linear, 2)
        with torch.set_grad_enabled(training):
            assert linear(torch.randn(size, 2)).shape == (size, 2)
        assert not gradients_kept(gradients)

    def test_micro_batches_and_their_gradients_are_aligned(self):
        addresses = []

        class Watched(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                addresses.append(x.data_ptr())
                return x.clone()

            @staticmethod
            def backward(ctx, gradient):
                addresses.append(gradient.data_ptr())
                return gradient.clone()

        class Model(nn.Module):
            def forward(self, x):
                return Watched.apply(x)

        model = Model()
        ReproducibleGradients(model, 1)
        model(torch.randn(5, 3, requires_grad=True)).backward(torch.randn(5, 3))
        assert [each % 64 for each in addresses] == [0] * 10

    @pytest.mark.parametrize(
        "wrap",
        [
            lambda model: functools.partial(checkpoint, model, use_reentrant=False),
            lambda model: torch.compile(model, backend="eager"),
        ],
        ids=["checkpoint", "compile"],
    )
    def test_gradients_of_wrapped_call_have_same_bits(self, wrap):
        model, x, kept = small_model(), torch.randn(4, 1, 8, 8), []
        gradients = ReproducibleGradients(model, 2)
        for call in (model, wrap(model)):
            call(x).sin().sum().backward()
            kept.append(gradients_kept(gradients))
            gradients.discard()
        assert len(kept[0]) == 8
        assert all(torch.equal(*pair) for pair in zip(*kept, strict=True))


def calls_that_raise():
    """Yield a module, its arguments and words of the error."""
    x = torch.zeros(4, 2)
    yield nn.Linear(2, 2), (x[:3],), r"multiple of micro_batch=2 samples.*\[\(3, 2\)\]"
    yield nn.Bilinear(2, 2, 2), (x, x[:2]), r"shapes \[\(4, 2\), \(2, 2\)\]"
    yield cases.Product(2), (x,), "must return micro_batch=2 samples.*got tensor"
    for option in (
        Batch(x), [1, 2, 3, 4], {"lengths": (4, 3, 2, 1)}, ["a", "b", "c", "d"], np.arange(4.0), 4,
        object(),
    ):  # fmt: skip
        words = type(next(iter(option.values())) if isinstance(option, dict) else option).__name__
        yield WithOption(), (x, option), rf"called with a multiple.* of type {words}\b"
    yield WithOption(), (Batch(x),), "of type Batch"
    x = torch.tensor([[1.0, 1], [1, 1], [-1, -1], [-1, -1]])
    for result in (
        Batch,
        lambda y: (y, bool((y > 0).any())),
        lambda y: (y, len(y)),
        lambda y: (y, 2.0),
        lambda y: (y, y.detach().numpy()),
        lambda y: (y, [1.0] * len(y)),
        lambda y: [y] * (1 + int(y.sum() > 0)),
    ):
        module = nn.Linear(2, 2)
        nn.init.eye_(module.weight), nn.init.zeros_(module.bias)
        module.forward = lambda x, result=result, own=module.forward: result(own(x))
        yield module, (x,), "must return"


class TestErrors:
    @pytest.mark.parametrize(("module", "arguments", "words"), [*calls_that_raise()])
    def test_forward_with_unsplittable_arguments_or_result_raises_value_error(
        self, module, arguments, words
    ):
        with (
            ReproducibleGradients(module, 2),
            pytest.raises(backnorm.ArgumentValueError, match=words),
        ):
            module(*arguments)

    @pytest.mark.parametrize(
        "option",
        [None, True, 0.5, 3, "mean", torch.float32, {"size": [1, 2, 3]}, torch.device("cpu"), [1]],
    )
    def test_forward_passes_options_of_all_samples_to_module(self, option):
        module, x = WithOption(), torch.randn(4, 2)
        expected = module(x, option)
        with ReproducibleGradients(module, 2):
            torch.testing.assert_close(module(x, option=option), expected)
        assert module.option == option

    @pytest.mark.parametrize(
        ("arguments", "options", "words"),
        [
            ((nn.Linear(2, 2), 0), {}, "micro_batch: must be at least 1"),
            ((nn.Linear(2, 2), 1.5), {}, "micro_batch: must be an integer"),
            ((torch.zeros(2), 1), {}, "module: must be a torch.nn.Module"),
            ((object.__new__(DistributedDataParallel), 1), {}, "before it is wrapped"),
            ((nn.Sequential(nn.LSTM(2, 2)), 1), {}, "module: must have .* batches along axis 0"),
            ((cases.Sparse(), 1), {}, "module: must have dense gradients.* in 'table'"),
            ((nn.Linear(2, 2), 1), {"average": "no"}, "average: must be a boolean"),
            ((nn.Linear(2, 2), 1), {"exclude": nn.Linear(2, 2)}, "exclude: must be an iterable"),
            ((nn.Linear(2, 2), 1), {"exclude": ["0"]}, "exclude: must be an iterable"),
        ],
    )
    def test_constructor_with_invalid_argument_raises_error_of_argument(
        self, arguments, options, words
    ):
        with pytest.raises(backnorm.ArgumentError, match=words):
            ReproducibleGradients(*arguments, **options)
