"""The version of Plait: the one place that says it; the wheel and `plait --version` read it here."""

__version__ = "0.1.0"
