"""Judging an implementation of batch normalisation: data to try it on, and the error allowed."""
