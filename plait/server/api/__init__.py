"""What every API shares: schemas, validation, replies."""
