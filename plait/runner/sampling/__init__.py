"""From logits to tokens: settings on the device, draws, log-probabilities."""
