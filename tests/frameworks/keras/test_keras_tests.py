"""Keras's own tests, from the installed package, with our layer in the place of Keras's."""

from __future__ import annotations

import importlib
import unittest

import keras
import pytest

from backnorm.keras import BatchNormalization
from backnorm.keras import layer as module

pytestmark = pytest.mark.filterwarnings("ignore")

# Module, class and beginning of the names of tests; those of export with TensorFlow alone.
SUITES = [
    ("layers.normalization.batch_normalization_test", "BatchNormalizationTest", "test"),
    ("layers.core.wrapper_test", "WrapperTest", "test_wrapper_basics"),
    ("dtype_policies.dtype_policy_map_test", "DTypePolicyMapTest", "test_basic_usage"),
    ("trainers.trainer_test", "TestTrainer", "test_symbolic_build"),
    ("export.saved_model_test", "ExportSavedModelTest", "test_standard_model_export"),
    ("export.saved_model_test", "ExportArchiveTest", "test_layer_export"),
]
# Of Keras's own parameter sets one stays in `make test`: masks and exports are Keras's business.
REPEATED = (*(f"masked_values{k}" for k in range(1, 6)), "export_sequential", "export_subclass")
OPTIONS = [
    {},
    {"axis": 1, "momentum": 0.5},
    {"axis": -2, "center": False},
    {"scale": False, "beta_regularizer": "l2"},
    {"gamma_constraint": "non_neg", "epsilon": 0.1},
    {"renorm": True},
    {"dtype": "mixed_bfloat16"},
    {"trainable": False},
]


class Layers:
    """The layers of Keras, but for one."""

    def __init__(self, ours):
        self.BatchNormalization = ours

    def __getattr__(self, name):
        return getattr(keras.layers, name)


def imported(name):
    return importlib.import_module(f"keras.src.{name}")


def cases():
    for file, name, start in SUITES:
        if file.startswith("export") and keras.backend.backend() != "tensorflow":
            continue
        suite = getattr(imported(file), name)
        for test in unittest.TestLoader().getTestCaseNames(suite):
            if test.startswith(start):
                marks = [pytest.mark.long] if test.endswith(REPEATED) else []
                yield pytest.param(file, suite, test, id=f"{name}.{test}", marks=marks)


def run(file, suite, test, ours, monkeypatch):
    monkeypatch.setattr(imported(file), "layers", Layers(ours))
    try:
        suite(test).debug()
    except unittest.SkipTest as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize(("file", "suite", "test"), list(cases()))
def test_case_of_keras_passes(file, suite, test, monkeypatch):
    run(file, suite, test, BatchNormalization, monkeypatch)


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", [(2, 5, 3), (2, 4, 4, 3)], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_layer_passes_run_layer_test_of_keras(options, shape):
    values = 5 if options.get("renorm") else 2
    parameters = options.get("center", True) + options.get("scale", True)
    frozen = not options.get("trainable", True)
    keras.src.testing.TestCase().run_layer_test(
        BatchNormalization,
        init_kwargs=options,
        call_kwargs={"training": True},
        input_shape=shape,
        expected_output_shape=shape,
        expected_output_dtype="bfloat16" if "dtype" in options else "float32",
        expected_num_trainable_weights=0 if frozen else parameters,
        expected_num_non_trainable_weights=values + (parameters if frozen else 0),
        expected_num_seed_generators=0,
        expected_num_losses=int("beta_regularizer" in options),
        supports_masking=True,
    )


def test_keras_tests_fail_with_wrong_layer(monkeypatch):
    """Keras's tests call backnorm's layer: a layer that is off by a hundredth fails them."""
    file, name, _ = SUITES[0]
    original = module.batch_norm

    def wrong(*args, **kwargs):
        y, mean, variance = original(*args, **kwargs)
        return y * 1.01, mean, variance

    monkeypatch.setattr(module, "batch_norm", wrong)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        run(file, getattr(imported(file), name), "test_trainable_behavior", BatchNormalization,
            monkeypatch)  # fmt: skip
