"""The vocabulary head with its loss, in chunks of rows: never more than one [chunk, V], forward and backward."""
