"""Tests of the network, its averaged weights, their storage and the vocabulary head's kernels."""
