"""Audits every function of both batteries and prints them as JSON, name to audit.

Run as a process of its own: the shape checks of a test run make an audit five times as slow.
"""

import json
import warnings

import faulty_functions
import faulty_variations

from kleash.auditing import audit
from kleash.records import Audit

FAULTY_FUNCTIONS = {**faulty_functions.FAULTY_FUNCTIONS, **faulty_variations.FAULTY_FUNCTIONS}
RIGHT_FUNCTIONS = {**faulty_functions.RIGHT_FUNCTIONS, **faulty_variations.RIGHT_FUNCTIONS}


def audits() -> dict[str, Audit]:
    """The audit of every function, by name; the wrong ones first."""
    wrong = {
        name: audit(faulty.make(), faulty.convention, name=name) for name, faulty in FAULTY_FUNCTIONS.items()
    }
    return wrong | {name: audit(*right, name=name) for name, right in RIGHT_FUNCTIONS.items()}


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # what the audited functions warn of is theirs
    print(json.dumps({name: audited.to_json() for name, audited in audits().items()}))
