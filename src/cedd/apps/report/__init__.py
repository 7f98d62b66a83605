"""Reports: a run measured and written as one self-contained page, and several runs compared."""
