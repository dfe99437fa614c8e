"""Sources of drafts that need no call of the model; `registry` lists them."""
