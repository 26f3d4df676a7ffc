"""Memory of sequences: blocks, recurrent state, prefixes."""
