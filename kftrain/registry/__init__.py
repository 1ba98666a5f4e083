"""Registry: models as versions in MLflow, by reference, and which of them is champion."""

from kftrain.registry.audit import AuditFinding, ComparedVersion, audit, compare
from kftrain.registry.promotion import Champion, champion, gate_and_promote, promote, remove_dead_writers, rollback
from kftrain.registry.register import RegisteredVersion, register

__all__ = [
    "register",
    "gate_and_promote",
    "champion",
    "promote",
    "rollback",
    "remove_dead_writers",
    "audit",
    "compare",
    "RegisteredVersion",
    "Champion",
    "AuditFinding",
    "ComparedVersion",
]
