"""What the `backnorm` command starts with: it ends without a traceback from the first moment.

A module beside the package, because importing anything of the package imports all of it. While that
takes its quarter of a second, SIGINT does what it does to any other program; then
`backnorm.cli.signals` sees to it.
"""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def main() -> None:
    """Run the command and exit."""
    from backnorm.cli.app import main as run

    run()
