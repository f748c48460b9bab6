"""The command: parse files and options, call the operators, print reports."""
