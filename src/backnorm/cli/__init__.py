"""The `backnorm` command: it parses files and options, calls operators and prints reports."""
