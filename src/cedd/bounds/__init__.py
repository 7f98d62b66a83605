"""Bounds on the negative log-likelihood: their integrand, their estimate with an interval, their exact value."""
