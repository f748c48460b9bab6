"""The judge of other implementations of the backward or forward pass: `backnorm verify`.

A run is a pipe. Each stage takes what the one above it returns:

``cases``       the recipes of the cases that are selected; no data are drawn. ``grid`` has those of
                special values, options and shapes, ``draws`` the random ones of a budget
``run``         starts workers, which may crash, and collects the verdicts; ``options`` are those
                that the command passes
``_worker``     the process that draws cases and calls a subject, on arrays in ``_memory``; its
                ``_events`` are lines of JSON, ``_segfault`` the access to memory that ended it
``verdicts``    judges the outputs of a case: grades and the diagnosis
``findings``    summarises verdicts as sentences; ``conditions`` finds what failing cases have in
                common
``report``      findings, counts, and the known failures of a file
``renderers``   a report as text, JSON, JUnit, Markdown; a case as tables

Beside the pipe:

``operations``  passes and normalisations, with the functions that grade and diagnose their results,
                and the wrong kernels that a case rejects; their ``names``
``subjects``    the functions that are judged, and their calling conventions; ``modules`` has layers
                with tensors of their own, ``frameworks`` the libraries of these layers, ``tensors``
                what is passed in the place of arrays
``dialect_calls`` a case as the call of a dialect's operator, or of an operator of other
                normalisations (``row_operators``)
``peers``       functions of other packages by name; ``_row_peers``: those of other normalisations
``_command``    a subject that is a program; ``_solution``: a solution of a problem of
                flashinfer-bench
``export``      cases as files: as arrays and a manifest (``files``, which also judges results), or
                in formats of other projects (``_flashinfer``, ``_hipdnn``, ``_mlir``); the names
                of arrays are in ``_file_cases``
"""
