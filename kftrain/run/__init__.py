"""A run's folder, for launchers and workers: paths, documents, attempts, commits. No torch, no Kubernetes."""
