"""A controller's process: it does the checks of `checks.py` that the test names, one a line."""

import json
import logging
import sys
import traceback

import pathwaysutils

from tests.local_pathways import checks


def main() -> None:
    logging.disable(logging.WARNING)
    pathwaysutils.initialize()
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = {"value": getattr(checks, name)(*arguments)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
