"""KFP graphs: order and wiring only."""
