"""How tokens are chosen: sampling parameters, and the state of a grammar. Token ids and logits, no model."""
