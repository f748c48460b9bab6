"""Takes the first steps with one framework: ``python first_steps.py FRAMEWORK RESULT.json``."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import backnorm
from backnorm.training.digits import batches, load_digits
from backnorm.training.frameworks import DTYPES, LAYERS, load
from backnorm.training.model import Settings
from backnorm.training.network import initial_weights, sites
from backnorm.training.session import compare_first_step

STEPS = 10
BATCH = 64
RATE = 0.05


def main(name, path):
    # One: threads of several processes that wait for each other awake would take minutes.
    backnorm.set_num_threads(1)
    framework = load(name)
    versions = framework.start(1)
    digits = load_digits()
    chosen = list(batches(digits, BATCH, 0, 0))[:STEPS]
    found = {"versions": versions, "first": {}, "losses": {}, "right": {}, "alone": {}}
    for dtype in DTYPES:
        settings = Settings(name, dtype, 1, 1, BATCH, 1)
        first = compare_first_step(framework, settings, *chosen[0])
        found["first"][dtype] = dataclasses.asdict(first) | {"failures": first.failures(dtype)}
    for dtype in ("float32", "float64"):
        trainers = {x: framework.build(x, initial_weights(0), dtype) for x in LAYERS}
        found["losses"][dtype] = {
            x: [trainer.step(images, labels, RATE)[0] for images, labels in chosen]
            for x, trainer in trainers.items()
        }
        found["right"][dtype] = {
            x: trainer.evaluate(digits.test_images, digits.test_labels)
            for x, trainer in trainers.items()
        }
    found["alone"] = {x: framework.normalise(x, sites(BATCH), "float32")() for x in LAYERS}
    Path(path).write_text(json.dumps(found))


main(*sys.argv[1:])
