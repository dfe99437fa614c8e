"""JSON schemas in the terms of the grammar library. Needed with the extra `grammar` alone."""
