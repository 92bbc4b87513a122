"""Bad usage on the command line, said as all bad input is: in one line with the remedy."""

from __future__ import annotations

import argparse
from typing import NoReturn


class UsageParser(argparse.ArgumentParser):
    """Bad usage is a ValueError of one line, not a page and an exit."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} ({self.prog} --help)")
