"""The judge of other implementations of the backward pass: `backnorm verify`.

``cases``       which inputs
``subjects``    what is judged, and how it is called
``child``       a process that runs a subject on cases, in memory between unreadable pages
``run``         starts children, survives their ends, grades what they returned
``findings``    from grades to sentences
``report``      tables, JSON, JUnit and Markdown
"""
