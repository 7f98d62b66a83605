"""`cedd adapt`: `cedd train adapt` for an autoregressive model."""

from __future__ import annotations

from cedd.cli.train import run as run
