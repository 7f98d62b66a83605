"""The network, its averaged weights, and the folders that models are stored in."""
