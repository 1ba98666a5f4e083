"""The Kubeflow Pipelines client: submission of runs."""
