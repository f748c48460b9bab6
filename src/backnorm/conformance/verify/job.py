"""A run of `verify`, as it is ordered: a subject, the cases on which it is run, and options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from backnorm.conformance.battery import Case, Recipe
from backnorm.conformance.layers import LayerCase
from backnorm.conformance.verify.cases import Selection
from backnorm.conformance.verify.dialect_calls import received
from backnorm.conformance.verify.options import Options
from backnorm.conformance.verify.row_operators import RowOperator
from backnorm.conformance.verify.subjects import schema_of_subject
from backnorm.dialects.schema import OperatorSchema

__all__ = ["Job"]


@dataclass(frozen=True, slots=True)
class Job(Options):
    """A subject, the cases on which it is run, and the options of the run.

    Attributes
    ----------
    subject : str
        As on the command line, see :func:`backnorm.conformance.verify.subjects.subject_of`.
    selection : Selection
    files : bool
        Whether the subject is files of results, which cannot be run again.
    echo : bool
        Whether what the subject prints appears on standard error.
    """

    subject: str
    selection: Selection = field(default_factory=Selection)
    files: bool = False
    echo: bool = False

    @property
    def schema(self) -> OperatorSchema | RowOperator | None:
        """The rules of the operator whose signature the subject has."""
        return schema_of_subject(self.subject, self.selection.operation, self)

    def case(self, recipe: Recipe) -> Case:
        """Draw a case, with the numbers by which the subject is judged."""
        return self.received(recipe.case(self.selection.seed))

    def received(self, case: Case, options: Mapping[str, Any] | None = None) -> Case:
        """Return a case with the numbers by which the subject is judged. A layer is judged by its
        own `options`.
        """
        if options and isinstance(case, LayerCase):
            return case.with_options(**options)
        return case if self.schema is None else received(case, self.schema)
