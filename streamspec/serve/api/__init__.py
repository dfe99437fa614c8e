"""Parts of OpenAI's API: fields of messages and tools, calls of tools in answers."""
