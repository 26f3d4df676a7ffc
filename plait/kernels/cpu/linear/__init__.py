"""Linear layers: layouts of packed weights, and products with them."""
