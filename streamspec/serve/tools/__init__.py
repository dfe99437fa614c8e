"""Tools: how a chat template writes calls, the grammar of calls that are forced, and the calls in an answer."""
