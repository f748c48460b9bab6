"""Shared by the tests of several folders; holds no tests."""
