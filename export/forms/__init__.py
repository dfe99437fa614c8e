"""Forms that other engines read, in place of a bundle: `export --as`."""
