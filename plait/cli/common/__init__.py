"""What several commands share: options, help, progress, tables."""
