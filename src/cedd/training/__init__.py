"""Training: configuration, the loop with its hooks, optimizers, checkpoints, several ranks."""
