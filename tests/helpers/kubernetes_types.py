"""Documents held against the types of Kubernetes' own client."""


def fields_of(kind):
    """Field -> type, as the API names it."""
    from kubernetes import client

    model = getattr(client, kind)
    return {model.attribute_map[name]: of for name, of in model.openapi_types.items()}


def require_valid(kind, value, where=""):
    """Every key is known, every value of its type."""
    if kind.startswith("list["):
        assert isinstance(value, list), where
        for number, item in enumerate(value):
            require_valid(kind[5:-1], item, f"{where}[{number}]")
    elif kind.startswith("dict("):
        assert all(isinstance(item, str) for item in value.values()), where
    elif kind in ("str", "int", "bool"):
        assert type(value).__name__ == kind, where
    elif kind != "object":
        known = fields_of(kind)
        assert value.keys() <= known.keys(), (where, value.keys() - known.keys())
        for key, item in value.items():
            require_valid(known[key], item, f"{where}.{key}")
