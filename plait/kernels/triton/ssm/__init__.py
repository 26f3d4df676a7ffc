"""Recurrent layers: convolutions, scans and the delta rule."""
