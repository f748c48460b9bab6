"""Libraries that are no Python packages, beside which backnorm is judged and timed."""
