"""Audits every function of both batteries and prints them as JSON, name to audit.

Run as a process of its own: the shape checks of a test run make an audit five times as slow.
"""

import json
import warnings

import battery
import battery_varied

from kleash.auditing import audit
from kleash.records import Audit

PLANTS = {**battery.PLANTS, **battery_varied.PLANTS}
RIGHT_ONES = {**battery.RIGHT_ONES, **battery_varied.RIGHT_ONES}


def audits() -> dict[str, Audit]:
    """The audit of every function, by name; the wrong ones first."""
    wrong = {name: audit(plant.make(), plant.convention, name=name) for name, plant in PLANTS.items()}
    return wrong | {name: audit(*right, name=name) for name, right in RIGHT_ONES.items()}


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # what the audited functions warn of is theirs
    print(json.dumps({name: audited.to_json() for name, audited in audits().items()}))
