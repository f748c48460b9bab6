"""What the reports of all commands share: the page, the look of plots, how numbers read.

Importing this loads neither matplotlib nor Jinja: only drawing needs them.
"""
