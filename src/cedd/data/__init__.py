"""Text in, blocks of tokens out: tokenizers, corpora, packing, batches, evaluation sets."""
