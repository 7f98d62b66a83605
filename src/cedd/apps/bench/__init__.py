"""Timing training steps and sampling, with a textbook implementation of each."""
