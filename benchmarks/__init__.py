"""The benchmark: workloads, contestants in processes of their own, turns, a table and a plot."""
