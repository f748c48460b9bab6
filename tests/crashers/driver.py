"""Run every case in this process and print a line of JSON before and after each.

After a crash the last line names the case.
"""

from __future__ import annotations

import json
import warnings

from backnorm import BacknormError

from .cases import Case, all_cases


def outcome(case: Case) -> dict[str, object]:
    try:
        case.run()
    except Exception as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        ours = isinstance(error, BacknormError)
        return {"error": str(error) or repr(error), "kinds": kinds, "ours": ours}
    return {"error": None}


def main() -> None:
    warnings.simplefilter("error")
    for case in all_cases():
        print(json.dumps({"begins": case.name}), flush=True)
        print(json.dumps({"case": case.name, **outcome(case)}), flush=True)


if __name__ == "__main__":
    main()
