"""Answers of the target from elsewhere: its own exported bundle, or a server that speaks OpenAI's protocol."""
