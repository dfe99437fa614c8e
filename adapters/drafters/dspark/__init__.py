"""Block drafters in the form that others serve: DFlash, with a Markov head DSpark."""
