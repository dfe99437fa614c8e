"""A draft layer that drafts token after token: Jakiro, EAGLE, multi-token prediction and Hydra."""
