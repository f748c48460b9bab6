"""The judge of other implementations of the backward pass: `backnorm verify`.

``cases``       which inputs
``subjects``    what is judged, and how it is called
``_peers``      the packages that have a name, ``_onednn`` the C API of one
``_command``    a subject that is a program
``_child``      a process that runs a subject on cases, in memory between unreadable pages
``run``         starts children, survives their ends, grades what they returned
``findings``    from grades to sentences
``proof``       which wrong kernels a case rejects, and whether any
``_about``      a case, as tables
``_report``     tables, JSON, JUnit and Markdown
``audit``       what tests of others let through: `backnorm tolerance`; on ``audit_data``, by
                ``tolerances`` (how arrays are compared) and ``policies`` (the tests of projects)
"""
