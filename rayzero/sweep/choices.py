"""Let `stage=2` choose an option of a Hydra group.

[Note: numbered options]
Hydra reads 2 as a number and refuses it: a group's choice must be a string. `stage='2'` would do,
but nobody should have to write it, and no sweeper writes it either. So each override passes
quote_choice on its way to Hydra: those of the command line in app.py, those that a sweeper made
in the launcher.
"""

import re

NUMBERED_CHOICE = re.compile(r"stage=(\d+)")


def quote_choice(override: str) -> str:
    """Write a number that chooses an option of the group `stage` as a string."""
    match = NUMBERED_CHOICE.fullmatch(override)
    return override if match is None else f"stage='{match[1]}'"
