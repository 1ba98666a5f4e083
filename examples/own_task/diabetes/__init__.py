"""A project of its own that trains with kftrain: records, a task and a model for scikit-learn's diabetes data."""
