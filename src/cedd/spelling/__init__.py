"""Spelling correction: how text is corrupted, tokens are scored, changes are decided, and all of it is measured."""
