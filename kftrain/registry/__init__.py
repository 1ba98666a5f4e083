"""Registry: models as versions in MLflow, by reference, and which of them is champion."""

from typing import TYPE_CHECKING

from kftrain.core.lazy import attributes

if TYPE_CHECKING:
    from kftrain.registry.findings import AuditFinding, audit
    from kftrain.registry.promotion import (
        Champion,
        champion,
        decline,
        gate_and_promote,
        promote,
        remove_dead_writers,
        rollback,
    )
    from kftrain.registry.registration import RegisteredVersion, register
    from kftrain.registry.versions import ComparedVersion, ComparedVersions, compare, find_version

__all__ = [
    "register",
    "gate_and_promote",
    "champion",
    "promote",
    "decline",
    "rollback",
    "remove_dead_writers",
    "audit",
    "compare",
    "find_version",
    "RegisteredVersion",
    "Champion",
    "AuditFinding",
    "ComparedVersion",
    "ComparedVersions",
]

__getattr__ = attributes(
    __name__,
    {
        "register": "kftrain.registry.registration",
        "gate_and_promote": "kftrain.registry.promotion",
        "champion": "kftrain.registry.promotion",
        "promote": "kftrain.registry.promotion",
        "decline": "kftrain.registry.promotion",
        "rollback": "kftrain.registry.promotion",
        "remove_dead_writers": "kftrain.registry.promotion",
        "audit": "kftrain.registry.findings",
        "compare": "kftrain.registry.versions",
        "find_version": "kftrain.registry.versions",
        "RegisteredVersion": "kftrain.registry.registration",
        "Champion": "kftrain.registry.promotion",
        "AuditFinding": "kftrain.registry.findings",
        "ComparedVersion": "kftrain.registry.versions",
        "ComparedVersions": "kftrain.registry.versions",
    },
)
