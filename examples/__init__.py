"""Runnable examples of the extension."""
