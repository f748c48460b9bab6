"""The command line: parse what is asked, call the operators, render the results."""
