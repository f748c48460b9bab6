"""``python -m backnorm`` is the ``backnorm`` command."""

from __future__ import annotations

from backnorm.cli.app import main

if __name__ == "__main__":
    main()
