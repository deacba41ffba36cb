"""Conversations of messages, and the templates that write them as texts."""
