"""What drafts come from without a call of the model; `registry` has them all."""
