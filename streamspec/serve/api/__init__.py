"""OpenAI's API: what requests of each path mean to the runtime, and what its answers look like."""
