"""Tests of cedd. The folders mirror src/cedd; reference/ is the dense oracle."""
