"""The judge of other implementations of the backward or forward pass: `backnorm verify`.

``cases``       the inputs; ``_huge``: a case with more than 2**31 elements
``operations``  backward and forward, with the functions that grade and diagnose their results
``subjects``    the functions that are judged, and their calling conventions
``peers``       functions of other packages by name
``_command``    a subject that is a program
``_child``      the process that runs a subject, on arrays between unreadable pages (``_memory``)
``run``         starts children, handles their crashes and grades the outputs
``findings``    summarises grades as sentences
``_expected``   expected failures, and the reports of earlier runs
``proof``       finds the wrong kernels that a case rejects
``_about``      prints a case as tables
``_report``     tables, JSON, JUnit and Markdown
``export``      cases and results as files
``audit``       `backnorm tolerance`: finds the wrong kernels that a test accepts. ``audit_data``
                has the inputs on which the kernels are tested. ``tolerances`` has the comparisons
                of gradients that a test may use. ``policies`` has the tolerances with which other
                projects test.
"""
