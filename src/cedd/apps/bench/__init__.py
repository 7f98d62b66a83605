"""Timing training steps and sampling, beside a textbook implementation of each."""
