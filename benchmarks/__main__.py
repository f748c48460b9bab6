"""``python -m benchmarks`` is the benchmark; from the root of the repository."""

from __future__ import annotations

from benchmarks.command import main

if __name__ == "__main__":
    main()
