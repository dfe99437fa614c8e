"""KV caches: growth, and compaction of the rows of an accepted path."""
