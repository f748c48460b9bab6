"""Test data for implementations of batch normalisation, and the error that is allowed."""
