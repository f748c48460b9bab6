"""Other libraries, beside which backnorm is judged and timed: calls and conversions."""
