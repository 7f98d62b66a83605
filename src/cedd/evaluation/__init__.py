"""Evaluation: perplexity, generative perplexity, spelling."""
