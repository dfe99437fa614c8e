"""From data to token rows: rendering, tokenizing in batches, flat arrays on disk, and the draw of validation rows."""
