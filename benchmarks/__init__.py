"""Time backnorm and other implementations in turns, and write a table and a plot."""
