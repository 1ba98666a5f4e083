"""Jobs on Kubernetes: created or adopted, watched to their end, deleted."""
