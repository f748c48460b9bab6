"""Audit a test's tolerance: find wrong kernels that it accepts and right kernels that it rejects.

``data``        the inputs on which the kernels are tested
``tolerances``  the comparisons of gradients that a test may use
``policies``    the tolerances with which other projects test
"""

from backnorm.conformance.audit._audit import RIGHT, Audit, audit
from backnorm.conformance.audit._text import bounds, lines

__all__ = ["RIGHT", "Audit", "audit", "bounds", "lines"]
