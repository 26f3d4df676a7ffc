"""`python -m plait` is `plait`."""

from __future__ import annotations

from plait.cli.main import main

main()
