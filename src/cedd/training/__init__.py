"""Training: configuration, the loop, checkpoints, and the folder that a trained model lives in."""
