"""Parts of what `plait info` shows, each as plain values and in lines for a terminal."""
