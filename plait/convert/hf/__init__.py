"""Writing safetensors with config.json, as transformers reads them."""
