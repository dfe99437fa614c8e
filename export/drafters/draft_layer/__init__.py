"""Draft layers: Jakiro, and EAGLE, MTP and Hydra as settings of it."""
