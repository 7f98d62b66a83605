"""Applications built on the core: correction of words, the HTTP server, reports and timing. The core imports none."""
