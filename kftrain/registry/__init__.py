"""Registry: models as versions in MLflow, by reference, and which of them is champion."""

from typing import TYPE_CHECKING

from kftrain.core.lazy import attributes

if TYPE_CHECKING:
    from kftrain.registry.findings import AuditFinding as AuditFinding
    from kftrain.registry.findings import audit as audit
    from kftrain.registry.promotion import Champion as Champion
    from kftrain.registry.promotion import champion as champion
    from kftrain.registry.promotion import decline as decline
    from kftrain.registry.promotion import gate_and_promote as gate_and_promote
    from kftrain.registry.promotion import promote as promote
    from kftrain.registry.promotion import remove_dead_writers as remove_dead_writers
    from kftrain.registry.promotion import rollback as rollback
    from kftrain.registry.registration import RegisteredVersion as RegisteredVersion
    from kftrain.registry.registration import register as register
    from kftrain.registry.versions import ComparedVersion as ComparedVersion
    from kftrain.registry.versions import ComparedVersions as ComparedVersions
    from kftrain.registry.versions import compare as compare
    from kftrain.registry.versions import find_version as find_version

__getattr__ = attributes(
    __name__,
    {
        "kftrain.registry.registration": ("register", "RegisteredVersion"),
        "kftrain.registry.promotion": (
            "gate_and_promote",
            "champion",
            "promote",
            "decline",
            "rollback",
            "remove_dead_writers",
            "Champion",
        ),
        "kftrain.registry.findings": ("audit", "AuditFinding"),
        "kftrain.registry.versions": ("compare", "find_version", "ComparedVersion", "ComparedVersions"),
    },
)
