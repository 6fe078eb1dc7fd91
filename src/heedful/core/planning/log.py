"""heedful's logger: dispatch decisions at level info, cache events at debug.

The environment variable HEEDFUL_LOG sets the level and, where the application has configured no
logging, prints to standard error.
"""

import logging

from heedful.core.base import settings
from heedful.core.planning.plan import Plan, explain

log = logging.getLogger("heedful")


def configure() -> None:
    """Applies the setting; without one, the application configures logging."""
    if not settings.is_set("log"):
        return
    log.setLevel(settings.get("log").upper())
    if not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        log.addHandler(handler)


def decision(plan: Plan) -> None:
    """Logs which kernels were chosen; called once per distinct call."""
    if log.isEnabledFor(logging.DEBUG):
        log.debug("planned\n%s", explain(plan))
    elif log.isEnabledFor(logging.INFO):
        backward = f", backward {plan.variant_of('backward').label}" if plan.backward else ""
        splits = f", {plan.num_splits} splits" if plan.num_splits > 1 else ""
        forward = plan.variant_of("forward").label
        log.info("[%s] -> %s%s%s", plan.problem.key(), forward, backward, splits)


configure()
