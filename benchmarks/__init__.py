"""The benchmark: workloads, contestants, rounds in turns, and the report."""
