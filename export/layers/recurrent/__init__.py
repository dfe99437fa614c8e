"""Layers with a recurrent state: what is around the states, and the states of a call's rows."""
