"""The server: one page on which texts are denoised, filled and corrected, and the same over HTTP."""
