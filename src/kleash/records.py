"""The jobs of ``kleash.jobs`` and the results of ``kleash.store`` under one name, for users of the library."""

from kleash import jobs, store
from kleash.jobs import *  # noqa: F403
from kleash.store import *  # noqa: F403

__all__ = sorted([*jobs.__all__, *store.__all__])
