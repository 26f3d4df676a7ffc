"""The parts of `train_nano_hybrid.py`: corpus, model, checkpoint and training loop of a small hybrid."""
