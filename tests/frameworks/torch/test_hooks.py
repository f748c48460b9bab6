"""Gradients with the same bits however a batch is cut: sums, pieces, and networks that train."""

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
from backnorm.torch import ReproducibleGradients, exact_sums
from backnorm.torch.exact_sums import Part

from . import hook_cases as cases

DTYPES = torch.float32, torch.float64, torch.float16, torch.bfloat16


def same_bits(one, other):
    """Whether tensors, in dicts of one structure, have the same bits; NaN is NaN."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_bits(one[k], other[k]) for k in one)
    return torch.equal(one.nan_to_num(0.125), other.nan_to_num(0.125)) and torch.equal(
        one.isnan(), other.isnan()
    )


def added(processes, divisor=1.0):
    """Return the sum of contributions of processes, in their order, as `sum_of_all` makes it."""
    own = [Part(0, parts[0].clone()) for parts in processes]
    every = [
        [first, *(Part(0, each) for each in parts[1:])]
        for first, parts in zip(own, processes, strict=True)
    ]
    like = own[0].values
    exponents = torch.stack([exact_sums.largest_exponents(each, like) for each in every]).amax(0)
    total = torch.zeros(())
    for each in every:
        total = total + exact_sums.rounded_sums(each, exponents, like)
    return exact_sums.sums_to(like, total, divisor)


def contributions(dtype, count=12, size=400):
    """Return contributions of many magnitudes, some of which cancel."""
    found = torch.randn(count, size, dtype=torch.float64)
    if dtype is not torch.float16:
        # More than plain sums in float64 hold without rounding, which shows where terms cancel.
        found *= 2.0 ** torch.randint(-30, 30, found.shape)
        found[0, : size // 4] *= 2.0**30
    found[1, : size // 4] = -found[0, : size // 4]
    # Down to where the type has subnormal numbers alone, or zero.
    least = math.log2(torch.finfo(dtype).smallest_normal)
    found[:, size // 2 :] *= 2.0 ** torch.linspace(0, least - 4, size - size // 2).double().floor()
    return found.to(dtype)


class TestSums:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_order_and_cut_do_not_matter(self, dtype):
        found = contributions(dtype)
        expected = added([list(found)])
        for sizes in ((1,) * 12, (6, 6), (5, 4, 3), (1, 10, 1)):
            mixed = found[torch.randperm(len(found))]
            assert same_bits(added([list(each) for each in mixed.split(sizes)]), expected)
        plain = [functools.reduce(torch.add, found[torch.randperm(len(found))]) for _ in range(2)]
        assert not same_bits(*plain), "a sum that depends on the order would be seen"

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("divisor", [1, 4, 3])
    def test_near_the_exact_sum(self, dtype, divisor):
        found = contributions(dtype)
        sums, info = added([list(each) for each in found.split(4)], divisor), torch.finfo(dtype)
        lost = 80 if dtype is torch.float64 else 40
        # A float64 sum loses what is less than that; 16 bits are rounded to float32 before.
        least = Fraction(2) ** (-1042 if dtype is torch.float64 else -1074)
        # What is not a power of two rounds in float64 as well.
        also = 1 if dtype is torch.float64 and divisor == 3 else Fraction(1, 2**12)
        unit = Fraction(info.eps) / 2 * (1 + also)
        for column, value in zip(found.T.tolist(), sums.tolist(), strict=True):
            exact = sum(map(Fraction, column)) / divisor
            largest = max(abs(Fraction(each)) for each in column)
            allowed = len(column) * (largest / 2**lost + least)
            rounding = max(abs(exact) * unit, Fraction(info.smallest_normal) * unit)
            assert abs(Fraction(value) - exact) <= allowed + rounding + allowed * unit

    def test_one_rounding_where_nothing_is_lost(self):
        found = torch.randint(-(2**24), 2**24, (12, 500)) * 2.0 ** torch.randint(0, 15, (500,))
        found = found.float()
        sums = added([list(each) for each in found.split(3)], 2.0)
        exact = [sum(map(Fraction, column)) / 2 for column in found.T.tolist()]
        # Below 2**53, so that float64 has them.
        expected = torch.tensor([float(each) for each in exact], dtype=torch.float64).float()
        assert torch.equal(sums, expected)

    def test_as_many_as_there_may_be(self):
        """Of all bits that a quantum leaves, and of one sign: the sums on the way are exact."""
        found = torch.randint(2**23, 2**24, (exact_sums.MOST, 5)).float()
        found[::3] *= 2.0**-16
        parts, own = [Part(0, each) for each in found], found[0]
        sums = exact_sums.rounded_sums(parts, exact_sums.largest_exponents(parts, own), own)
        assert sums[0].tolist() == [sum(map(Fraction, column)) for column in found.T.tolist()]

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_what_is_not_finite(self, dtype):
        inf, nan, most = torch.inf, torch.nan, torch.finfo(dtype).max
        rows = [
            ([1, inf, 2], inf), ([-inf, 1, 1], -inf), ([inf, -inf, 1], nan), ([nan, 1, inf], nan),
            ([most, most, -most], most), ([most, most, 0], inf), ([-most, -most, 0], -inf),
            ([most, inf, -most], inf), ([0.0, -0.0, 0], 0), ([most, 1, -most], 1),
        ]  # fmt: skip
        found = torch.tensor([row for row, _ in rows], dtype=dtype).T
        expected = torch.tensor([total for _, total in rows], dtype=dtype)
        if dtype is not torch.float16:
            # 1 is less than a quantum of the largest; float16's numbers all lie within 40 bits.
            expected[-1] = 0
        for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
            assert same_bits(added([[each] for each in found[list(order)]]), expected)
            assert same_bits(added([list(found[list(order)])]), expected)
        # The average of what is too large when added.
        assert added([[found[0, 4:6]], [found[1, 4:6]]], 2).tolist() == [most, most]

    def test_blocks_do_not_matter(self, monkeypatch):
        found = contributions(torch.float32, 3, 1000)
        expected = added([list(found)])
        monkeypatch.setattr(exact_sums, "_BLOCK", 7)
        assert same_bits(added([list(found)]), expected)


@pytest.fixture(scope="module")
def ran(processes):
    return processes(cases, 4, "networks, orders, refused, counts")


class TestNetworks:
    @pytest.mark.parametrize("name", sorted(cases.CASES.keys() - {"no pieces", "no hook"}))
    def test_the_same_bits_for_any_number_of_processes(self, name, ran):
        every = [each for one in ran for each in one["networks"][name].values()]
        sizes = [len(parts) for parts in cases.CASES[name].parts if parts]
        assert len(every) == sum(sizes)
        for each in every[1:]:
            assert same_bits(each, every[0])

    @pytest.mark.parametrize("name", ["no pieces", "no hook"])
    def test_without_one_of_both_bits_differ(self, name, ran):
        alone, *others = ran[0]["networks"][name].values()
        assert any(not same_bits(alone, other) for other in others)

    def test_it_is_the_step_that_others_take(self, ran):
        networks = ran[0]["networks"]
        for name, value in networks["no hook"][1].items():
            for other in ("equal parts", "channels last", "averaged"):
                torch.testing.assert_close(networks[other][1][name], value, rtol=1e-4, atol=1e-5)


class TestHook:
    def test_processes_in_any_order(self, ran):
        first, *others = ran[0]["orders"]["ours"]
        assert all(same_bits(first, other) for other in others)
        assert all(same_bits(one["orders"]["ours"], ran[0]["orders"]["ours"]) for one in ran)
        first, *others = ran[0]["orders"]["none"]
        assert any(not same_bits(first, other) for other in others)

    def test_an_average_as_exact_as_it_says(self, ran):
        every, found = cases.gradients(), ran[0]["orders"]["ours"][0]
        finite = every.isfinite().all(0)
        for column, value in zip(every.T[finite].tolist(), found[finite].tolist(), strict=True):
            exact = sum(map(Fraction, column)) / 4
            largest = max(abs(Fraction(each)) for each in column)
            allowed = largest / 2**40 + abs(exact) / 2**24 + Fraction(1, 2**150)
            assert abs(Fraction(value) - exact) <= allowed
        assert found[600].isinf()
        assert found[601].isnan()
        assert found[602].isnan()
        assert found[603] == torch.tensor(3e38)

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("elsewhere", "not of pieces, of 'linear.weight', 'linear.bias'"),
            ("too many", "up to 20 gradients to add; accepted: at most 16"),
            ("a state", "'a state'.*ReproducibleGradients"),
        ],
    )
    def test_refused_in_every_process(self, name, words, ran):
        for one in ran:
            assert re.search(words, one["refused"][name])

    def test_most_gradients_are_added_and_more_are_refused(self, ran):
        for one in ran:
            counts = {key: value for key, value in one["counts"].items() if type(key) is tuple}
            assert len(counts) == 8
            for (_, count), (found, expected) in counts.items():
                if count > 2048:
                    assert re.search("up to 8196 gradients to add; accepted: at most 8192", found)
                else:
                    assert found == expected

    def test_sparse_gradient_is_refused(self, ran):
        for one in ran:
            words = r"parameter of shape \(10, 4\); got torch.sparse_coo"
            assert re.search(words, one["counts"]["sparse"])


class TestWithBatchNormalisation:
    @pytest.mark.long
    def test_200_steps_in_any_number_of_processes(self, processes):
        first, *others = states(processes(cases, 4, "normalised"), "normalised")
        assert len(others) == 2 + 3 + 4
        for each in others:
            assert same_bits(each, first)

    @pytest.mark.long
    def test_with_other_layers_bits_differ(self, processes):
        first, *others = states(processes(cases, 4, "not reproducible"), "not reproducible")
        assert any(not same_bits(each, first) for each in others)


def states(ran, name):
    """Return what became of a network in every process of every group."""
    return [each for one in ran for each in one[name].values()]


@dataclasses.dataclass
class Batch:
    x: torch.Tensor


class Beside(nn.Module):
    """Takes something beside samples."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x, beside=None):
        self.beside = beside
        return self.linear(x)


class TestPieces:
    def model(self):
        torch.manual_seed(0)
        layers = nn.Conv2d(1, 3, 3), nn.SiLU(), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(108, 2)
        return nn.Sequential(*layers)

    def test_outputs_and_gradients_of_inputs_are_those_of_the_module(self):
        x = torch.randn(8, 1, 8, 8, requires_grad=True)
        expected = self.model()(x)
        (dx,) = torch.autograd.grad(expected.sin().sum(), x)
        model = self.model()
        with ReproducibleGradients(model, 4) as gradients:
            y = model(x)
            torch.testing.assert_close(y, expected)
            torch.testing.assert_close(torch.autograd.grad(y.sin().sum(), x), (dx,))
        assert not gradients._kept

    def test_nothing_of_a_module_changes(self):
        model = self.model()
        names, state = [*model.named_parameters()], copy.deepcopy(model.state_dict())
        called = []
        model[0].register_forward_hook(lambda *_: called.append(1))
        gradients = ReproducibleGradients(model, 2)
        assert all(
            one[0] == other[0] and one[1] is other[1]
            for one, other in zip(model.named_parameters(), names, strict=True)
        )
        model.load_state_dict(state)
        model(torch.randn(8, 1, 8, 8))
        assert called == [1], "hooks have the whole batch"
        gradients.remove()
        assert not any("forward" in vars(each) for each in model.modules())
        gradients.remove()

    def test_a_forward_of_its_own_comes_back(self):
        linear = nn.Linear(2, 2)
        own = linear.forward
        linear.forward = lambda x: own(x) + 1
        before = linear.forward
        x = torch.randn(4, 2)
        expected = linear(x)
        with ReproducibleGradients(linear, 2):
            torch.testing.assert_close(linear(x), expected)
        assert linear.forward is before

    def test_copies_are_of_their_own(self):
        model = self.model()
        gradients = ReproducibleGradients(model, 2)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            other(torch.randn(4, 1, 8, 8)).sum().backward()
            assert not gradients._kept
            assert other[0].forward.module is other[0]

    def test_what_is_kept_of_steps_that_are_given_up(self):
        linear = nn.Linear(2, 2)
        gradients = ReproducibleGradients(linear, 1)
        linear(torch.randn(3, 2)).sum().backward()
        assert [len(each) for each in gradients._kept.values()] == [3, 3]
        assert not linear.weight.grad.any()
        gradients.discard()
        assert not gradients._kept

    def test_evaluation_is_not_cut(self):
        linear = nn.Linear(2, 2).eval()
        ReproducibleGradients(linear, 2)
        with torch.no_grad():
            assert linear(torch.randn(3, 2)).shape == (3, 2)

    def test_an_empty_part(self):
        linear = nn.Linear(2, 2)
        ReproducibleGradients(linear, 2)
        linear(torch.randn(0, 2)).sum().backward()
        assert not linear.weight.grad.any()

    def test_memory_is_aligned_alike(self):
        """A slice of a batch, and of its gradient, as if it were all of it."""
        found = []

        class Watched(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                found.append(x.data_ptr() % 64)
                return x.clone()

            @staticmethod
            def backward(ctx, gradient):
                found.append(gradient.data_ptr() % 64)
                return gradient.clone()

        class Model(nn.Module):
            def forward(self, x):
                return Watched.apply(x)

        model = Model()
        ReproducibleGradients(model, 1)
        model(torch.randn(5, 3, requires_grad=True)).backward(torch.randn(5, 3))
        assert found == [0] * 10

    def test_recomputed(self):
        model, x = nn.Sequential(nn.Linear(3, 3), nn.GELU()), torch.randn(4, 3)
        gradients, kept = ReproducibleGradients(model, 2), []
        for call in (model, functools.partial(checkpoint, model, use_reentrant=False)):
            call(x).sin().sum().backward()
            kept.append([each for found in gradients._kept.values() for each in found])
            gradients.discard()
        assert len(kept[0]) == len(kept[1]) == 4
        assert all(torch.equal(*pair) for pair in zip(*kept, strict=True))

    def test_compiled(self):
        model = self.model()
        gradients = ReproducibleGradients(model, 2)
        x = torch.randn(4, 1, 8, 8)
        expected = model(x)
        expected.sin().sum().backward()
        kept = gradients._kept.copy()
        gradients.discard()
        compiled = torch.compile(model, backend="eager")
        y = compiled(x)
        assert torch.equal(y, expected)
        y.sin().sum().backward()
        assert all(
            torch.equal(*pair)
            for p, found in gradients._kept.items()
            for pair in zip(found, kept[p], strict=True)
        )
        assert gradients._kept.keys() == kept.keys()

    @pytest.mark.parametrize(
        ("make", "inputs", "words"),
        [
            (lambda: nn.Linear(2, 2), (torch.zeros(3, 2),), "3 samples.*multiple of micro_batch"),
            (lambda: nn.Bilinear(2, 2, 2), (torch.zeros(4, 2), torch.zeros(2, 2)), "different num"),
            (lambda: cases.Given(2), (torch.zeros(4, 2),), "no axis of samples"),
        ],
    )
    def test_calls_that_are_refused(self, make, inputs, words):
        model = make()
        ReproducibleGradients(model, 2)
        with pytest.raises(backnorm.ArgumentValueError, match=words):
            model(*inputs)

    @pytest.mark.parametrize(
        ("argument", "words"),
        [
            (Batch(torch.zeros(4, 2)), "Batch"),
            ([1, 2, 3, 4], "list"),
            ({"lengths": (4, 3, 2, 1)}, "tuple"),
            (["a", "b", "c", "d"], "list"),
            (np.arange(4.0), "ndarray"),
            (4, "4"),
            (object(), "object"),
        ],
    )
    @pytest.mark.parametrize("by_name", [False, True])
    def test_argument_of_each_sample_is_refused(self, argument, words, by_name):
        module = Beside()
        ReproducibleGradients(module, 2)
        x = torch.zeros(4, 2)
        with pytest.raises(backnorm.ArgumentValueError, match=f"'beside'.*{words}"):
            module(x, beside=argument) if by_name else module(x, argument)

    def test_dataclass_alone_is_refused(self):
        module = Beside()
        ReproducibleGradients(module, 2)
        with pytest.raises(backnorm.ArgumentValueError, match=r"'x'.*Batch"):
            module(Batch(torch.zeros(4, 2)))

    @pytest.mark.parametrize(
        "argument",
        [None, True, 0.5, 3, "mean", torch.float32, {"size": [1, 2, 3]}, torch.device("cpu"), [1]],
    )
    def test_argument_of_all_samples_is_shared(self, argument):
        module = Beside()
        x = torch.randn(4, 2)
        expected = module(x, argument)
        with ReproducibleGradients(module, 2):
            torch.testing.assert_close(module(x, argument), expected)
        assert module.beside == argument

    @pytest.mark.parametrize(
        "result",
        [
            Batch,
            lambda y: (y, bool((y > 0).any())),
            lambda y: (y, len(y)),
            lambda y: (y, 2.0),
            lambda y: (y, y.detach().numpy()),
            lambda y: (y, [1.0] * len(y)),
            lambda y: [y] * (1 + int(y.sum() > 0)),
        ],
    )
    def test_result_of_each_piece_is_refused(self, result):
        module = nn.Linear(2, 2)
        own = module.forward
        module.forward = lambda x: result(own(x))
        with torch.no_grad():
            module.weight.copy_(torch.eye(2))
            module.bias.zero_()
        ReproducibleGradients(module, 2)
        with pytest.raises(backnorm.ArgumentValueError, match="returns"):
            module(torch.tensor([[1.0, 1], [1, 1], [-1, -1], [-1, -1]]))

    @pytest.mark.parametrize(
        ("arguments", "options", "words"),
        [
            ((nn.Linear(2, 2), 0), {}, "micro_batch: must have a sample"),
            ((nn.Linear(2, 2), 1.5), {}, "micro_batch: must be an integer"),
            ((torch.zeros(2), 1), {}, "module: is no model"),
            ((object.__new__(DistributedDataParallel), 1), {}, "before it is wrapped"),
            ((nn.LSTM(2, 2), 1), {}, "batch along axis 1"),
            ((cases.Sparse(), 1), {}, "sparse gradients, of 'weight' in 'table'"),
            ((nn.Linear(2, 2), 1), {"average": "no"}, "average: must be a boolean"),
            ((nn.Linear(2, 2), 1), {"exclude": nn.Linear(2, 2)}, "exclude: must be modules"),
            ((nn.Linear(2, 2), 1), {"exclude": ["0"]}, "exclude: must be modules"),
        ],
    )
    def test_arguments_that_are_refused(self, arguments, options, words):
        with pytest.raises(backnorm.ArgumentError, match=words):
            ReproducibleGradients(*arguments, **options)
