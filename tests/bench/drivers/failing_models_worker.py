"""The worker of `python -m benchmarks models`, where PyTorch's layers fail."""

from __future__ import annotations

from benchmarks.child import serve_parent
from benchmarks.models import of_torch, worker


class _Step(of_torch._Step):
    def __init__(self, case, variant, model, x):
        if variant == "torch":
            raise RuntimeError("no memory")
        super().__init__(case, variant, model, x)


if __name__ == "__main__":
    of_torch._Step = _Step
    serve_parent(worker.serve)
