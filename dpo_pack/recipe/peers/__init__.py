"""`dpopack recipe --from`: the rules for files of TRL, axolotl and LLaMA-Factory, the peers of dpo-pack.

This file finds the rule for a key; translate.py writes the recipe.
"""

from fnmatch import fnmatchcase

from dpo_pack.recipe.peers.axolotl import AXOLOTL
from dpo_pack.recipe.peers.llamafactory import LLAMAFACTORY
from dpo_pack.recipe.peers.rules import Rule, Table
from dpo_pack.recipe.peers.trl import TRL

TABLES: dict[str, Table] = {"trl": TRL, "axolotl": AXOLOTL, "llamafactory": LLAMAFACTORY}
NAMES = {"trl": "TRL", "axolotl": "axolotl", "llamafactory": "LLaMA-Factory"}
RELEASES = {
    "trl": "TRL 1.16",
    "axolotl": "axolotl at commit 067b021",
    "llamafactory": "LLaMA-Factory at commit ff6d4d1",
}


def find_rule(table: Table, name: str) -> Rule | None:
    """Returns the rule of `name`, else of the first pattern that fits it; None if neither exists."""
    patterns = (pattern for pattern in table if "*" in pattern and fnmatchcase(name, pattern))
    return table.get(name) or table.get(next(patterns, ""))


def our_word(name: str) -> str | None:
    """Returns a text for an error message: what replaces the key `name`; None if no table has it."""
    for peer, table in TABLES.items():
        if rule := table.get(name):
            if rule.keys:
                remark = f" ({rule.remark})" if rule.remark else ""
                return f"{NAMES[peer]}'s {name} is {' and '.join(rule.keys)} here{remark}"
            kind = "has no counterpart here" if rule.is_needed else "is not needed here"
            return f"{NAMES[peer]}'s {name} {kind}: {rule.remark}"
    return None
