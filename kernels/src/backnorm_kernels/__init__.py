"""The engine of compiled kernels: each call fills in a record and makes one native call.

backnorm imports the module `engine`. Only the build imports the packages `kernels` and `build`; an
installed package does not have them. The build imports nothing of backnorm.
"""

__version__ = "0.1.0"
